"""Shared by the paged attention kernels: tiles of keys and values, and the softmax over them.

A tile's rows are queries that share a KV head; its columns are positions, found through the
block table. The softmax is online: each row has a state of its largest score so far m, the sum
of exp(score - m), and the sum of exp(score - m) · value (Milakov & Gimelshein, "Online normalizer
calculation for softmax", 2018; Dao et al., "FlashAttention", NeurIPS 2022, §3.1). Scores are kept
times log2(e), since the device has exp2.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def initial_state(sinks_ptr, heads, has_sink, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The state of rows that have seen nothing but, where there is one, their head's sink."""
    if sinks_ptr is None:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
    else:
        sinks = tl.load(sinks_ptr + heads, has_sink, other=float("-inf")).to(tl.float32)
        row_max = sinks * _LOG2_E
        row_sum = has_sink.to(tl.float32)
    return row_max, row_sum, tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def load_slopes(alibi_ptr, heads, is_row):
    """The slope of each row's head; None without ALiBi."""
    slopes = None
    if alibi_ptr is not None:
        slopes = tl.load(alibi_ptr + heads, is_row, other=0.0)
    return slopes


@triton.jit
def attend(
    state,
    queries,  # [BLOCK_M, BLOCK_D]
    query_positions,  # int32 [BLOCK_M]
    kv_head,
    cache,  # pointers to keys, values and their scales (or None); strides of slots and scales
    table_ptr,  # the sequence's row of the block table
    scoring,  # scale, soft_cap or None, window or None
    slopes,  # [BLOCK_M], what a position of distance adds to a score; or None
    begin,
    end,  # of the positions; unless IS_MASKED, a multiple of BLOCK_N after begin
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CONTIGUOUS: tl.constexpr,
    IS_MASKED: tl.constexpr,  # else every row sees every position
):
    """The state after the positions from begin to end."""
    keys_ptr, values_ptr, key_scale_ptr, value_scale_ptr, slot_stride, scale_stride = cache
    keys_ptr += kv_head * HEAD_DIM
    values_ptr += kv_head * HEAD_DIM
    scale, soft_cap, window = scoring
    if key_scale_ptr is not None:
        scale *= tl.load(key_scale_ptr + kv_head * scale_stride)
    first_read = 0
    if window is not None:
        first_read = tl.min(query_positions) - window + 1
    columns = tl.arange(0, BLOCK_N)
    blocks = _load_blocks(table_ptr, begin + columns, end, BLOCK_SIZE, IS_CONTIGUOUS)
    for tile_begin in range(begin, end, BLOCK_N):
        positions = tile_begin + columns
        slots = blocks.to(tl.int64) * BLOCK_SIZE + positions.to(tl.uint32) % BLOCK_SIZE
        # The next tile's blocks, so that no tile waits for the table.
        blocks = _load_blocks(table_ptr, positions + BLOCK_N, end, BLOCK_SIZE, IS_CONTIGUOUS)
        is_read = None
        is_visible = None
        if IS_MASKED:
            is_read = (positions >= first_read) & (positions < end)
            is_visible = positions[None, :] <= query_positions[:, None]
            if window is not None:
                is_visible &= positions[None, :] > (query_positions - window)[:, None]
        keys = _load_tile(keys_ptr, slots * slot_stride, is_read, HEAD_DIM, BLOCK_D)
        values = _load_tile(values_ptr, slots * slot_stride, is_read, HEAD_DIM, BLOCK_D)
        values = values.to(queries.dtype)
        if value_scale_ptr is not None:
            # Here rather than at the end: else the compiler brings FP8 into the layout of the
            # product byte by byte, and converts it there.
            value_scale = tl.load(value_scale_ptr + kv_head * scale_stride)
            values *= value_scale.to(queries.dtype)
        bias = None
        if slopes is not None:
            bias = slopes[:, None] * (positions[None, :] - query_positions[:, None]).to(tl.float32)
        state = _attend_tile(
            state, queries, keys.to(queries.dtype), values, is_visible, scale, soft_cap, bias
        )
    return state


@triton.jit
def finish(state):
    """What the rows have seen: [BLOCK_M, BLOCK_D], zeros for rows that have seen nothing."""
    _, row_sum, mixed = state
    return mixed / tl.where(row_sum == 0, 1.0, row_sum)[:, None]


@triton.jit
def _load_blocks(table_ptr, positions, end, BLOCK_SIZE: tl.constexpr, IS_CONTIGUOUS: tl.constexpr):
    """The cache blocks of positions before end; what the table holds beyond may be anything."""
    numbers = positions.to(tl.uint32) // BLOCK_SIZE  # unsigned: a shift
    if IS_CONTIGUOUS:
        blocks = tl.load(table_ptr) + numbers
    else:
        blocks = tl.load(table_ptr + numbers, positions < end)
    return blocks


@triton.jit
def _load_tile(head_ptr, offsets, is_read, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_N, BLOCK_D], zeros where nothing is read: an unowned slot may hold NaN."""
    dims = tl.arange(0, BLOCK_D)
    pointers = head_ptr + offsets[:, None] + dims[None, :]
    if is_read is not None:
        tile = tl.load(pointers, is_read[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    elif HEAD_DIM == BLOCK_D:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, dims[None, :] < HEAD_DIM, other=0.0)
    return tile


@triton.jit
def _attend_tile(state, queries, keys, values, is_visible, scale, soft_cap, bias):
    row_max, row_sum, mixed = state
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    to_log2 = _LOG2_E
    if bias is not None:
        scores = scores * scale + bias
    elif soft_cap is None:
        to_log2 = scale * _LOG2_E
    else:
        # cap · tanh(score / cap), by a form of tanh that does not overflow.
        inverse = 1 / (1 + tl.exp2(scores * (scale * 2 * _LOG2_E / soft_cap)))
        scores = soft_cap * (1 - 2 * inverse)
    if is_visible is not None:
        scores = tl.where(is_visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * to_log2)
    offset = new_max
    if is_visible is not None:  # a row may have seen nothing yet
        offset = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * to_log2 - offset[:, None])
    decay = tl.exp2(row_max - offset)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    mixed = mixed * decay[:, None]
    mixed = tl.dot(weights.to(values.dtype), values, mixed, input_precision="ieee")
    return new_max, row_sum, mixed
