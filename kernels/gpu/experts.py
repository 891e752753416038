"""The products of a mixture of experts in Triton, dense and quantized.

One launch for all experts, as in Gale et al., "MegaBlocks" (2023): a program multiplies a tile of
one expert's rows. How many rows each has is known on the device alone, so a program finds its tile
itself, and there are as many programs as there could be tiles. Tiles have one size whatever the
number of rows, so that a row's bits do not depend on the others.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.linear_quantized import _bytes, _product_tile, level_sizes
from penstock.kernels.gpu.quantized import GpuCodes
from penstock.kernels.gpu.tuning import Config
from penstock.kernels.reference.experts import SlotGroups


@triton.jit
def _tile(ends_ptr, num_experts, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The expert of program 0's tile, its first row, and where the expert's rows end; the expert is
    num_experts if there are fewer tiles."""
    tile = tl.program_id(0)
    numbers = tl.arange(0, EXPERTS)
    is_expert = numbers < num_experts
    ends = tl.load(ends_ptr + numbers, is_expert, other=0)
    starts = tl.load(ends_ptr + numbers - 1, is_expert & (numbers > 0), other=0)
    num_tiles = tl.where(is_expert, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    tile_ends = tl.cumsum(num_tiles, 0)
    expert = tl.sum((is_expert & (tile_ends <= tile)).to(tl.int32), 0)
    is_own = numbers == expert
    start = tl.sum(tl.where(is_own, starts, 0), 0)
    first = tl.sum(tl.where(is_own, tile_ends - num_tiles, 0), 0)
    return expert, start + (tile - first) * BLOCK_M, tl.sum(tl.where(is_own, ends, 0), 0)


@triton.jit
def experts_linear_kernel(
    output_ptr,  # [num_slots, num_outputs]
    x_ptr,  # [num_slots, SIZE]
    weight_ptr,  # [num_experts · num_outputs, SIZE]
    bias_ptr,  # [num_experts, num_outputs], or None
    ends_ptr,  # int64 [num_experts]
    num_experts,
    num_outputs,
    SIZE: tl.constexpr,
    EXPERTS: tl.constexpr,  # num_experts, padded to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Program (m, n): a tile of an expert's rows by a tile of its outputs."""
    expert, first, end = _tile(ends_ptr, num_experts, EXPERTS, BLOCK_M)
    if expert < num_experts:
        rows = first + tl.arange(0, BLOCK_M)
        outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_output = rows < end, outputs < num_outputs
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * SIZE
        places = expert.to(tl.int64) * num_outputs + outputs
        weight_rows = weight_ptr + places[:, None] * SIZE
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, SIZE, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            is_column = (columns < SIZE)[None, :]
            x = tl.load(x_rows + columns[None, :], is_row[:, None] & is_column, other=0.0)
            weight = tl.load(
                weight_rows + columns[None, :], is_output[:, None] & is_column, other=0.0
            )
            total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
        if bias_ptr is not None:
            total += tl.load(bias_ptr + places, is_output, other=0.0).to(tl.float32)[None, :]
        pointers = output_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        is_inside = is_row[:, None] & is_output[None, :]
        tl.store(pointers, total.to(output_ptr.dtype.element_ty), is_inside)


@triton.jit
def experts_levels_kernel(
    output_ptr,  # [num_slots, num_outputs]
    x_ptr,  # [num_slots, SIZE]
    codes_ptr,  # uint8 or int8 [num_experts · num_outputs, ROW_BYTES]
    scales_ptr,  # [num_blocks, num_experts · num_outputs]
    offsets_ptr,  # of the same shape, or None
    table_ptr,  # float32 [16], or None
    bias_ptr,  # [num_experts, num_outputs], or None
    ends_ptr,  # int64 [num_experts]
    num_experts,
    num_outputs,
    SIZE: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    COLUMNS_PER_SCALE: tl.constexpr,
    SPAN: tl.constexpr,
    CODES_PER_BYTE: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT8: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (m, n), as in `experts_linear_kernel`; weights as in `linear_levels_kernel`."""
    expert, first, end = _tile(ends_ptr, num_experts, EXPERTS, BLOCK_M)
    if expert < num_experts:
        rows = first + tl.arange(0, BLOCK_M)
        outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_output = rows < end, outputs < num_outputs
        places = expert.to(tl.int64) * num_outputs + outputs
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * SIZE
        code_rows = codes_ptr + places[:, None] * ROW_BYTES
        total = _product_tile(
            x_rows, code_rows, places, is_row, is_output, scales_ptr, offsets_ptr, table_ptr,
            num_experts * num_outputs, SIZE, ROW_BYTES, COLUMNS_PER_SCALE, SPAN, CODES_PER_BYTE,
            ZERO, IS_FLOAT8, BLOCK_M, BLOCK_N, COLUMNS,
        )  # fmt: skip
        if bias_ptr is not None:
            total += tl.load(bias_ptr + places, is_output, other=0.0).to(tl.float32)[:, None]
        pointers = output_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
        is_stored = is_row[:, None] & is_output[None, :]
        tl.store(pointers, tl.trans(total).to(output_ptr.dtype.element_ty), is_stored)


def config_for(dtype: torch.dtype) -> Config:
    """By the type alone. A guess: nobody has measured it."""
    if dtype == torch.float32:  # without tensor cores: for registers
        return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}


def dense_config(dtype: torch.dtype) -> Config:
    return {**config_for(dtype), "BLOCK_K": 32 if dtype == torch.float32 else 64}


def experts_linear_triton(
    x: Tensor, matrix: Tensor | GpuCodes, groups: SlotGroups, bias: Tensor | None = None
) -> Tensor:
    """Rows of quantized matrices are multiplied as they are."""
    x, num_experts = x.contiguous(), len(groups.ends)
    num_rows = len(matrix) if isinstance(matrix, Tensor) else matrix.out_features
    num_outputs = num_rows // num_experts
    output = x.new_empty(len(x), num_outputs)
    if not len(x):
        return output
    config = dense_config(x.dtype) if isinstance(matrix, Tensor) else config_for(x.dtype)
    num_tiles = triton.cdiv(len(x), config["BLOCK_M"]) + min(num_experts, len(x))
    grid = (num_tiles, triton.cdiv(num_outputs, config["BLOCK_N"]))
    experts = triton.next_power_of_2(num_experts)
    if isinstance(matrix, Tensor):
        assert matrix.is_contiguous()
        experts_linear_kernel[grid](
            output, x, matrix, bias, groups.ends, num_experts, num_outputs, SIZE=x.shape[1],
            EXPERTS=experts, **config,
        )  # fmt: skip
    else:
        assert matrix.order is None, "each expert has an order of its own"
        experts_levels_kernel[grid](
            output, x, _bytes(matrix), matrix.scales, matrix.offsets, matrix.table, bias,
            groups.ends, num_experts, num_outputs, EXPERTS=experts, **level_sizes(matrix), **config,
        )  # fmt: skip
    return output
