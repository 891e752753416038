"""Rotates queries and keys, stores keys and values, in plain torch: the specification.

Rotary positions: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.qk_norm import QKNorm
from penstock.kernels.reference.rms_norm import rms_norm_reference
from penstock.kernels.reference.store_kv import store_kv_reference


def rotary_store_kv_reference(
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    qk_norm: QKNorm | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Normalise (with a `qk_norm`) and rotate queries and keys, then store keys and values as in
    `store_kv_reference`.

    Each product and sum of the rotation is rounded to the model's dtype, as in `transformers`.

    Args:
        qkv: [num_tokens, num_heads + 2 · num_kv_heads, head_dim]: queries, keys, values
        rotary: cosines and sines, each [num_tokens, 1, head_dim / 2] in the dtype of qkv
        key_cache, value_cache, slot_mapping, key_scale, value_scale: as in `store_kv_reference`

    Returns:
        the queries, [num_tokens, num_heads, head_dim], including those of padding
    """
    num_kv_heads = key_cache.shape[2]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    query, key, value = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if qk_norm is not None:
        query = rms_norm_reference(query, qk_norm.query_weight, *qk_norm[2:])
        key = rms_norm_reference(key, qk_norm.key_weight, *qk_norm[2:])
    store_kv_reference(
        rotate(key, *rotary),
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return rotate(query, *rotary)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [num_tokens, num_heads, head_dim]; a pair is dimensions i and i + head_dim / 2."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
