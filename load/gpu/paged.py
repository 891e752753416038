"""Sequences with their KV in blocks: what attention is checked and measured on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.paged_layout import PagedLayout
from penstock.load.gpu.bench import Bench
from penstock.load.gpu.sizes import AttentionSizes


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Caches [num_blocks, block_size, num_kv_heads, head_dim] and where sequences lie in them.

    Attributes:
        key_scale, value_scale: float32 [num_kv_heads], where the caches are in FP8.
    """

    key_cache: Tensor
    value_cache: Tensor
    layout: PagedLayout
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


def attend(query: Tensor, kv: PagedKV, **options: Any) -> Tensor:
    """Our kernel on query [num_tokens, num_heads, head_dim], with its options for measurements."""
    run: Callable[..., Tensor] = gpu_operation("paged_attention")
    return run(
        query,
        kv.key_cache,
        kv.value_cache,
        kv.layout,
        scale=query.shape[2] ** -0.5,
        key_scale=kv.key_scale,
        value_scale=kv.value_scale,
        **options,
    )


def make_layout(
    bench: Bench, seq_lens: Sequence[int], query_lens: Sequence[int], *, block_size: int
) -> PagedLayout:
    """Sequences of which the last `query_lens` tokens are new, in blocks of random order."""
    num_columns = -(-max(seq_lens) // block_size)
    tables = bench.permutation(len(seq_lens) * num_columns).view(-1, num_columns)
    slots = _slots(tables, block_size)
    new_slots = [
        row[seq_len - query_len : seq_len]
        for row, seq_len, query_len in zip(slots, seq_lens, query_lens, strict=True)
    ]
    return PagedLayout(
        query_start_loc=_int32(bench, [0, *accumulate(query_lens)]),
        seq_lens=_int32(bench, seq_lens),
        block_tables=tables.to(torch.int32),
        slot_mapping=torch.cat(new_slots),
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )


def random_kv(bench: Bench, layout: PagedLayout, sizes: AttentionSizes) -> PagedKV:
    """Random numbers in every block of the layout."""
    num_blocks = layout.block_tables.numel()
    shape = (num_blocks, sizes.block_size, sizes.num_kv_heads, sizes.head_dim)
    return PagedKV(bench.random(*shape), bench.random(*shape), layout)


def in_fp8(bench: Bench, kv: PagedKV) -> PagedKV:
    """The caches rounded to FP8, and some scales."""
    fp8, num_kv_heads = torch.float8_e4m3fn, kv.key_cache.shape[2]
    scales = (0.5 + bench.random(num_kv_heads, dtype=torch.float32).abs() for _ in range(2))
    return PagedKV(kv.key_cache.to(fp8), kv.value_cache.to(fp8), kv.layout, *scales)


def contiguous(kv: PagedKV) -> PagedKV:
    """The same caches, in which each sequence now lies in neighbouring blocks: others' tokens, of
    which there are as many."""
    tables = kv.layout.block_tables
    in_order = torch.arange(tables.numel(), dtype=torch.int32, device=tables.device)
    return replace(kv, layout=replace(kv.layout, block_tables=in_order.view(tables.shape)))


def poison_unowned(kv: PagedKV) -> None:
    """NaN in every slot that holds no token of a sequence."""
    slots = _slots(kv.layout.block_tables.long(), kv.key_cache.shape[1])
    positions = torch.arange(slots.shape[1], device=slots.device)
    unowned = slots[positions >= kv.layout.seq_lens[:, None]]
    for cache in (kv.key_cache, kv.value_cache):
        cache.flatten(0, 1)[unowned] = torch.nan


def _slots(tables: Tensor, block_size: int) -> Tensor:
    """tables int64 [num_seqs, num_columns] → the slot of each position, a row for each sequence."""
    offsets = torch.arange(block_size, device=tables.device)
    return (tables[:, :, None] * block_size + offsets).flatten(1)


def _int32(bench: Bench, values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=bench.device)
