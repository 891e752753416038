"""Root-mean-square normalisation, alone and of a sum: a program computes one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.rows import config_for


@triton.jit
def rms_norm_kernel(
    normed_ptr,
    total_ptr,  # x + residual; None without one
    x_ptr,
    residual_ptr,  # or None
    weight_ptr,
    eps,
    OFFSET: tl.constexpr,  # of the weights
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, padded to a power of two
):
    start = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    x = tl.load(x_ptr + start + columns, is_inside, 0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + start + columns, is_inside, 0.0).to(tl.float32)
        total = (x + residual).to(total_ptr.dtype.element_ty)  # the norm reads it rounded
        tl.store(total_ptr + start + columns, total, is_inside)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + columns, is_inside, 0.0).to(tl.float32)
    mean_of_squares = tl.sum(x * x, axis=0) / SIZE
    normed = x * tl.rsqrt(mean_of_squares + eps) * (weight + OFFSET)
    tl.store(normed_ptr + start + columns, normed, is_inside)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    assert x.is_contiguous()
    size = x.shape[1]
    normed = torch.empty_like(x)
    rms_norm_kernel[(len(x),)](
        normed, None, x, None, weight, eps, OFFSET=offset, SIZE=size, **config_for(size)
    )
    return normed


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    assert x.is_contiguous()
    assert residual.is_contiguous()
    size = x.shape[1]
    normed, total = torch.empty_like(x), torch.empty_like(x)
    rms_norm_kernel[(len(x),)](
        normed, total, x, residual, weight, eps, OFFSET=offset, SIZE=size, **config_for(size)
    )
    return normed, total
