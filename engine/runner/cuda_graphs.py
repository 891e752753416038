"""A decoder whose small steps are replayed from CUDA graphs: a launch costs more than they compute.

Which steps: batches of decodes whole (`decode_graphs`), others between their attentions
(`piece_graphs`), as far as they are not larger than what is captured. Larger ones keep the device
busy longer than they take to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.config import CudagraphMode, EngineConfig, SchedulerConfig
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.fast_path import LanguageModel
from penstock.engine.runner.decode_graphs import DecodeGraphs
from penstock.engine.runner.device import settle_cudagraph_mode
from penstock.engine.runner.graph_capture import CudaGraphMaker, GraphMaker
from penstock.engine.runner.piece_graphs import PieceGraphs

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
            hidden = graphs.run(input_ids, context)
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
    mode = settle_cudagraph_mode(config.device, kv_pool.device)
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
