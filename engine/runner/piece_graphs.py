"""Batches of any kind as graphs of what lies between their attentions.

All but attention depends on the number of tokens alone. So while a forward pass is recorded, every
attention ends a graph and begins another:

    embed, qkv₀ │ attend₀ │ o₀, mlp₀, qkv₁ │ attend₁ │ …        │ graphs │ launched anew │
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.engine.layers.attention import ForwardContext
from penstock.engine.models.decoder import Decoder
from penstock.engine.runner.graph_capture import Graph, GraphMaker
from penstock.engine.runner.graph_inputs import GraphInputs, padded_size
from penstock.kernels.paged_layout import PagedLayout

# An attention of a step, of which only queries and layout are another every time.
Call = Callable[[Tensor, ForwardContext], Tensor]


class PieceGraphs:
    """The pieces for each of some numbers of tokens.

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

    def run(self, input_ids: Tensor, context: ForwardContext) -> Tensor | None:
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
