"""Low-rank updates of rows by their adapters, in Triton.

A program takes a group of rows of one slot. The tiles are of one size for every
batch, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.reference.lora import MAX_GROUP_ROWS, LoraRows

_BLOCK_K, _BLOCK_N = 64, 64


@triton.jit
def lora_shrink_kernel(
    hidden_ptr,  # [num_adapted, rank]
    x_ptr,  # [num_rows, size]
    a_ptr,  # [num_slots, rank, size]
    order_ptr,  # [num_adapted]
    groups_ptr,  # [num_groups, 3]
    size,
    rank,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    group = groups_ptr + tl.program_id(0) * 3
    slot, first, end = tl.load(group), tl.load(group + 1), tl.load(group + 2)
    if first == end:  # a captured launch has as many groups as there may be
        return
    places = first + tl.arange(0, ROWS)
    is_row = places < end
    lanes = tl.arange(0, RANK)
    is_lane = lanes < rank
    x_rows = x_ptr + tl.load(order_ptr + places, is_row, other=0)[:, None] * size
    a_rows = a_ptr + (slot * rank + lanes)[:, None] * size
    total = tl.zeros([ROWS, RANK], tl.float32)
    for start in tl.range(0, size, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        is_column = (columns < size)[None, :]
        x = tl.load(x_rows + columns[None, :], is_row[:, None] & is_column, other=0.0)
        a = tl.load(a_rows + columns[None, :], is_lane[:, None] & is_column, other=0.0)
        total = tl.dot(x, tl.trans(a), total, input_precision="ieee")
    pointers = hidden_ptr + places[:, None] * rank + lanes[None, :]
    is_inside = is_row[:, None] & is_lane[None, :]
    tl.store(pointers, total.to(hidden_ptr.dtype.element_ty), is_inside)


@triton.jit
def lora_expand_kernel(
    y_ptr,  # [num_rows, num_outputs], a row every y_stride numbers
    hidden_ptr,  # [num_adapted, rank]
    b_ptr,  # [num_slots, num_outputs, rank]
    scales_ptr,  # [num_slots]
    order_ptr,  # [num_adapted]
    groups_ptr,  # [num_groups, 3]
    y_stride,
    num_outputs,
    rank,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    group = groups_ptr + tl.program_id(0) * 3
    slot, first, end = tl.load(group), tl.load(group + 1), tl.load(group + 2)
    if first == end:  # a captured launch has as many groups as there may be
        return
    places = first + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lanes = tl.arange(0, RANK)
    is_row, is_output, is_lane = places < end, outputs < num_outputs, lanes < rank
    hidden = tl.load(
        hidden_ptr + places[:, None] * rank + lanes[None, :],
        is_row[:, None] & is_lane[None, :],
        other=0.0,
    )
    b = tl.load(
        b_ptr + (slot * num_outputs + outputs)[:, None] * rank + lanes[None, :],
        is_output[:, None] & is_lane[None, :],
        other=0.0,
    )
    added = tl.dot(hidden, tl.trans(b), input_precision="ieee") * tl.load(scales_ptr + slot)
    rows = tl.load(order_ptr + places, is_row, other=0)
    pointers = y_ptr + rows[:, None] * y_stride + outputs[None, :]
    is_inside = is_row[:, None] & is_output[None, :]
    total = tl.load(pointers, is_inside, other=0.0).to(tl.float32) + added
    tl.store(pointers, total.to(y_ptr.dtype.element_ty), is_inside)


def _tile_of_ranks(rank: int) -> int:
    return max(16, int(triton.next_power_of_2(rank)))


def lora_shrink_triton(x: Tensor, rows: LoraRows, a: Tensor) -> Tensor:
    x = x.contiguous()
    assert a.is_contiguous()
    rank, size = a.shape[1:]
    hidden = torch.empty(len(rows.order), rank, dtype=x.dtype, device=x.device)
    if len(rows.groups):
        lora_shrink_kernel[(len(rows.groups),)](
            hidden, x, a, rows.order, rows.groups, size, rank,
            ROWS=MAX_GROUP_ROWS, RANK=_tile_of_ranks(rank), BLOCK_K=_BLOCK_K,
        )  # fmt: skip
    return hidden


def lora_expand_triton(
    y: Tensor, hidden: Tensor, rows: LoraRows, b: Tensor, scales: Tensor
) -> None:
    assert y.stride(1) == 1
    assert b.is_contiguous()
    num_outputs, rank = b.shape[1:]
    if len(rows.groups):
        lora_expand_kernel[(len(rows.groups), triton.cdiv(num_outputs, _BLOCK_N))](
            y, hidden, b, scales, rows.order, rows.groups, y.stride(0), num_outputs, rank,
            ROWS=MAX_GROUP_ROWS, RANK=_tile_of_ranks(rank), BLOCK_N=_BLOCK_N,
        )  # fmt: skip
