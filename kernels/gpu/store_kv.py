"""Writing new keys and values into the paged cache: one launch for both.

A token's heads lie side by side in the step and in its slot, so a program copies a part of a row.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.tuning import Config

_FP8_MAX = tl.constexpr(448.0)  # of e4m3fn
_MAX_BLOCK = 1024  # numbers of a row, for one program
_NUMBERS_PER_WARP = 256  # 16 bytes for each thread, in 16-bit types


@triton.jit
def as_stored(x, scale, dtype: tl.constexpr):
    """x as a cache of this dtype holds it; scale broadcasts to x, or is None if not in FP8."""
    if scale is not None:
        # Divided exactly, so that every device rounds alike.
        x = tl.div_rn(x.to(tl.float32), tl.broadcast_to(scale, x.shape))
        x = tl.clamp(x, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def store_kv_kernel(
    key_cache_ptr,
    value_cache_ptr,
    key_ptr,
    value_ptr,
    slots_ptr,
    key_scale_ptr,  # float32, or None
    value_scale_ptr,
    key_scale_stride,  # from head to head; 0 for one scale in all
    value_scale_stride,
    key_stride,  # from token to token
    value_stride,
    ROW: tl.constexpr,  # num_kv_heads × head_dim
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, c) stores part c of token t."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = columns < ROW
    heads = columns // HEAD_DIM
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        key_scale = None
        value_scale = None
        if key_scale_ptr is not None:
            key_scale = tl.load(key_scale_ptr + heads * key_scale_stride, is_inside, 1.0)
            value_scale = tl.load(value_scale_ptr + heads * value_scale_stride, is_inside, 1.0)
        key = tl.load(key_ptr + token * key_stride + columns, is_inside)
        key = as_stored(key, key_scale, key_cache_ptr.dtype.element_ty)
        tl.store(key_cache_ptr + slot * ROW + columns, key, is_inside)
        value = tl.load(value_ptr + token * value_stride + columns, is_inside)
        value = as_stored(value, value_scale, value_cache_ptr.dtype.element_ty)
        tl.store(value_cache_ptr + slot * ROW + columns, value, is_inside)


def config_for(row: int) -> Config:
    """For tokens of `row` numbers, in keys as in values."""
    block = min(triton.next_power_of_2(row), _MAX_BLOCK)
    return {"BLOCK": block, "num_warps": max(1, block // _NUMBERS_PER_WARP)}


def store_kv_triton(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    num_tokens, num_kv_heads, head_dim = key.shape
    assert key[0].is_contiguous(), f"strides {key.stride()}"
    assert value[0].is_contiguous(), f"strides {value.stride()}"
    row = num_kv_heads * head_dim
    config = config_for(row)
    store_kv_kernel[(num_tokens, triton.cdiv(row, config["BLOCK"]))](
        key_cache,
        value_cache,
        key,
        value,
        slot_mapping,
        *scale_arguments(key_scale, value_scale),
        key.stride(0),
        value.stride(0),
        ROW=row,
        HEAD_DIM=head_dim,
        **config,
    )


def scale_arguments(*scales: Tensor | None) -> list[Any]:
    """Scales [num_kv_heads], [] or None as a kernel takes them: all of them, then their strides."""
    strides = (scale.stride(0) if scale is not None and scale.dim() else 0 for scale in scales)
    return [*scales, *strides]
