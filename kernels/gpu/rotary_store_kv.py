"""Rotates queries and keys and stores keys and values, in one launch.

A program computes some heads of one token: of the queries, or keys with their values. It holds a
head as two halves, which the rotation pairs element by element.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.tuning import Config
from penstock.kernels.qk_norm import QKNorm

_FP8_MAX = tl.constexpr(448.0)  # of e4m3fn
_PAIRS_PER_TILE = 512  # that a program turns, about
_NUM_WARPS = 2


@triton.jit
def _turned(
    first_ptr, second_ptr, mask, cos, sin, norm_ptr, columns, eps,
    OFFSET: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Both halves of some heads [heads, columns], normalised and rotated, in the input's dtype.

    Every product and sum is rounded to that dtype, as torch does it.
    """
    dtype: tl.constexpr = first_ptr.dtype.element_ty
    first = tl.load(first_ptr, mask, 0.0).to(tl.float32)
    second = tl.load(second_ptr, mask, 0.0).to(tl.float32)
    if norm_ptr is not None:
        is_column = columns < HALF
        first_weight = tl.load(norm_ptr + columns, is_column, 0.0).to(tl.float32) + OFFSET
        second_weight = tl.load(norm_ptr + HALF + columns, is_column, 0.0).to(tl.float32) + OFFSET
        sum_of_squares = tl.sum(first * first + second * second, axis=1)
        scale = tl.rsqrt(sum_of_squares / (2 * HALF) + eps)[:, None]
        first = _rounded(first * scale * first_weight[None, :], dtype)
        second = _rounded(second * scale * second_weight[None, :], dtype)
    turned_first = _rounded(first * cos, dtype) - _rounded(second * sin, dtype)
    turned_second = _rounded(second * cos, dtype) + _rounded(first * sin, dtype)
    return turned_first.to(dtype), turned_second.to(dtype)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


@triton.jit
def _as_stored(x, scale, dtype: tl.constexpr):
    """x as a cache of this dtype holds it; scale broadcasts to x, or is None if not in FP8."""
    if scale is not None:
        # Divided exactly, so that every device rounds alike.
        x = tl.div_rn(x.to(tl.float32), tl.broadcast_to(scale, x.shape))
        x = tl.clamp(x, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def rotary_store_kv_kernel(
    query_ptr,  # [num_tokens, num_heads, head_dim]
    key_cache_ptr,
    value_cache_ptr,
    qkv_ptr,  # [num_tokens, num_heads + 2 · num_kv_heads, head_dim]
    cos_ptr,  # [num_tokens, head_dim / 2]
    sin_ptr,
    slots_ptr,
    query_norm_ptr,  # [head_dim], or None
    key_norm_ptr,
    eps,
    key_scale_ptr,  # float32, or None
    value_scale_ptr,
    key_scale_stride,  # from head to head; 0 for one scale in all
    value_scale_stride,
    OFFSET: tl.constexpr,  # of the norms' weights
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,  # head_dim / 2
    TILE_HEADS: tl.constexpr,
    TILE_HALF: tl.constexpr,  # HALF, padded to a power of two
):
    """Program (t, c) has the c-th part of token t's heads, the queries' first."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    columns = tl.arange(0, TILE_HALF)
    is_column = columns < HALF
    cos = tl.load(cos_ptr + token * HALF + columns, is_column, 0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * HALF + columns, is_column, 0.0).to(tl.float32)[None, :]
    head_dim: tl.constexpr = 2 * HALF
    num_query_tiles: tl.constexpr = (NUM_HEADS + TILE_HEADS - 1) // TILE_HEADS
    qkv_ptr += token * (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim
    if tile < num_query_tiles:
        heads = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)
        mask = (heads < NUM_HEADS)[:, None] & is_column[None, :]
        numbers = heads[:, None] * head_dim + columns[None, :]
        source = qkv_ptr + numbers
        first, second = _turned(
            source, source + HALF, mask, cos, sin, query_norm_ptr, columns, eps, OFFSET, HALF
        )
        destination = query_ptr + token * NUM_HEADS * head_dim + numbers
        tl.store(destination, first, mask)
        tl.store(destination + HALF, second, mask)
        return
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        heads = (tile - num_query_tiles) * TILE_HEADS + tl.arange(0, TILE_HEADS)
        is_head = heads < NUM_KV_HEADS
        mask = is_head[:, None] & is_column[None, :]
        numbers = heads[:, None] * head_dim + columns[None, :]
        key_scale = None
        value_scale = None
        if key_scale_ptr is not None:
            key_scales = key_scale_ptr + heads * key_scale_stride
            key_scale = tl.load(key_scales, is_head, 1.0)[:, None]
            value_scales = value_scale_ptr + heads * value_scale_stride
            value_scale = tl.load(value_scales, is_head, 1.0)[:, None]
        source = qkv_ptr + NUM_HEADS * head_dim + numbers
        first, second = _turned(
            source, source + HALF, mask, cos, sin, key_norm_ptr, columns, eps, OFFSET, HALF
        )
        dtype: tl.constexpr = key_cache_ptr.dtype.element_ty
        destination = key_cache_ptr + slot * NUM_KV_HEADS * head_dim + numbers
        tl.store(destination, _as_stored(first, key_scale, dtype), mask)
        tl.store(destination + HALF, _as_stored(second, key_scale, dtype), mask)
        source += NUM_KV_HEADS * head_dim
        destination = value_cache_ptr + slot * NUM_KV_HEADS * head_dim + numbers
        for half in tl.static_range(2):
            value = tl.load(source + half * HALF, mask)
            tl.store(destination + half * HALF, _as_stored(value, value_scale, dtype), mask)


def config_for(head_dim: int) -> Config:
    tile_half = triton.next_power_of_2(head_dim // 2)
    tile_heads = max(1, _PAIRS_PER_TILE // tile_half)
    return {"TILE_HEADS": tile_heads, "TILE_HALF": tile_half, "num_warps": _NUM_WARPS}


def rotary_store_kv_triton(
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
    num_tokens, num_all_heads, head_dim = qkv.shape
    num_kv_heads = key_cache.shape[2]
    num_heads = num_all_heads - 2 * num_kv_heads
    cos, sin = rotary
    assert all(tensor.is_contiguous() for tensor in (qkv, cos, sin))
    query = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    query_norm, key_norm, eps, offset = qk_norm or (None, None, 0.0, 0.0)
    config = config_for(head_dim)
    num_tiles = sum(triton.cdiv(n, config["TILE_HEADS"]) for n in (num_heads, num_kv_heads))
    rotary_store_kv_kernel[(num_tokens, num_tiles)](
        query,
        key_cache,
        value_cache,
        qkv,
        cos,
        sin,
        slot_mapping,
        query_norm,
        key_norm,
        eps,
        *_scale_arguments(key_scale, value_scale),
        OFFSET=offset,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        **config,
    )
    return query


def _scale_arguments(*scales: Tensor | None) -> list[Any]:
    """Scales [num_kv_heads], [] or None as a kernel takes them: all of them, then their strides."""
    strides = (scale.stride(0) if scale is not None and scale.dim() else 0 for scale in scales)
    return [*scales, *strides]
