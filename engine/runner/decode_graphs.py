"""Batches of decodes, one token for each sequence, as whole graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.decoder import Decoder
from penstock.engine.runner.graph_capture import Graph, GraphMaker
from penstock.engine.runner.graph_inputs import GraphInputs, padded_size
from penstock.kernels.paged_layout import PagedLayout


class DecodeGraphs:
    """One graph for each of some batch sizes. A padded sequence has a length of 0: it attends to
    nothing.

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

    def run(self, input_ids: Tensor, context: ForwardContext) -> Tensor | None:
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
