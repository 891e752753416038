"""Layer normalisation: a program computes one row, or a group of one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.rows import config_for


@triton.jit
def layer_norm_kernel(
    normed_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,  # or None
    eps,
    NUM_GROUPS: tl.constexpr,  # of a row, with weights of their own
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, padded to a power of two
):
    start = tl.program_id(0).to(tl.int64) * SIZE
    group_start = tl.program_id(0) % NUM_GROUPS * SIZE
    columns = tl.arange(0, BLOCK)
    is_inside = columns < SIZE
    x = tl.load(x_ptr + start + columns, is_inside, 0.0).to(tl.float32)
    # Two passes over registers: the mean of squares minus the squared mean would lose precision.
    centred = tl.where(is_inside, x - tl.sum(x, axis=0) / SIZE, 0.0)
    variance = tl.sum(centred * centred, axis=0) / SIZE
    weight = tl.load(weight_ptr + group_start + columns, is_inside, 0.0).to(tl.float32)
    normed = centred * tl.rsqrt(variance + eps) * weight
    if bias_ptr is not None:
        normed += tl.load(bias_ptr + group_start + columns, is_inside, 0.0).to(tl.float32)
    tl.store(normed_ptr + start + columns, normed, is_inside)


def layer_norm_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, num_groups: int = 1
) -> Tensor:
    assert x.is_contiguous()
    size = x.shape[1] // num_groups
    normed = torch.empty_like(x)
    layer_norm_kernel[(len(x) * num_groups,)](
        normed, x, weight, bias, eps, NUM_GROUPS=num_groups, SIZE=size, **config_for(size)
    )
    return normed
