"""Checks of paged attention against a softmax in float64, sequence by sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from penstock.load.gpu.bench import Bench, Check
from penstock.load.gpu.errors import bound_of, poisoned, worst_row
from penstock.load.gpu.paged import (
    PagedKV,
    attend,
    contiguous,
    in_fp8,
    make_layout,
    poison_unowned,
    random_kv,
)
from penstock.load.gpu.sizes import AttentionSizes

_MAX_CHUNK = 200  # new tokens of a sequence: the rest was computed before


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Which attention, beside its shapes.

    Attributes:
        has_sinks: each head has a logit that no position stands for.
        is_contiguous: sequences lie in neighbouring blocks, and the table is not looked up.
        split_len: the length of the splits of decodes; None: the kernel's choice.
        is_invariant: nothing is split, and every token goes the same way.
    """

    name: str
    sizes: AttentionSizes
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    is_fp8: bool = False
    is_contiguous: bool = False
    split_len: int | None = None
    is_invariant: bool = False


def checks(bench: Bench) -> Iterator[Check]:
    """Every case for decodes, for whole prompts, and for chunks beside decodes."""
    seq_lens = bench.sizes.check_lens
    chunks = [min(length, _MAX_CHUNK - index) for index, length in enumerate(seq_lens)]
    for case in _cases(bench.sizes.attention):
        for kind, query_lens in (
            ("decode", [1] * len(seq_lens)),
            ("prefill", list(seq_lens)),
            ("mixed", [1 if index % 2 else chunk for index, chunk in enumerate(chunks)]),
        ):
            error = _error(bench, case, list(seq_lens), query_lens)
            yield f"{kind} attention, {case.name}", error, bound_of(bench.sizes.dtype)


def _cases(measured: AttentionSizes) -> list[Case]:
    odd = replace(measured, num_heads=6, num_kv_heads=2, head_dim=80, block_size=8)
    single = replace(measured, num_heads=5, num_kv_heads=5, head_dim=64, block_size=32)
    return [
        Case(name="as measured", sizes=measured),
        Case(name="contiguous", sizes=measured, is_contiguous=True),
        Case(name="fixed splits", sizes=measured, split_len=32),
        Case(name="invariant", sizes=measured, is_invariant=True),
        Case(name="FP8", sizes=measured, is_fp8=True),
        Case(name="odd heads, window", sizes=odd, window=19),
        Case(name="soft cap, sinks", sizes=single, soft_cap=3.0, has_sinks=True),
    ]


def _error(bench: Bench, case: Case, seq_lens: list[int], query_lens: list[int]) -> float:
    sizes = case.sizes
    layout = make_layout(bench, seq_lens, query_lens, block_size=sizes.block_size)
    kv = random_kv(bench, layout, sizes)
    kv = in_fp8(bench, kv) if case.is_fp8 else kv
    kv = contiguous(kv) if case.is_contiguous else kv
    poison_unowned(kv)
    query = bench.random(sum(query_lens), sizes.num_heads, sizes.head_dim)
    sinks = bench.random(sizes.num_heads) if case.has_sinks else None
    result = poisoned(
        lambda: attend(
            query,
            kv,
            window=case.window,
            soft_cap=case.soft_cap,
            sinks=sinks,
            split_len=case.split_len,
            is_invariant=case.is_invariant,
            is_contiguous=case.is_contiguous,
        )
    )
    starts = layout.query_start_loc.tolist()
    exact = [
        _exact(query[start:stop].double(), *_keys_and_values(kv, seq, seq_len), case, sinks)
        for seq, (seq_len, (start, stop)) in enumerate(zip(seq_lens, pairwise(starts), strict=True))
    ]
    return worst_row(result, torch.cat(exact))


def _exact(query: Tensor, keys: Tensor, values: Tensor, case: Case, sinks: Tensor | None) -> Tensor:
    """One sequence in float64.

    Args:
        query: [query_len, num_heads, head_dim], of the last positions
        keys, values: [seq_len, num_kv_heads, head_dim]
        sinks: [num_heads]
    """
    group = query.shape[1] // keys.shape[1]
    keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[2] ** -0.5
    if case.soft_cap is not None:
        scores = case.soft_cap * (scores / case.soft_cap).tanh()
    positions = torch.arange(len(keys), device=query.device)
    distances = positions[-len(query) :, None] - positions  # [query_len, seq_len]
    is_visible = (distances >= 0) & (distances < (case.window or len(keys)))
    scores = scores.masked_fill(~is_visible, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, column], 2)
    weights = scores.softmax(2)[:, :, : len(keys)]
    return torch.einsum("hqk,khd->qhd", weights, values)


def _keys_and_values(kv: PagedKV, seq: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Of one sequence: float64 [seq_len, num_kv_heads, head_dim]."""
    blocks = kv.layout.block_tables[seq].long()

    def numbers(cache: Tensor, scale: Tensor | None) -> Tensor:
        found = cache[blocks].double().flatten(0, 1)[:seq_len]
        return found if scale is None else found * scale.double()[:, None]

    return numbers(kv.key_cache, kv.key_scale), numbers(kv.value_cache, kv.value_scale)
