"""A model that replays small steps from CUDA graphs, since launching them takes longer than
computing them.

Decode batches, with drafts too, are replayed whole (`DecodeGraphs`), other steps between their
attention calls (`PieceGraphs`), up to the captured sizes; steps with adapters by graphs of their
own. Larger steps compute longer than their launch takes. `Graph` and `GraphMaker` are a small
protocol over CUDA's graphs, so that everything else can be tested without a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.config import CudagraphMode, EngineConfig, SchedulerConfig
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.language_model import NUM_VERIFY_ROWS, LanguageModel, StepOutput
from penstock.engine.models.torch_model import TorchModel
from penstock.engine.runner.device import resolve_cudagraph_mode
from penstock.kernels.paged_layout import PagedLayout
from penstock.kernels.reference.lora import LoraRows
from penstock.kernels.token_masks import TokenMasks
from penstock.kernels.torch_operations import TorchStep
from penstock.kernels.torch_program import Rows

_MAX_SIZE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """Sizes to capture, ascending.

    Attributes:
        decodes: sequences of a batch in which each has one token.
        verifications: of one in which they have up to `num_drafts` drafts, too.
        pieces: tokens of any other step.
    """

    decodes: tuple[int, ...] = ()
    verifications: tuple[int, ...] = ()
    num_drafts: int = 0
    pieces: tuple[int, ...] = ()

    @classmethod
    def of(cls, mode: CudagraphMode, scheduler: SchedulerConfig) -> GraphSizes:
        if mode == "none":
            return cls()
        decodes = decode_sizes(scheduler.max_num_seqs)
        pieces = piece_sizes(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        if mode == "full":
            speculation = scheduler.speculation
            if speculation is None or speculation.method == "auto":
                return cls(decodes=decodes, pieces=pieces)
            num_drafts = speculation.num_speculative_tokens
            return cls(
                decodes=decodes,
                verifications=verification_sizes(decodes, num_drafts),
                num_drafts=num_drafts,
                pieces=pieces,
            )
        few = (size for size in decodes if size < pieces[0])
        return cls(pieces=(*few, *pieces))


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Sizes so close that a batch is padded by fewer than 8 sequences (16 above 256)."""
    largest = min(max_num_seqs, _MAX_SIZE)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, largest, 16))
    return (*(size for size in sizes if size < largest), largest)


def verification_sizes(decodes: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    """Sizes of which all sequences may get so many drafts in a step, as `Drafting` spreads them."""
    largest = max(1, NUM_VERIFY_ROWS["cuda"] // (1 + num_drafts))
    return tuple(size for size in decodes if size <= largest)


def piece_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Sizes up to twice the number of sequences: decodes and a small part of a prompt. Up to 64
    tokens a step takes as long as one of 1, since reading the weights dominates."""
    largest = min(max(2 * max_num_seqs, 64), max_num_batched_tokens, _MAX_SIZE)
    sizes = (16, 32, *range(64, largest, 64))
    return (*(size for size in sizes if size < largest), largest)


class GraphedModel:
    """A `LanguageModel`: a model with graphs of its small steps.

    Args:
        kv_pool: the pool that steps will use.
        max_blocks: maximum number of blocks of a sequence.
    """

    spares_core = False

    def __init__(
        self, model: TorchModel, kv_pool: Tensor, sizes: GraphSizes, maker: GraphMaker, *,
        max_blocks: int,
    ) -> None:  # fmt: skip
        self.state_spec = model.state_spec
        self.needs_prompt_lens = model.needs_prompt_lens
        self.weight_bytes = model.weight_bytes
        self.num_threads = model.num_threads
        self.num_verify_rows = model.num_verify_rows
        self.logits = model.logits
        self._model, self._kv_pool = model, kv_pool
        self._adapters = model.adapter_rows
        # Steps in which no row has an adapter have graphs without the launches of adapters.
        kinds = (False,) if self._adapters is None else (False, True)
        with torch.inference_mode(), maker.capturing():
            self._graphs = {
                each: self._capture(sizes, maker, max_blocks, has_adapters=each) for each in kinds
            }

    def _capture(
        self, sizes: GraphSizes, maker: GraphMaker, max_blocks: int, *, has_adapters: bool
    ) -> list[DecodeGraphs | PieceGraphs]:
        model, kv_pool = self._model, self._kv_pool
        graphs: list[DecodeGraphs | PieceGraphs] = [
            DecodeGraphs(
                model, kv_pool, batches, maker, max_blocks=max_blocks, num_drafts=num_drafts,
                has_adapters=has_adapters,
            )
            for batches, num_drafts in (
                (sizes.decodes, 0), (sizes.verifications, sizes.num_drafts),
            )
            if batches
        ]  # fmt: skip
        if sizes.pieces:
            graphs.append(
                PieceGraphs(model, kv_pool, sizes.pieces, maker, has_adapters=has_adapters)
            )
        return graphs

    def step(
        self,
        input_ids: Tensor,
        context: ForwardContext,
        sampled_tokens: Tensor | None = None,
        parameters: Tensor | None = None,
        draws: Tensor | None = None,
        masks: TokenMasks | None = None,
    ) -> StepOutput:
        outputs = self._replay(input_ids, context)
        if outputs is None:
            return self._model.step(input_ids, context, sampled_tokens, parameters, draws, masks)
        return self._model.end(outputs, sampled_tokens)

    def __call__(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        outputs = self._replay(input_ids, context)
        return self._model(input_ids, context) if outputs is None else outputs[0]

    def _replay(self, input_ids: Tensor, context: ForwardContext) -> tuple[Tensor, ...] | None:
        """What `TorchModel.outputs` gives; None: no graph has this step."""
        has_features = context.images is not None and context.images.rows is not None
        if has_features or context.kv_pool.data_ptr() != self._kv_pool.data_ptr():
            return None
        has_adapters = self._adapters is not None and self._adapters.rows is not None
        for graphs in self._graphs[has_adapters]:
            outputs = graphs.replay(input_ids, context)
            if outputs is not None:
                return outputs
        return None


def with_graphs(
    model: LanguageModel, config: EngineConfig, kv_pool: Tensor, *, max_blocks: int
) -> LanguageModel:
    """The model with graphs, which are captured here, if its device and the config call for them.

    Raises:
        ConfigError: graphs are requested on a device without them.
    """
    mode = resolve_cudagraph_mode(config.device, kv_pool.device)
    sizes = GraphSizes.of(mode, config.scheduler)
    if mode == "none" or not isinstance(model, TorchModel):
        return model
    return GraphedModel(model, kv_pool, sizes, CudaGraphMaker(), max_blocks=max_blocks)


def graphs_num_bytes(
    sizes: GraphSizes, capture: Callable[[GraphSizes], object], used_bytes: Callable[[], int]
) -> int:
    """Memory that graphs of these sizes need, from capturing the two largest of each kind: the
    largest determines the shared memory, the next one what each graph needs on its own.

    Args:
        capture: makes graphs, which live as long as the object it returns.
        used_bytes: measures the device's memory in use.
    """
    total = 0
    for of_kind, make in (
        (sizes.decodes, _decodes_only),
        (sizes.verifications, partial(_verifications_only, num_drafts=sizes.num_drafts)),
        (sizes.pieces, _pieces_only),
    ):
        if of_kind:
            largest = _bytes_of(capture, make(of_kind[-1:]), used_bytes)
            both = _bytes_of(capture, make(of_kind[-2:]), used_bytes) if of_kind[1:] else largest
            total += largest + max(0, both - largest) * (len(of_kind) - 1)
    return total


def _decodes_only(sizes: Sequence[int]) -> GraphSizes:
    return GraphSizes(decodes=tuple(sizes))


def _verifications_only(sizes: Sequence[int], num_drafts: int) -> GraphSizes:
    return GraphSizes(verifications=tuple(sizes), num_drafts=num_drafts)


def _pieces_only(sizes: Sequence[int]) -> GraphSizes:
    return GraphSizes(pieces=tuple(sizes))


def _bytes_of(
    capture: Callable[[GraphSizes], object], sizes: GraphSizes, used_bytes: Callable[[], int]
) -> int:
    before = used_bytes()
    graphs = capture(sizes)
    taken = used_bytes() - before
    del graphs
    return taken


class DecodeGraphs:
    """Graphs of decode batches for some sizes: with one token per sequence, or with drafts, too.

    A padded sequence has one token and length 0, so it attends to nothing; with drafts, where each
    sequence may have another number of them, it has no tokens, and all padded ones are at the end.

    Args:
        sizes: numbers of sequences, ascending.
        max_blocks: maximum number of blocks of a sequence.
        has_adapters: some rows of a batch have one.
        num_drafts: the most of a sequence; if there are any, some sequence of a batch has one.
    """

    def __init__(
        self,
        model: TorchModel,
        kv_pool: Tensor,
        sizes: Sequence[int],
        maker: GraphMaker,
        *,
        max_blocks: int,
        has_adapters: bool,
        num_drafts: int = 0,
    ) -> None:
        self._sizes, self._query_len = sizes, 1 + num_drafts
        most, device = sizes[-1], kv_pool.device
        self._inputs = GraphInputs(model, most * self._query_len, has_adapters=has_adapters)
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, max_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        if num_drafts:
            self._starts.zero_()
        self._outputs = GraphOutputs()
        # The largest first: the others reuse its temporary memory.
        self._graphs = {
            size: self._capture(model, self._context(kv_pool, size), maker)
            for size in reversed(sizes)
        }

    def replay(self, input_ids: Tensor, context: ForwardContext) -> tuple[Tensor, ...] | None:
        """The model's outputs, valid until the next call; None for a batch of another kind, or too
        large."""
        layout, query_len = context.layout, self._query_len
        num_tokens, num_seqs = len(input_ids), layout.num_seqs
        has_drafts = layout.max_query_len > 1
        if layout.max_query_len > query_len or has_drafts != (query_len > 1):
            return None
        size = padded_size(self._sizes, num_seqs)
        if size is None:
            return None
        self._inputs.fill(input_ids, context, size * query_len)
        if has_drafts:
            self._starts[: num_seqs + 1].copy_(layout.query_start_loc)
            self._starts[num_seqs + 1 : size + 1].fill_(num_tokens)
        self._seq_lens[:num_seqs].copy_(layout.seq_lens)
        if num_seqs < size:
            self._seq_lens[num_seqs:size].zero_()
        self._tables[:num_seqs, : layout.block_tables.shape[1]].copy_(layout.block_tables)
        self._graphs[size].replay()
        return self._outputs.of(num_tokens)

    def _capture(self, model: TorchModel, context: ForwardContext, maker: GraphMaker) -> Graph:
        num_tokens = len(context.positions)
        input_ids = self._inputs.input_ids[:num_tokens]
        with self._inputs.adapters_of(num_tokens):
            # Compiles and loads kernels before the capture.
            self._outputs.hold(model.outputs(input_ids, context))
            graph = maker.graph()
            graph.begin()
            self._outputs.hold(model.outputs(input_ids, context))
            graph.end()
        return graph

    def _context(self, kv_pool: Tensor, size: int) -> ForwardContext:
        """The context of a step of `size` sequences of maximum length."""
        inputs, num_tokens = self._inputs, size * self._query_len
        layout = PagedLayout(
            query_start_loc=self._starts[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._tables[:size],
            slot_mapping=inputs.slots[:num_tokens],
            max_query_len=self._query_len,
            max_seq_len=self._tables.shape[1] * kv_pool.shape[3],
        )
        return ForwardContext(
            kv_pool=kv_pool,
            layout=layout,
            positions=inputs.positions[:num_tokens],
            prompt_lens=inputs.prompt_lens_of(num_tokens),
        )


class PieceGraphs:
    """Graphs of the spans between the attention records of any batch, for some sizes.

    Everything except attention depends only on the number of tokens. So a graph is captured of each
    span of a program's records, and attention runs between them:

        embed, qkv₀ │ attention₀ │ o₀, mlp₀, qkv₁ │ attention₁ │ …      │ replayed │ run │

    Args:
        sizes: ascending.
        has_adapters: some rows of a step have one.
    """

    def __init__(
        self, model: TorchModel, kv_pool: Tensor, sizes: Sequence[int], maker: GraphMaker,
        *, has_adapters: bool,
    ) -> None:  # fmt: skip
        self._sizes, self._model, self._kv_pool = sizes, model, kv_pool
        self._program = program = model.program_of(kv_pool)
        self._inputs = GraphInputs(model, sizes[-1], has_adapters=has_adapters)
        self._attentions = program.numbers_of("attention")
        self._query, self._mixed = (
            program.records[self._attentions[0]].arguments[name] for name in ("query", "out")
        )
        # What passes between graphs and attention, made by the largest capture.
        self._queries = self._attended = torch.empty(0)
        self._outputs = GraphOutputs()
        self._graphs = {size: self._capture(size, maker) for size in reversed(sizes)}

    def replay(self, input_ids: Tensor, context: ForwardContext) -> tuple[Tensor, ...] | None:
        """The model's outputs, valid until the next call; None for a step that is too large."""
        num_tokens = len(input_ids)
        size = padded_size(self._sizes, num_tokens)
        if size is None:
            return None
        self._inputs.fill(input_ids, context, size)
        *graphs, last = self._graphs[size]
        step = TorchStep(
            token_ids=input_ids, layout=context.layout, positions=context.positions,
            is_invariant=self._model.is_invariant,
        )  # fmt: skip
        attended = self._attended[:num_tokens]
        for graph, number in zip(graphs, self._attentions, strict=True):
            graph.replay()
            rows: Rows = {self._query.name: self._queries[:num_tokens]}
            self._program.run(step, rows, first=number, end=number + 1)
            attended.copy_(rows[self._mixed.name])
        last.replay()
        return self._outputs.of(num_tokens)

    def _capture(self, size: int, maker: GraphMaker) -> list[Graph]:
        """A graph of each span."""
        inputs, kv_pool = self._inputs, self._kv_pool
        nothing = torch.zeros(0, dtype=torch.int32, device=kv_pool.device)
        layout = PagedLayout(  # attention is not captured, so only the slots are read
            query_start_loc=nothing,
            seq_lens=nothing,
            block_tables=nothing[None],
            slot_mapping=inputs.slots[:size],
            max_query_len=size,
            max_seq_len=size,
        )
        context = ForwardContext(
            kv_pool=kv_pool,
            layout=layout,
            positions=inputs.positions[:size],
            prompt_lens=inputs.prompt_lens_of(size),
        )
        graphs = [maker.graph() for _ in range(len(self._attentions) + 1)]
        with inputs.adapters_of(size):
            self._run(context, [])  # compiles kernels before the capture
            self._run(context, graphs)
        return graphs

    def _run(self, context: ForwardContext, graphs: list[Graph]) -> None:
        """Run all spans, each captured by its graph, if there are graphs."""
        model, program, rows = self._model, self._program, Rows()
        size = len(context.positions)
        starts = [0, *(number + 1 for number in self._attentions)]
        ends = [*self._attentions, len(program)]
        step: TorchStep | None = None
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            if graphs:
                graphs[number].begin()
            if step is None:
                step = model.begin(self._inputs.input_ids[:size], context)
            program.run(step, rows, first=start, end=end)
            if end == len(program):
                self._outputs.hold(model.outputs_in(rows))
            else:
                query = rows.pop(self._query.name)
                if not len(self._queries):
                    self._queries = torch.zeros_like(query)
                    self._attended = torch.zeros_like(query.flatten(1))
                self._queries[:size].copy_(query)
            if graphs:
                graphs[number].end()
            rows[self._mixed.name] = self._attended[:size]


class GraphInputs:
    """The input tensors of captured steps: fixed in memory, filled before each replay.

    A step of fewer tokens than its graph is padded at the end: a padded token has slot −1, so
    nothing is stored for it, and its output is cut off.

    Args:
        num_tokens: of the largest step.
        has_adapters: some rows of a step have one.
    """

    def __init__(self, model: TorchModel, num_tokens: int, *, has_adapters: bool) -> None:
        device = model.decoder.device
        self._adapters = model.adapter_rows if has_adapters else None
        self._adapted: dict[int, LoraRows] = {}  # by the size of a graph
        # int64 [num_tokens] each. Padding keeps ids and positions of earlier steps.
        self.input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.slots = torch.full_like(self.input_ids, -1)
        self.prompt_lens = torch.ones_like(self.input_ids) if model.needs_prompt_lens else None

    @contextmanager
    def adapters_of(self, size: int) -> Iterator[None]:
        """While a step of this size is captured: its rows take their adapters from here."""
        if self._adapters is None:
            yield
            return
        rows = LoraRows.room_for(size, self._adapters.num_slots, self.input_ids.device)
        self._adapted[size] = rows
        self._adapters.set(rows)
        yield
        self._adapters.set(None)

    def fill(self, input_ids: Tensor, context: ForwardContext, size: int) -> None:
        """Write a step's tokens, padded to `size`."""
        num_tokens = len(input_ids)
        self.input_ids[:num_tokens].copy_(input_ids)
        self.positions[:num_tokens].copy_(context.positions)
        self.slots[:num_tokens].copy_(context.layout.slot_mapping)
        if num_tokens < size:
            self.slots[num_tokens:size].fill_(-1)
        if self.prompt_lens is not None:
            assert context.prompt_lens is not None
            self.prompt_lens[:num_tokens].copy_(context.prompt_lens)
        if self._adapters is not None:
            assert self._adapters.rows is not None
            self._adapted[size].fill(self._adapters.rows)

    def prompt_lens_of(self, size: int) -> Tensor | None:
        return None if self.prompt_lens is None else self.prompt_lens[:size]


class GraphOutputs:
    """What captured steps leave, hidden states and features: fixed in memory, of the size of the
    largest, which is captured first."""

    def __init__(self) -> None:
        self._held: tuple[Tensor, ...] = ()

    def hold(self, outputs: tuple[Tensor, ...]) -> None:
        self._held = self._held or tuple(map(torch.zeros_like, outputs))
        for held, each in zip(self._held, outputs, strict=True):
            held[: len(each)].copy_(each)

    def of(self, num_tokens: int) -> tuple[Tensor, ...]:
        """Of a step of so many tokens."""
        return tuple(each[:num_tokens] for each in self._held)


def padded_size(sizes: Sequence[int], num_tokens: int) -> int | None:
    """The smallest captured size that holds a step; None if none does.

    Args:
        sizes: ascending.
    """
    index = bisect_left(sizes, num_tokens)
    return sizes[index] if index < len(sizes) else None


class Graph(Protocol):
    """Records the launches between `begin` and `end` without running them; `replay` runs them.

    A replay reads and writes the memory used at capture, and host values keep what they were then.
    """

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None:
        """Run the graph on the current stream."""
        ...


class GraphMaker(Protocol):
    """Makes graphs that share their temporary memory, so only one may be replayed at a time."""

    def capturing(self) -> AbstractContextManager[None]:
        """The context in which graphs can be captured."""
        ...

    def graph(self) -> Graph: ...


class CudaGraph:
    """One `torch.cuda.CUDAGraph`."""

    def __init__(self, memory: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._memory = memory

    def begin(self) -> None:
        # Launches of other threads must not end the capture.
        self._graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphMaker:
    """Makes CUDA graphs that share one memory pool."""

    def __init__(self) -> None:
        handle: Any = torch.cuda.graph_pool_handle
        self._memory = handle()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Use a side stream, since the default stream cannot be captured."""
        side: Any = torch.cuda.Stream
        torch.cuda.synchronize()
        with torch.cuda.stream(side()):
            yield
        torch.cuda.synchronize()

    def graph(self) -> CudaGraph:
        return CudaGraph(self._memory)
