"""Decode attention: the one new token of each sequence over its cached keys, in Triton.

Flash-decoding (Dao et al., "Flash-Decoding for long-context inference", 2023): the positions that a
token sees are split, so that few sequences also fill the device; each split has its own softmax,
and a second kernel merges them by their log-sum-exps. The query heads that share a KV head are the
rows of one tile, so a key is read once for all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_limits import DeviceLimits, device_limits
from penstock.kernels.gpu.paged_tiles import attend, finish, initial_state, load_slopes
from penstock.kernels.gpu.tuning import Config
from penstock.kernels.paged_layout import PagedLayout

_TILE_BYTES = 16 * 1024  # of keys: two or three tiles in flight fill the link to memory
_SPLITS_AT_ONCE = 16
_LONG_SPLIT = 4096  # positions; no split needs to be longer


@triton.jit
def _split_of(seq_len, window, num_splits, min_split_len, BLOCK_N: tl.constexpr):
    """The first position that a sequence's last token sees, and the length of its splits."""
    first = 0 if window is None else tl.maximum(seq_len - window, 0)
    split_len = tl.maximum(tl.cdiv(seq_len - first, num_splits), min_split_len)
    return first, tl.cdiv(split_len, BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["min_split_len", "table_stride"])
def decode_kernel(
    output_ptr,  # [num_tokens, num_heads, HEAD_DIM]; None where splits are merged
    mixed_ptr,  # float32 [num_seqs, num_heads, num_splits, HEAD_DIM], or None
    log_sum_ptr,  # float32 [num_seqs, num_heads, num_splits], base 2; or None
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
    min_split_len,
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
):
    """Program (h, s, i): split i of sequence s, for the query heads of KV head h."""
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_heads, num_splits = tl.num_programs(0) * GROUP, tl.num_programs(2)
    token = tl.load(query_start_loc_ptr + seq).to(tl.int64)
    query_len = tl.load(query_start_loc_ptr + seq + 1) - token
    seq_len = tl.load(seq_lens_ptr + seq)
    first, split_len = _split_of(seq_len, window, num_splits, min_split_len, BLOCK_N)
    begin = first + split * split_len
    is_left_alone = query_len != 1
    if output_ptr is None:  # else the one split of a sequence without keys gives zeros
        is_left_alone |= begin >= seq_len
    if is_left_alone:
        return

    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    heads = kv_head * GROUP + rows
    is_row = rows < GROUP
    is_inside = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(query_ptr + token * query_stride + offsets, is_inside, other=0.0)
    cache = (
        key_cache_ptr,
        value_cache_ptr,
        key_scale_ptr,
        value_scale_ptr,
        slot_stride,
        scale_stride,
    )
    table_ptr = block_tables_ptr + seq.to(tl.int64) * table_stride
    # Without a window: what is left out of it lies before `begin`.
    scoring = scale, soft_cap, None
    end = tl.minimum(begin + split_len, seq_len)
    query_positions = tl.full([BLOCK_M], seq_len - 1, tl.int32)
    slopes = load_slopes(alibi_ptr, heads, is_row)
    state = initial_state(sinks_ptr, heads, is_row & (split == 0), BLOCK_M, BLOCK_D)
    state = attend(
        state, queries.to(DOT_DTYPE), query_positions, kv_head, cache, table_ptr, scoring, slopes,
        begin, end,
        HEAD_DIM, BLOCK_SIZE, BLOCK_D, BLOCK_N, IS_CONTIGUOUS, IS_MASKED=True,
    )  # fmt: skip
    mixed = finish(state)
    if output_ptr is not None:
        pointers = output_ptr + token * num_heads * HEAD_DIM + offsets
        tl.store(pointers, mixed.to(output_ptr.dtype.element_ty), is_inside)
    else:
        row_max, row_sum, _ = state
        splits = (seq.to(tl.int64) * num_heads + heads) * num_splits + split
        tl.store(log_sum_ptr + splits, row_max + tl.log2(row_sum), is_row)
        tl.store(mixed_ptr + splits[:, None] * HEAD_DIM + dims[None, :], mixed, is_inside)


@triton.jit(do_not_specialize=["min_split_len", "num_splits"])
def merge_kernel(
    output_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    mixed_ptr,  # float32 [num_seqs, num_heads, num_splits, HEAD_DIM]
    log_sum_ptr,  # float32 [num_seqs, num_heads, num_splits], base 2
    query_start_loc_ptr,
    seq_lens_ptr,
    window,  # or None
    min_split_len,
    num_splits,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,  # that of the splits
    BLOCK_S: tl.constexpr,  # splits at once: the order of summing depends on it alone
):
    """Program (h, s) merges the splits of head h of sequence s."""
    head, seq = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0)
    token = tl.load(query_start_loc_ptr + seq).to(tl.int64)
    if tl.load(query_start_loc_ptr + seq + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    first, split_len = _split_of(seq_len, window, num_splits, min_split_len, BLOCK_N)
    num_used = tl.cdiv(seq_len - first, split_len)

    dims = tl.arange(0, BLOCK_D)
    first_row = (seq.to(tl.int64) * num_heads + head) * num_splits
    log_max, total = float("-inf"), 0.0
    mixed = tl.zeros([BLOCK_D], tl.float32)
    for begin in range(0, num_used, BLOCK_S):
        splits = begin + tl.arange(0, BLOCK_S)
        is_used = splits < num_used
        log_sums = tl.load(log_sum_ptr + first_row + splits, is_used, other=float("-inf"))
        is_inside = is_used[:, None] & (dims[None, :] < HEAD_DIM)
        pointers = mixed_ptr + (first_row + splits)[:, None] * HEAD_DIM + dims[None, :]
        part = tl.load(pointers, is_inside, other=0.0)  # [BLOCK_S, BLOCK_D]
        new_max = tl.maximum(log_max, tl.max(log_sums, 0))
        decay, weights = tl.exp2(log_max - new_max), tl.exp2(log_sums - new_max)
        mixed = mixed * decay + tl.sum(weights[:, None] * part, 0)
        total = total * decay + tl.sum(weights, 0)
        log_max = new_max
    mixed /= tl.where(total == 0, 1.0, total)
    pointers = output_ptr + (token * num_heads + head) * HEAD_DIM + dims
    tl.store(pointers, mixed.to(output_ptr.dtype.element_ty), dims < HEAD_DIM)


def decode(
    output: Tensor,
    arguments: dict[str, Any],
    layout: PagedLayout,
    config: Config,
    *,
    split_len: int | None,
) -> None:
    """Attend for the sequences with one token in this step; other rows are not written.

    Args:
        output: [num_tokens, num_heads, head_dim], modified
        arguments: of `decode_kernel`, except for those determined here.
        split_len: the length of every split; None: chosen to fill the device.
    """
    num_heads, head_dim = output.shape[1:]
    num_seqs, num_kv_heads = layout.num_seqs, num_heads // arguments["GROUP"]
    window, block_n = arguments["window"], config["BLOCK_N"]
    max_visible = layout.max_seq_len if window is None else min(window, layout.max_seq_len)
    if split_len is None:
        limits = device_limits(output.device)
        num_splits, split_len = choose_splits(num_seqs * num_kv_heads, max_visible, block_n, limits)
    else:
        num_splits = -(-max_visible // split_len)
    launch = decode_kernel[(num_kv_heads, num_seqs, num_splits)]
    if num_splits == 1:
        launch(output, None, None, min_split_len=split_len, **arguments, **config)
        return
    shape = (num_seqs, num_heads, num_splits)
    mixed = torch.empty((*shape, head_dim), dtype=torch.float32, device=output.device)
    log_sums = torch.empty(shape, dtype=torch.float32, device=output.device)
    launch(None, mixed, log_sums, min_split_len=split_len, **arguments, **config)
    where = (layout.query_start_loc, layout.seq_lens, window, split_len, num_splits)
    sizes = {"HEAD_DIM": head_dim, "BLOCK_D": arguments["BLOCK_D"], "BLOCK_N": block_n}
    merge_kernel[(num_heads, num_seqs)](
        output, mixed, log_sums, *where, **sizes, BLOCK_S=_SPLITS_AT_ONCE
    )


def choose_splits(
    num_rows: int, max_visible: int, block_n: int, limits: DeviceLimits
) -> tuple[int, int]:
    """The maximum number of splits of a sequence, and their minimum length.

    The device determines a sequence's splits from its length, so a captured launch stays valid for
    other lengths up to max_visible.

    Args:
        num_rows: sequences × KV heads, each a row of programs.
        max_visible: the most positions that a token sees.
    """
    num_slots = 2 * limits.num_processors  # two programs on each keep its link to memory busy
    shortest = 2 * block_n
    limit = 4 * num_slots // num_rows
    most = max(1, min(-(-max_visible // shortest), limit))

    def fullness(num_splits: int) -> float:
        """The device's utilisation, averaged over all rounds of programs."""
        num_programs = num_splits * num_rows
        return num_programs / (-(-num_programs // num_slots) * num_slots)

    candidates = range(1, most + 1)
    full = (number for number in candidates if fullness(number) > 0.9)
    num_splits = next(full, max(candidates, key=fullness))
    # One long sequence among many short ones must not keep few processors busy to the end.
    of_longest = min(-(-max_visible // _LONG_SPLIT), limit)
    if of_longest > num_splits:
        return of_longest, max(shortest, _LONG_SPLIT // num_splits)
    return num_splits, shortest


def decode_config(group: int, head_dim: int, dtype: torch.dtype, limits: DeviceLimits) -> Config:
    """A tile for `decode_kernel` without a tuned configuration.

    Args:
        dtype: the cache's, or float32 if the queries have it.
    """
    row_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
    block_n = min(max(_TILE_BYTES // row_bytes, 16), 128)
    buffers = (limits.shared_bytes - 8 * 1024) // (2 * block_n * row_bytes)
    return {
        "BLOCK_M": max(16, triton.next_power_of_2(group)),
        "BLOCK_N": block_n,
        "num_warps": 8 if dtype == torch.float32 else 4,  # without tensor cores: for registers
        "num_stages": min(max(buffers, 1), 2) + 1,
    }
