"""Attention of one layer over the paged cache, and what a forward pass is given beside ids.

Not known here: projections, rotary positions, models.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from penstock.kernels.paged_attention import paged_attention
from penstock.kernels.paged_layout import PagedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One step, as the layers see it; always an argument, never a global.

    Attributes:
        kv_pool: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], changed by
            the forward; keys at index 0 of the second dimension, values at 1.
        positions: int64 [num_tokens]
        prompt_lens: int64 [num_tokens], the prompt length of each token's sequence; only for
            models that ask for it.
    """

    kv_pool: Tensor
    layout: PagedLayout
    positions: Tensor
    prompt_lens: Tensor | None = None

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""
        keys, values = self.kv_pool[layer].unbind(0)
        return keys, values


class Attention(nn.Module):
    """Attend over the sequence so far; this step's keys and values are stored already.

    Args:
        layer: index into the KV pool.
        window: positions a token sees, itself included; None sees all before it.
    """

    def __init__(self, *, layer: int, head_dim: int, window: int | None) -> None:
        super().__init__()
        self.layer = layer
        self.scale = head_dim**-0.5
        self.window = window

    def forward(self, query: Tensor, context: ForwardContext) -> Tensor:
        """query [num_tokens, num_heads, head_dim] → the same shape"""
        key_cache, value_cache = context.cache(self.layer)
        return paged_attention(
            query, key_cache, value_cache, context.layout, scale=self.scale, window=self.window
        )
