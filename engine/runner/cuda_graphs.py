"""A model that replays small steps from CUDA graphs, since launching them takes longer than
computing them.

Decode batches, with drafts too, are replayed whole (`DecodeGraphs`), other steps between their
attention calls (`PieceGraphs`), up to the captured sizes. Larger steps compute longer than their
launch takes. `Graph` and `GraphMaker` are a small protocol over CUDA's graphs, so that everything
else can be tested without a GPU.
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
from penstock.engine.models.language_model import LanguageModel
from penstock.engine.runner.device import NUM_VERIFY_ROWS, resolve_cudagraph_mode
from penstock.kernels.paged_layout import PagedLayout

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
            if speculation is None:
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

    can_be_captured = False

    def __init__(
        self,
        model: LanguageModel,
        kv_pool: Tensor,
        sizes: GraphSizes,
        maker: GraphMaker,
        *,
        max_blocks: int,
    ) -> None:
        self.kv_spec = model.kv_spec
        self.needs_prompt_lens = model.needs_prompt_lens
        self.weight_bytes = model.weight_bytes
        self.num_threads = model.num_threads
        self.logits = model.logits
        self._model = model
        self._graphs: list[DecodeGraphs | PieceGraphs] = []
        with torch.inference_mode(), maker.capturing():
            if sizes.decodes:
                self._graphs.append(
                    DecodeGraphs(model, kv_pool, sizes.decodes, maker, max_blocks=max_blocks)
                )
            if sizes.verifications:
                self._graphs.append(
                    DecodeGraphs(
                        model,
                        kv_pool,
                        sizes.verifications,
                        maker,
                        max_blocks=max_blocks,
                        num_drafts=sizes.num_drafts,
                    )
                )
            if sizes.pieces:
                self._graphs.append(PieceGraphs(model, kv_pool, sizes.pieces, maker))

    def __call__(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """input_ids int64 [num_tokens] → hidden states [num_tokens, hidden_size], valid until the
        next call"""
        for graphs in self._graphs:
            hidden = graphs.replay(input_ids, context)
            if hidden is not None:
                return hidden
        output: Tensor = self._model(input_ids, context)
        return output


def with_graphs(
    model: LanguageModel, config: EngineConfig, kv_pool: Tensor, *, max_blocks: int
) -> LanguageModel:
    """The model with graphs, which are captured here, if its device and the config call for them.

    Raises:
        ConfigError: graphs are requested on a device without them.
    """
    mode = resolve_cudagraph_mode(config.device, kv_pool.device)
    sizes = GraphSizes.of(mode, config.scheduler)
    if mode == "none" or not model.can_be_captured:
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
        num_drafts: the most of a sequence; if there are any, some sequence of a batch has one.
    """

    def __init__(
        self,
        model: LanguageModel,
        kv_pool: Tensor,
        sizes: Sequence[int],
        maker: GraphMaker,
        *,
        max_blocks: int,
        num_drafts: int = 0,
    ) -> None:
        self._sizes, self._query_len = sizes, 1 + num_drafts
        most, device = sizes[-1], kv_pool.device
        self._inputs = GraphInputs(
            most * self._query_len, device, needs_prompt_lens=model.needs_prompt_lens
        )
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, max_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        if num_drafts:
            self._starts.zero_()
        self._hidden = torch.empty(0)
        # The largest first: the others reuse its temporary memory.
        self._graphs = {
            size: self._capture(model, self._context(kv_pool, size), maker)
            for size in reversed(sizes)
        }

    def replay(self, input_ids: Tensor, context: ForwardContext) -> Tensor | None:
        """The model's hidden states, valid until the next call; None for a batch of another kind,
        or too large."""
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
        return self._hidden[:num_tokens]

    def _capture(self, model: LanguageModel, context: ForwardContext, maker: GraphMaker) -> Graph:
        num_tokens = len(context.positions)
        input_ids = self._inputs.input_ids[:num_tokens]
        hidden = model(input_ids, context)  # compiles and loads kernels before the capture
        if not len(self._hidden):
            self._hidden = torch.zeros_like(hidden)  # the largest
        graph = maker.graph()
        graph.begin()
        self._hidden[:num_tokens].copy_(model(input_ids, context))
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


# One attention call, with everything bound except queries and context.
Call = Callable[[Tensor, ForwardContext], Tensor]


class PieceGraphs:
    """Graphs of the parts between the attention calls of any batch, for some sizes.

    Everything except attention depends only on the number of tokens. So while a forward pass is
    captured, every attention call ends one graph and starts another:

        embed, qkv₀ │ attend₀ │ o₀, mlp₀, qkv₁ │ attend₁ │ …      │ replayed │ launched │

    Args:
        sizes: ascending.
    """

    def __init__(
        self, model: LanguageModel, kv_pool: Tensor, sizes: Sequence[int], maker: GraphMaker
    ) -> None:
        self._sizes = sizes
        self._inputs = GraphInputs(
            sizes[-1], kv_pool.device, needs_prompt_lens=model.needs_prompt_lens
        )
        # The tensors that pass between pieces and attention calls, made by the largest capture.
        self._query = self._mixed = self._hidden = torch.empty(0)
        self._pieces = {
            size: self._capture(model, kv_pool, size, maker) for size in reversed(sizes)
        }

    def replay(self, input_ids: Tensor, context: ForwardContext) -> Tensor | None:
        """The model's hidden states, valid until the next call; None for a step that is too
        large."""
        num_tokens = len(input_ids)
        size = padded_size(self._sizes, num_tokens)
        if size is None:
            return None
        self._inputs.fill(input_ids, context, size)
        pieces = self._pieces[size]
        query, mixed = self._query[:num_tokens], self._mixed[:num_tokens]
        for graph, attend in zip(pieces.graphs, pieces.calls, strict=False):
            graph.replay()
            mixed.copy_(attend(query, context))
        pieces.graphs[-1].replay()
        return self._hidden[:num_tokens]

    def _capture(
        self, model: LanguageModel, kv_pool: Tensor, size: int, maker: GraphMaker
    ) -> _Pieces:
        inputs = self._inputs
        nothing = torch.zeros(0, dtype=torch.int32, device=kv_pool.device)
        layout = PagedLayout(  # attention is not captured, so only the slots are read
            query_start_loc=nothing,
            seq_lens=nothing,
            block_tables=nothing[None],
            slot_mapping=inputs.slots[:size],
            max_query_len=size,
            max_seq_len=size,
        )

        def forward(attend: Any) -> Tensor:
            context = ForwardContext(
                kv_pool=kv_pool,
                layout=layout,
                positions=inputs.positions[:size],
                prompt_lens=inputs.prompt_lens_of(size),
                attend=attend,
            )
            hidden: Tensor = model(inputs.input_ids[:size], context)
            return hidden

        def skip(query: Tensor, *_: object, **__: object) -> Tensor:
            if not len(self._query):
                self._query, self._mixed = torch.zeros_like(query), torch.zeros_like(query)
            return self._mixed[:size]

        hidden = forward(skip)  # compiles kernels before the capture
        if not len(self._hidden):
            self._hidden = torch.zeros_like(hidden)
        pieces = _Pieces(maker, self._query[:size], self._mixed[:size])
        pieces.begin()
        self._hidden[:size].copy_(forward(pieces.attend))
        pieces.graphs[-1].end()
        return pieces


class _Pieces:
    """One captured forward pass: a graph, an attention call, a graph, …, a graph.

    Args:
        query, mixed: [num_tokens, num_heads, head_dim], before and after attention.
    """

    def __init__(self, maker: GraphMaker, query: Tensor, mixed: Tensor) -> None:
        self.graphs: list[Graph] = []
        self.calls: list[Call] = []
        self._maker = maker
        self._query, self._mixed = query, mixed

    def begin(self) -> None:
        self.graphs.append(self._maker.graph())
        self.graphs[-1].begin()

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        _layout: PagedLayout,
        **options: Any,
    ) -> Tensor:
        """Stands in for attention while a forward pass is captured."""
        self._query.copy_(query)
        self.graphs[-1].end()

        def call(query: Tensor, context: ForwardContext) -> Tensor:
            return context.attend(query, key_cache, value_cache, context.layout, **options)

        self.calls.append(call)
        self.begin()
        return self._mixed


class GraphInputs:
    """The input tensors of captured steps: fixed in memory, filled before each replay.

    A step of fewer tokens than its graph is padded at the end: a padded token has slot −1, so
    nothing is stored for it, and its output is cut off.

    Args:
        num_tokens: of the largest step.
        needs_prompt_lens: as in the model.
    """

    def __init__(self, num_tokens: int, device: torch.device, *, needs_prompt_lens: bool) -> None:
        # int64 [num_tokens] each. Padding keeps ids and positions of earlier steps.
        self.input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.slots = torch.full_like(self.input_ids, -1)
        self.prompt_lens = torch.ones_like(self.input_ids) if needs_prompt_lens else None

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

    def prompt_lens_of(self, size: int) -> Tensor | None:
        return None if self.prompt_lens is None else self.prompt_lens[:size]


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
