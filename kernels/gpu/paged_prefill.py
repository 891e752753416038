"""Prefill attention: the new tokens of each sequence over its cached keys, in Triton.

FlashAttention (Dao et al., NeurIPS 2022; Dao, "FlashAttention-2", 2023) for sequences of any
lengths in one launch. A tile's rows are the tokens of one sequence × the query heads of one KV
head, so a tile of keys is read once for all of them. Tiles of keys start at multiples of their
size, so the order of a token's sums does not depend on its chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_limits import DeviceLimits
from penstock.kernels.gpu.paged_tiles import attend, finish, initial_state, load_slopes
from penstock.kernels.gpu.tuning import Config
from penstock.kernels.paged_layout import PagedLayout


@triton.jit
def _find_tile(query_start_loc_ptr, number, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence of a tile of BLOCK_Q tokens, and the first of them in it.

    Sequence s has the tiles from query_start_loc[s] // BLOCK_Q + s on: always enough, whatever the
    lengths before it, so no list of tiles is needed.
    """
    low, high = tl.full([], 0, tl.int32), num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= number:
            low = middle
        else:
            high = middle
    first_number = tl.load(query_start_loc_ptr + low) // BLOCK_Q + low
    return low, (number - first_number) * BLOCK_Q


@triton.jit
def _tile_ranges(first_position, end, window, BLOCK_N: tl.constexpr):
    """Where to begin, and between which positions every row sees all; multiples of BLOCK_N."""
    begin = 0
    full_begin = 0
    if window is not None:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(end - window, 0), BLOCK_N) * BLOCK_N
    full_end = tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, full_begin)
    return begin, full_begin, full_end


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def prefill_kernel(
    output_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    value_cache_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    sinks_ptr,  # [num_heads], or None
    alibi_ptr,  # float32 [num_heads], or None
    key_scale_ptr,  # float32, or None
    value_scale_ptr,
    scale,
    soft_cap,  # or None
    window,  # or None
    num_seqs,
    query_stride,  # from token to token
    slot_stride,
    table_stride,
    scale_stride,  # from KV head to KV head
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    IS_CONTIGUOUS: tl.constexpr,
    IS_INVARIANT: tl.constexpr,
):
    """Program (h, t): the query heads of KV head h for tile t of tokens, the last one first.

    Sequences of one token are skipped, unless IS_INVARIANT: then every token is computed the same
    way, however many tokens its sequence has in the step.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head, num_heads = tl.program_id(0), tl.num_programs(0) * GROUP
    # Late tokens see the most, so their programs start first.
    number = tl.num_programs(1) - 1 - tl.program_id(1)
    seq, first_token = _find_tile(query_start_loc_ptr, number, num_seqs, BLOCK_Q)
    seq_start = tl.load(query_start_loc_ptr + seq).to(tl.int64)
    query_len = (tl.load(query_start_loc_ptr + seq + 1) - seq_start).to(tl.int32)
    is_left_alone = first_token >= query_len
    if not IS_INVARIANT:
        is_left_alone |= query_len == 1
    if is_left_alone:
        return
    num_before = tl.load(seq_lens_ptr + seq) - query_len

    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (tokens < query_len)
    is_inside = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    token_offsets = (seq_start + tokens)[:, None] * query_stride
    head_offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(query_ptr + token_offsets + head_offsets, is_inside, other=0.0)
    queries = queries.to(DOT_DTYPE)
    query_positions = num_before + tokens
    cache = (
        key_cache_ptr,
        value_cache_ptr,
        key_scale_ptr,
        value_scale_ptr,
        slot_stride,
        scale_stride,
    )
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    scoring = scale, soft_cap, window
    end = num_before + tl.minimum(first_token + BLOCK_Q, query_len)
    begin, full_begin, full_end = _tile_ranges(num_before + first_token, end, window, BLOCK_N)
    if IS_INVARIANT:  # where a tile needs no mask depends on the other rows
        full_begin = begin
        full_end = begin
    slopes = load_slopes(alibi_ptr, heads, is_row)
    state = initial_state(sinks_ptr, heads, is_row, BLOCK_M, BLOCK_D)
    if window is not None:
        state = attend(
            state, queries, query_positions, kv_head, cache, table_ptr, scoring, slopes,
            begin, tl.minimum(full_begin, end),
            HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, IS_CONTIGUOUS, IS_MASKED=True,
        )  # fmt: skip
    state = attend(
        state, queries, query_positions, kv_head, cache, table_ptr, scoring, slopes,
        full_begin, full_end,
        HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, IS_CONTIGUOUS, IS_MASKED=False,
    )  # fmt: skip
    state = attend(
        state, queries, query_positions, kv_head, cache, table_ptr, scoring, slopes,
        full_end, end,
        HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, IS_CONTIGUOUS, IS_MASKED=True,
    )  # fmt: skip
    pointers = output_ptr + (seq_start + tokens)[:, None] * num_heads * HEAD_DIM + head_offsets
    mixed = finish(state)
    tl.store(pointers, mixed.to(output_ptr.dtype.element_ty), is_inside)


def prefill(
    output: Tensor,
    arguments: dict[str, Any],
    layout: PagedLayout,
    config: Config,
    *,
    is_invariant: bool = False,
) -> None:
    """Attend for the sequences with several tokens in this step; other rows are not written.

    Args:
        output: [num_tokens, num_heads, head_dim], modified
        arguments: of `prefill_kernel`, except for those determined here.
        is_invariant: also for sequences of one token; a token's bits are then the same in any step.
    """
    num_tokens, num_heads, _ = output.shape
    group = arguments["GROUP"]
    num_tiles = num_tokens // (config["BLOCK_M"] // group) + layout.num_seqs
    prefill_kernel[(num_heads // group, num_tiles)](
        output, num_seqs=layout.num_seqs, IS_INVARIANT=is_invariant, **arguments, **config
    )


def prefill_config(group: int, head_dim: int, dtype: torch.dtype, limits: DeviceLimits) -> Config:
    """A tile for `prefill_kernel` without a tuned configuration.

    Args:
        dtype: the queries'.
    """
    block_d = triton.next_power_of_2(head_dim)
    if dtype == torch.float32:  # without tensor cores: for registers
        block_m, block_n, num_stages = 32, 16, 2
    else:
        block_m, block_n, num_stages = 128, min(max(8192 // block_d, 16), 128), 3
    while (block_m + 2 * num_stages * block_n) * block_d * dtype.itemsize > limits.shared_bytes:
        if num_stages > 2:
            num_stages -= 1
        elif block_n >= block_m:
            block_n //= 2
        else:
            block_m //= 2
    return {
        "BLOCK_M": max(block_m, triton.next_power_of_2(group)),
        "BLOCK_N": block_n,
        "num_warps": 8,
        "num_stages": num_stages,
    }
