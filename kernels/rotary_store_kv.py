"""Rotates queries and keys, stores keys and values: checks shapes, picks the implementation.

The meaning is specified by `rotary_store_kv_reference`. On a GPU it is one launch that reads the
projections once; the norm of queries and keys is part of it, since a head is in registers anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels import int8_cache
from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.qk_norm import QKNorm
from penstock.kernels.reference.rotary_store_kv import rotary_store_kv_reference


def rotary_store_kv(
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
    """Rotate queries and keys, store keys and values; see `rotary_store_kv_reference`."""
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads, stored_size = key_cache.shape[2:]
    is_int8 = key_cache.dtype == torch.int8
    expected_size = head_dim + int8_cache.SCALE_BYTES if is_int8 else head_dim
    assert stored_size == expected_size, f"head_dim {head_dim}, {stored_size} in the cache"
    assert not (is_int8 and qkv.is_cuda), "no GPU kernel stores int8"
    assert num_all_heads > 2 * num_kv_heads, f"{num_all_heads} heads, {num_kv_heads} KV heads"
    assert slot_mapping.shape == (num_tokens,), "one slot for each token"
    for angles in rotary:
        assert angles.shape == (num_tokens, 1, head_dim // 2), f"angles {tuple(angles.shape)}"
        assert angles.dtype == qkv.dtype, f"angles in {angles.dtype}, projections in {qkv.dtype}"
    scales = (key_scale, value_scale)
    _check_cache(key_cache, value_cache, slot_mapping, dtype=qkv.dtype, scales=scales)
    run = gpu_operation("rotary_store_kv") if qkv.is_cuda else rotary_store_kv_reference
    query: Tensor = run(
        qkv,
        rotary,
        key_cache,
        value_cache,
        slot_mapping,
        qk_norm=qk_norm,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    return query


def _check_cache(
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    dtype: torch.dtype,
    scales: tuple[Tensor | None, Tensor | None],
) -> None:
    """Assert that keys and values of `dtype` can be stored there."""
    assert key_cache.shape == value_cache.shape
    assert key_cache.dtype == value_cache.dtype, "one dtype for keys and values"
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert slot_mapping.dtype == torch.int64, f"slots in {slot_mapping.dtype}"
    num_kv_heads = key_cache.shape[2]
    for cache, scale in zip((key_cache, value_cache), scales, strict=True):
        if scale is None:
            is_exact = cache.dtype == dtype
            assert is_exact or cache.dtype == torch.int8, f"{dtype} into {cache.dtype} unscaled"
        else:
            assert cache.dtype == torch.float8_e4m3fn, f"a scale for a cache of {cache.dtype}"
            assert scale.dtype == torch.float32, f"a scale in {scale.dtype}"
            assert scale.shape in ((), (num_kv_heads,)), f"scales {tuple(scale.shape)}"
