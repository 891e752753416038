"""Attention of one layer over the paged cache, and the context of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.kernels.paged_layout import PagedLayout


class WholeImage(NamedTuple):
    """An image whose tokens attend to all of it.

    Attributes:
        rows: of its tokens in the step; the first ones of the image may be cached already.
        sequence: which one of the step's.
        position: of the first of these rows; the last one's is that of the image's last token.
    """

    rows: slice
    sequence: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepImages:
    """What the images of a step's sequences change.

    Attributes:
        rows: int64 [num_features], the tokens whose embeddings are replaced; None: none.
        features: [num_features, hidden_size], by what.
        offsets: int64 [3, num_tokens], what M-RoPE adds to the positions; None: nothing.
        whole: images whose tokens see what follows them in their image.
    """

    rows: Tensor | None
    features: Tensor | None
    offsets: Tensor | None
    whole: tuple[WholeImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """What layers need to know of a step; always an argument, never a global.

    Attributes:
        kv_pool: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_size], written by
            the forward pass; keys at index 0 of the second dimension, values at 1. The head size is
            that of `LayerKV`.
        positions: int64 [num_tokens]
        prompt_lens: int64 [num_tokens], the prompt length of each token's sequence; only for
            models with `needs_prompt_lens`.
        images: None: there are none.
    """

    kv_pool: Tensor
    layout: PagedLayout
    positions: Tensor
    prompt_lens: Tensor | None = None
    images: StepImages | None = None

    @classmethod
    def of_sequence(cls, kv_pool: Tensor, num_tokens: int) -> ForwardContext:
        """The context of one sequence that is computed at once, in the first blocks of a pool."""
        device, num_blocks = kv_pool.device, kv_pool.shape[2]
        positions = torch.arange(num_tokens, device=device)
        return cls(
            kv_pool=kv_pool,
            layout=PagedLayout(
                query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
                seq_lens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
                block_tables=torch.arange(num_blocks, dtype=torch.int32, device=device)[None],
                slot_mapping=positions,
                max_query_len=num_tokens,
                max_seq_len=num_tokens,
            ),
            positions=positions,
            prompt_lens=torch.full_like(positions, num_tokens),
        )

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, each [num_blocks, block_size, num_kv_heads, head_size]."""
        keys, values = self.kv_pool[layer].unbind(0)
        return keys, values


_ONE = torch.ones(())


class Attention(nn.Module):
    """What attention over the sequence so far needs to know in one layer.

    Args:
        layer: index into the KV pool.
        window: how many positions a token sees, itself included; None sees all before it.
        scale: of scores; None: head_dim^-0.5.
        soft_cap: bounds scores; None leaves them unbounded.
        alibi_slopes: of each head, by `paged_attention`; empty: none.

    Attributes:
        alibi: float32 [num_heads], the slopes, or None.
        key_scale, value_scale: float32 [num_kv_heads], factors of the stored numbers; None unless
            the cache is in FP8.
        given_scales: of keys and values, as the checkpoint has them: [] or [num_kv_heads].
    """

    key_scale: Tensor | None
    value_scale: Tensor | None
    alibi: Tensor | None

    def __init__(
        self,
        *,
        layer: int,
        head_dim: int,
        window: int | None,
        scale: float | None = None,
        soft_cap: float | None = None,
        alibi_slopes: tuple[float, ...] = (),
    ) -> None:
        super().__init__()
        self.layer = layer
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.soft_cap = soft_cap
        self.given_scales = (_ONE, _ONE)
        self.alibi_slopes = alibi_slopes
        self.place_alibi(torch.device("cpu"))
        self.register_buffer("key_scale", None, persistent=False)
        self.register_buffer("value_scale", None, persistent=False)

    def place_alibi(self, device: torch.device) -> None:
        """The slopes stay float32, whatever the model's dtype, so they are no buffer."""
        slopes = self.alibi_slopes
        self.alibi = torch.tensor(slopes, dtype=torch.float32, device=device) if slopes else None

    def use_fp8_cache(self, num_kv_heads: int, device: torch.device) -> None:
        """Store keys and values in e4m3 with the checkpoint's scales, or 1 where it has none. The
        range (± 448) is enough for normed keys and values."""
        key_scale, value_scale = self.given_scales
        self.key_scale = torch.ones(num_kv_heads, device=device) * key_scale.to(device)
        self.value_scale = torch.ones(num_kv_heads, device=device) * value_scale.to(device)
