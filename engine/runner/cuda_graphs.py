"""A decoder whose small steps are replayed from CUDA graphs: a launch costs more than they compute.

Batches of decodes are replayed whole (`DecodeGraphs`), other steps between their attentions
(`PieceGraphs`), as far as they are not larger than what is captured. Larger ones keep the device
busy longer than they take to launch. `Graph` and `GraphMaker` are a small protocol over CUDA's
graphs, so that all but these can be tested where there is no GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.config import CudagraphMode, EngineConfig, SchedulerConfig
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.backends import LanguageModel
from penstock.engine.models.decoder import Decoder
from penstock.engine.runner.device import resolve_cudagraph_mode
from penstock.kernels.paged_layout import PagedLayout

_MAX_SIZE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """What is captured, ascending: sequences of a batch of decodes, tokens of another step."""

    decodes: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()

    @classmethod
    def of(cls, mode: CudagraphMode, scheduler: SchedulerConfig) -> GraphSizes:
        if mode == "none":
            return cls()
        decodes = decode_sizes(scheduler.max_num_seqs)
        pieces = piece_sizes(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        if mode == "full":
            return cls(decodes=decodes, pieces=pieces)
        few = (size for size in decodes if size < pieces[0])
        return cls(pieces=(*few, *pieces))


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Close enough that a batch is padded by less than 8 sequences, later 16."""
    largest = min(max_num_seqs, _MAX_SIZE)
    sizes = (1, 2, 4, *range(8, 256, 8), *range(256, largest, 16))
    return (*(size for size in sizes if size < largest), largest)


def piece_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Up to twice as many tokens as there are sequences: decodes, and a little of a prompt. Until
    64 tokens a step takes as long as one of 1, since it waits for the weights."""
    largest = min(max(2 * max_num_seqs, 64), max_num_batched_tokens, _MAX_SIZE)
    sizes = (16, 32, *range(64, largest, 64))
    return (*(size for size in sizes if size < largest), largest)


class GraphedDecoder:
    """A decoder, and the graphs of its small steps; a `LanguageModel` as the decoder is.

    Args:
        kv_pool: what steps are going to be run with.
        max_blocks: of a sequence.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: Tensor,
        sizes: GraphSizes,
        maker: GraphMaker,
        *,
        max_blocks: int,
    ) -> None:
        self.config = decoder.config
        self.dtype = decoder.dtype
        self.needs_prompt_lens = decoder.needs_prompt_lens
        self.num_threads = decoder.num_threads
        self.logits = decoder.logits
        self._decoder = decoder
        self._graphs: list[DecodeGraphs | PieceGraphs] = []
        with torch.inference_mode(), maker.capturing():
            if sizes.decodes:
                self._graphs.append(
                    DecodeGraphs(decoder, kv_pool, sizes.decodes, maker, max_blocks=max_blocks)
                )
            if sizes.pieces:
                self._graphs.append(PieceGraphs(decoder, kv_pool, sizes.pieces, maker))

    def __call__(self, input_ids: Tensor, context: ForwardContext) -> Tensor:
        """input_ids int64 [num_tokens] → hidden states [num_tokens, hidden_size], good until the
        next call"""
        for graphs in self._graphs:
            hidden = graphs.replay(input_ids, context)
            if hidden is not None:
                return hidden
        output: Tensor = self._decoder(input_ids, context)
        return output


def with_graphs(
    model: LanguageModel, config: EngineConfig, kv_pool: Tensor, *, max_blocks: int
) -> LanguageModel:
    """The model, with the graphs that its device and the config suggest; they are captured here.

    Raises:
        ConfigError: graphs are asked for where there are none.
    """
    mode = resolve_cudagraph_mode(config.device, kv_pool.device)
    sizes = GraphSizes.of(mode, config.scheduler)
    if mode == "none" or not isinstance(model, Decoder):
        return model
    return GraphedDecoder(model, kv_pool, sizes, CudaGraphMaker(), max_blocks=max_blocks)


def graphs_num_bytes(
    sizes: GraphSizes, capture: Callable[[GraphSizes], object], used_bytes: Callable[[], int]
) -> int:
    """Memory that graphs of these sizes take, from capturing the two largest of each kind: the
    largest settles how much all share, and the next what each has for itself.

    Args:
        capture: makes graphs; they are gone when what it returns is.
        used_bytes: of the device's memory.
    """
    total = 0
    for of_kind, make in ((sizes.decodes, _decodes_only), (sizes.pieces, _pieces_only)):
        if of_kind:
            largest = _bytes_of(capture, make(of_kind[-1:]), used_bytes)
            both = _bytes_of(capture, make(of_kind[-2:]), used_bytes) if of_kind[1:] else largest
            total += largest + max(0, both - largest) * (len(of_kind) - 1)
    return total


def _decodes_only(sizes: Sequence[int]) -> GraphSizes:
    return GraphSizes(decodes=tuple(sizes))


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
    """Batches of decodes, one token for each sequence: a graph for each of some sizes. A padded
    sequence has a length of 0: it attends to nothing.

    Args:
        sizes: ascending.
        max_blocks: of a sequence.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_pool: Tensor,
        sizes: Sequence[int],
        maker: GraphMaker,
        *,
        max_blocks: int,
    ) -> None:
        self._sizes = sizes
        most, device = sizes[-1], decoder.device
        self._inputs = GraphInputs(most, device, needs_prompt_lens=decoder.needs_prompt_lens)
        self._seq_lens = torch.zeros(most, dtype=torch.int32, device=device)
        self._tables = torch.zeros(most, max_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self._hidden = torch.empty(
            most, decoder.config.hidden_size, dtype=decoder.dtype, device=device
        )
        # The largest first: the others find room in the memory it leaves.
        self._graphs = {
            size: self._capture(decoder, self._context(kv_pool, size), maker)
            for size in reversed(sizes)
        }

    def replay(self, input_ids: Tensor, context: ForwardContext) -> Tensor | None:
        """Hidden states as the decoder gives them, good until the next call; None for a batch that
        is no batch of decodes, or too large."""
        layout, num_seqs = context.layout, len(input_ids)
        size = padded_size(self._sizes, num_seqs) if layout.max_query_len == 1 else None
        if size is None:
            return None
        self._inputs.fill(input_ids, context, size)
        self._seq_lens[:num_seqs].copy_(layout.seq_lens)
        if num_seqs < size:
            self._seq_lens[num_seqs:size].zero_()
        self._tables[:num_seqs, : layout.block_tables.shape[1]].copy_(layout.block_tables)
        self._graphs[size].replay()
        return self._hidden[:num_seqs]

    def _capture(self, decoder: Decoder, context: ForwardContext, maker: GraphMaker) -> Graph:
        size = len(context.positions)
        input_ids = self._inputs.input_ids[:size]
        decoder(input_ids, context)  # kernels are compiled and loaded here, not while it records
        graph = maker.graph()
        graph.begin()
        self._hidden[:size].copy_(decoder(input_ids, context))
        graph.end()
        return graph

    def _context(self, kv_pool: Tensor, size: int) -> ForwardContext:
        """A step of `size` sequences, each as long as any may be."""
        inputs = self._inputs
        layout = PagedLayout(
            query_start_loc=self._starts[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._tables[:size],
            slot_mapping=inputs.slots[:size],
            max_query_len=1,
            max_seq_len=self._tables.shape[1] * kv_pool.shape[3],
        )
        return ForwardContext(
            kv_pool=kv_pool,
            layout=layout,
            positions=inputs.positions[:size],
            prompt_lens=inputs.prompt_lens_of(size),
        )


# An attention of a step, of which only queries and layout are another every time.
Call = Callable[[Tensor, ForwardContext], Tensor]


class PieceGraphs:
    """Batches of any kind: graphs of what lies between their attentions, for some sizes.

    All but attention depends on the number of tokens alone. So while a forward pass is recorded,
    every attention ends a graph and begins another:

        embed, qkv₀ │ attend₀ │ o₀, mlp₀, qkv₁ │ attend₁ │ …      │ graphs │ launched anew │

    Args:
        sizes: ascending.
    """

    def __init__(
        self, decoder: Decoder, kv_pool: Tensor, sizes: Sequence[int], maker: GraphMaker
    ) -> None:
        self._sizes = sizes
        most, device, config = sizes[-1], decoder.device, decoder.config
        self._inputs = GraphInputs(most, device, needs_prompt_lens=decoder.needs_prompt_lens)

        def rows(*shape: int) -> Tensor:
            return torch.zeros(most, *shape, dtype=decoder.dtype, device=device)

        # Where pieces and attentions meet: what one wrote, the next reads at once.
        self._query = rows(config.num_heads, config.head_dim)
        self._mixed = rows(config.num_heads, config.head_dim)
        self._hidden = rows(config.hidden_size)
        self._pieces = {
            size: self._capture(decoder, kv_pool, size, maker) for size in reversed(sizes)
        }

    def replay(self, input_ids: Tensor, context: ForwardContext) -> Tensor | None:
        """Hidden states as the decoder gives them, good until the next call; None for a step that
        is too large."""
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

    def _capture(self, decoder: Decoder, kv_pool: Tensor, size: int, maker: GraphMaker) -> _Pieces:
        inputs, pieces = self._inputs, _Pieces(maker, self._query[:size], self._mixed[:size])
        nothing = torch.zeros(0, dtype=torch.int32, device=decoder.device)
        layout = PagedLayout(  # of attention's, nothing is read
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
            hidden: Tensor = decoder(inputs.input_ids[:size], context)
            return hidden

        forward(lambda *_, **__: self._mixed[:size])  # compiles
        pieces.begin()
        self._hidden[:size].copy_(forward(pieces.attend))
        pieces.graphs[-1].end()
        return pieces


class _Pieces:
    """One forward pass: a graph, an attention, a graph, … and a graph.

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
        """In the place of attention while a forward pass is recorded."""
        self._query.copy_(query)
        self.graphs[-1].end()

        def call(query: Tensor, context: ForwardContext) -> Tensor:
            return context.attend(query, key_cache, value_cache, context.layout, **options)

        self.calls.append(call)
        self.begin()
        return self._mixed


class GraphInputs:
    """The tensors that captured steps read: they stay where they are, and are filled before a
    replay.

    A step of fewer tokens than a graph was captured for is padded at its end: a padded token has
    the slot −1, so nothing of it is stored, and what comes out for it is cut off.

    Args:
        num_tokens: of the largest step.
        needs_prompt_lens: as a model says.
    """

    def __init__(self, num_tokens: int, device: torch.device, *, needs_prompt_lens: bool) -> None:
        # int64 [num_tokens] each. Ids and positions of padding are those of earlier steps.
        self.input_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.input_ids)
        self.slots = torch.full_like(self.input_ids, -1)
        self.prompt_lens = torch.ones_like(self.input_ids) if needs_prompt_lens else None

    def fill(self, input_ids: Tensor, context: ForwardContext, size: int) -> None:
        """A step's tokens, padded to `size`."""
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
    place = bisect_left(sizes, num_tokens)
    return sizes[place] if place < len(sizes) else None


class Graph(Protocol):
    """Launches between `begin` and `end`, which are not run then; `replay` runs them.

    They read and write the memory they were recorded with, and host values stay what they were.
    """

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def replay(self) -> None:
        """Launch it all on the current stream."""
        ...


class GraphMaker(Protocol):
    """Makes graphs that share their temporary memory: replay them one at a time."""

    def capturing(self) -> AbstractContextManager[None]:
        """Within it, graphs can be recorded."""
        ...

    def graph(self) -> Graph: ...


class CudaGraph:
    """One `torch.cuda.CUDAGraph`."""

    def __init__(self, memory: Any) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._memory = memory

    def begin(self) -> None:
        # Other threads (the heartbeats') are none of this graph's business.
        self._graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")

    def end(self) -> None:
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphMaker:
    """CUDA graphs with one pool of memory."""

    def __init__(self) -> None:
        handle: Any = torch.cuda.graph_pool_handle
        self._memory = handle()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """On a stream of its own: the default one cannot be captured."""
        side: Any = torch.cuda.Stream
        torch.cuda.synchronize()
        with torch.cuda.stream(side()):
            yield
        torch.cuda.synchronize()

    def graph(self) -> CudaGraph:
        return CudaGraph(self._memory)
