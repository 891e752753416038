"""A matrix product whose rows do not depend on each other, in Triton.

A program sums a tile of outputs over all of k, in steps of one size, whatever the number of rows:
nothing is split and merged, and a smaller batch does not get another tile size. (He et al.,
"Defeating Nondeterminism in LLM Inference", 2025, on why libraries do otherwise.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.tuning import Config


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    output_ptr,  # [num_rows, num_outputs]
    x_ptr,  # [num_rows, SIZE]
    weight_ptr,  # [num_outputs, SIZE]
    bias_ptr,  # [num_outputs], or None
    num_rows,
    num_outputs,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (m, n): a tile of rows by a tile of outputs; programs of one tile of weights are
    consecutive, so that it is read from memory once."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * SIZE
    weight_rows = weight_ptr + outputs.to(tl.int64)[:, None] * SIZE
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, SIZE, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        is_column = (columns < SIZE)[None, :]
        x = tl.load(x_rows + columns[None, :], is_row[:, None] & is_column, other=0.0)
        weight = tl.load(weight_rows + columns[None, :], is_output[:, None] & is_column, other=0.0)
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, is_output, other=0.0).to(tl.float32)[None, :]
    pointers = output_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    is_inside = is_row[:, None] & is_output[None, :]
    tl.store(pointers, total.to(output_ptr.dtype.element_ty), is_inside)


def config_for(dtype: torch.dtype) -> Config:
    """By the type alone: by nothing that a batch changes."""
    if dtype == torch.float32:  # without tensor cores: for registers
        return {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}


def linear_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x = x.contiguous()
    assert weight.is_contiguous()
    num_rows, num_outputs = len(x), len(weight)
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if num_rows:
        config = config_for(x.dtype)
        grid = (
            triton.cdiv(num_rows, config["BLOCK_M"]),
            triton.cdiv(num_outputs, config["BLOCK_N"]),
        )
        linear_kernel[grid](
            output, x, weight, bias, num_rows, num_outputs, SIZE=x.shape[1], **config
        )
    return output
