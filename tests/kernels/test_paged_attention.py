"""The paged reference against attention written as a loop over tokens and heads."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.paged_attention import paged_attention
from penstock.kernels.paged_attention_reference import _similar_lengths
from penstock.kernels.paged_layout import PagedLayout
from penstock.kernels.store_kv import store_kv

# (tokens in the cache before the step, tokens of the step) of each sequence
STEPS = {
    "decode": [(0, 1), (6, 1), (30, 1), (31, 1)],
    "prefill": [(0, 5), (0, 33)],
    "mixed": [(17, 1), (0, 9), (8, 7), (40, 1), (3, 30)],
    "one token": [(0, 1)],
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class PagedCase:
    """Random keys and values of some sequences, the older of them already in scattered blocks.

    Slots that no sequence owns hold NaN, as a freed block may.
    """

    def __init__(
        self,
        step: list[tuple[int, int]],
        *,
        block_size: int,
        heads: tuple[int, int],
        head_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(5)
        num_heads, num_kv_heads = heads
        self.step = step
        self.totals = [before + new for before, new in step]
        num_new = sum(new for _, new in step)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.query = random(num_new, num_heads, head_dim)
        self.keys = [random(total, num_kv_heads, head_dim) for total in self.totals]
        self.values = [random(total, num_kv_heads, head_dim) for total in self.totals]
        counts = [-(-total // block_size) for total in self.totals]
        ids = torch.randperm(sum(counts) + 2, generator=generator)[: sum(counts)].split(counts)
        shape = (sum(counts) + 2, block_size, num_kv_heads, head_dim)
        self.key_cache = torch.full(shape, torch.nan, dtype=dtype)
        self.value_cache = self.key_cache.clone()
        table = torch.full((len(step), max(counts)), 10**6, dtype=torch.int32)
        slots = []
        for seq, (blocks, total) in enumerate(zip(ids, self.totals, strict=True)):
            table[seq, : len(blocks)] = blocks
            positions = torch.arange(total)
            slots.append(blocks[positions // block_size] * block_size + positions % block_size)
        new = [-new for _, new in step]
        starts = [0, *torch.tensor([n for _, n in step]).cumsum(0).tolist()]
        self.layout = PagedLayout(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(self.totals, dtype=torch.int32),
            block_tables=table,
            slot_mapping=torch.cat([s[n:] for s, n in zip(slots, new, strict=True)]),
            max_query_len=max(n for _, n in step),
            max_seq_len=max(self.totals),
        )
        for seq, (before, _) in enumerate(step):
            self._store(self.keys[seq][:before], self.values[seq][:before], slots[seq][:before])

    def _store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        store_kv(keys, values, self.key_cache, self.value_cache, slots)

    def store_new(self) -> None:
        new = [-new for _, new in self.step]
        keys, values = (
            torch.cat([tensor[n:] for tensor, n in zip(tensors, new, strict=True)])
            for tensors in (self.keys, self.values)
        )
        self._store(keys, values, self.layout.slot_mapping)

    def naive(self, window: int | None) -> Tensor:
        output = torch.empty(self.query.shape)
        group = self.query.shape[1] // self.keys[0].shape[1]
        starts = self.layout.query_start_loc.tolist()
        for seq, (start, end) in enumerate(pairwise(starts)):
            for token in range(start, end):
                position = self.step[seq][0] + token - start
                first = 0 if window is None else max(0, position - window + 1)
                for head in range(self.query.shape[1]):
                    keys = self.keys[seq][first : position + 1, head // group].float()
                    values = self.values[seq][first : position + 1, head // group].float()
                    query = self.query[token, head].float()
                    weights = (keys @ query / math.sqrt(query.numel())).softmax(0)
                    output[token, head] = weights @ values
        return output

    def paged(self, window: int | None) -> Tensor:
        self.store_new()
        return paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.layout,
            scale=self.query.shape[-1] ** -0.5,
            window=window,
        )


@pytest.mark.parametrize("window", [None, 1, 6, 16, 100])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1), (7, 7)])
def test_equals_naive_attention(heads, step, window):
    case = PagedCase(step, block_size=16, heads=heads, head_dim=16)
    torch.testing.assert_close(case.paged(window), case.naive(window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block_size", [1, 8, 12, 32])
@pytest.mark.parametrize("head_dim", [8, 24, 80, 128])
@pytest.mark.parametrize("window", [None, 10])
def test_block_sizes_and_head_sizes(block_size, head_dim, window):
    case = PagedCase(STEPS["mixed"], block_size=block_size, heads=(4, 2), head_dim=head_dim)
    torch.testing.assert_close(case.paged(window), case.naive(window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_half_precision(dtype, window, step):
    case = PagedCase(step, block_size=8, heads=(8, 2), head_dim=64, dtype=dtype)
    tolerance = TOLERANCES[dtype]
    paged = case.paged(window)
    assert paged.dtype == dtype
    torch.testing.assert_close(paged.float(), case.naive(window), atol=tolerance, rtol=tolerance)


def test_a_broken_sequence_does_not_spoil_its_neighbours():
    case = PagedCase(STEPS["mixed"], block_size=8, heads=(4, 2), head_dim=16)
    expected = case.naive(None)
    case.keys[2][:] = torch.nan
    case.values[2][:] = torch.nan
    start, end = case.layout.query_start_loc[2:4].tolist()
    output = case.paged(None)
    assert output[start:end].isnan().all()
    others = torch.ones(len(output), dtype=torch.bool)
    others[start:end] = False
    torch.testing.assert_close(output[others], expected[others], atol=1e-5, rtol=1e-5)


def test_wrong_shapes_are_our_own_bugs():
    case = PagedCase(STEPS["decode"], block_size=8, heads=(4, 2), head_dim=16)
    case.query = case.query[:-1]
    with pytest.raises(AssertionError, match="one slot for each token"):
        case.paged(None)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50_000), max_size=40))
def test_a_batch_is_padded_in_groups_of_similar_length(lengths: list[int]) -> None:
    """One long sequence must not blow up the gathers of many short ones."""
    seqs = list(range(len(lengths)))
    groups = _similar_lengths(seqs, lengths)
    assert sorted(seq for group in groups for seq in group) == seqs
    for group in groups:
        padded = len(group) * max(lengths[seq] for seq in group)
        assert padded <= max(2 * sum(lengths[seq] for seq in group), 1 << 14)
