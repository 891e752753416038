"""From a layer's projections to its queries and a filled cache: checks, picks the implementation.

The meaning is specified by `rotary_store_kv_reference`. On a GPU it is one launch that reads the
projections once; the norm of queries and keys is part of it, since a head is in registers anyway.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.qk_norm import QKNorm
from penstock.kernels.rotary_store_kv_reference import rotary_store_kv_reference
from penstock.kernels.store_kv import check_cache


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
    """Turn queries and keys, store keys and values; as `rotary_store_kv_reference` says."""
    num_tokens, num_all_heads, head_dim = qkv.shape
    _, _, num_kv_heads, cache_head_dim = key_cache.shape
    assert head_dim == cache_head_dim, f"head_dim {head_dim}, {cache_head_dim} in the cache"
    assert num_all_heads > 2 * num_kv_heads, f"{num_all_heads} heads, {num_kv_heads} KV heads"
    assert slot_mapping.shape == (num_tokens,), "one slot for each token"
    for angles in rotary:
        assert angles.shape == (num_tokens, 1, head_dim // 2), f"angles {tuple(angles.shape)}"
        assert angles.dtype == qkv.dtype, f"angles in {angles.dtype}, projections in {qkv.dtype}"
    scales = (key_scale, value_scale)
    check_cache(key_cache, value_cache, slot_mapping, dtype=qkv.dtype, scales=scales)
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
