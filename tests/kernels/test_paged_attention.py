"""The paged reference against attention written as a loop over tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.paged_case import CaseShape, PagedCase
from torch import Tensor

from penstock.kernels.paged_attention import paged_attention
from penstock.kernels.reference.paged_attention import _similar_lengths

STEPS = {
    "decode": [(0, 1), (6, 1), (30, 1), (31, 1)],
    "prefill": [(0, 5), (0, 33)],
    "mixed": [(17, 1), (0, 9), (8, 7), (40, 1), (3, 30)],
    "one token": [(0, 1)],
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
OPTIONS = {
    "soft cap": {"soft_cap": 3.0},
    "sinks": {"has_sinks": True},
    "alibi": {"has_alibi": True},
    "alibi, sinks and a window": {"has_alibi": True, "has_sinks": True, "window": 9},
    "all": {"soft_cap": 20.0, "has_sinks": True, "window": 9},
}


def attend(case: PagedCase) -> Tensor:
    return paged_attention(*case.tensors, **case.arguments)


def check(shape: CaseShape) -> None:
    case = PagedCase(shape)
    output, tolerance = attend(case), TOLERANCES[shape.dtype]
    assert output.dtype == shape.dtype
    torch.testing.assert_close(output.double(), case.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("window", [None, 1, 6, 16, 100])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1), (7, 7)])
def test_equals_the_loop(heads, step, window):
    check(CaseShape(step=step, heads=heads, head_dim=16, window=window))


@pytest.mark.parametrize("block_size", [1, 8, 12, 32])
@pytest.mark.parametrize("head_dim", [8, 24, 80, 128])
@pytest.mark.parametrize("window", [None, 10])
def test_block_sizes_and_head_sizes(block_size, head_dim, window):
    check(CaseShape(step=STEPS["mixed"], block_size=block_size, head_dim=head_dim, window=window))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_half_precision(dtype, window, step):
    check(CaseShape(step=step, block_size=8, heads=(8, 2), head_dim=64, dtype=dtype, window=window))


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_options(options, step, is_fp8):
    check(CaseShape(step=step, heads=(6, 2), is_fp8=is_fp8, **options))


@pytest.mark.parametrize("kind", [{"is_fp8": True}, {"is_int8": True}])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_cache_of_bytes(dtype, kind):
    check(CaseShape(step=STEPS["mixed"], dtype=dtype, num_shared=1, **kind))


@pytest.mark.parametrize("block_size", [1, 8, 12])
@pytest.mark.parametrize("head_dim", [6, 24, 80])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_a_cache_in_int8_of_any_shape(step, head_dim, block_size):
    shape = CaseShape(step=step, block_size=block_size, heads=(6, 2), head_dim=head_dim)
    check(replace(shape, is_int8=True))
    check(replace(shape, is_int8=True, **OPTIONS["all"]))


def test_one_scale_for_all_heads():
    case = PagedCase(CaseShape(step=STEPS["mixed"], is_fp8=True))
    case.key_scale.fill_(0.02)
    case.value_scale.fill_(0.03)
    expected = attend(case)
    case.key_scale, case.value_scale = torch.tensor(0.02), torch.tensor(0.03)
    assert torch.equal(attend(case), expected)


def test_long_contexts_are_computed_in_slices(monkeypatch):
    monkeypatch.setattr("penstock.kernels.reference.paged_attention._MAX_SCORES", 1000)
    check(CaseShape(step=STEPS["mixed"], soft_cap=5.0))
    check(CaseShape(step=STEPS["mixed"]))


def test_padding_of_a_batch():
    case = PagedCase(CaseShape(step=STEPS["mixed"]))
    num_tokens = len(case.query)
    padded = attend(case.padded(num_empty=2, num_zero=3))
    assert torch.equal(padded[:num_tokens], attend(case))
    assert torch.equal(padded[num_tokens:], torch.zeros_like(padded[num_tokens:]))


def test_a_broken_sequence_does_not_spoil_its_neighbours():
    case = PagedCase(CaseShape(step=STEPS["mixed"], block_size=8))
    expected = case.expected()
    case.spoil(2)
    start, end = case.layout.query_start_loc[2:4].tolist()
    output = attend(case)
    assert output[start:end].isnan().all()
    others = torch.ones(len(output), dtype=torch.bool)
    others[start:end] = False
    torch.testing.assert_close(output[others].double(), expected[others], atol=1e-5, rtol=1e-5)


def test_wrong_shapes_are_our_own_bugs():
    case = PagedCase(CaseShape(step=STEPS["decode"]))
    case.query = case.query[:-1]
    with pytest.raises(AssertionError, match="one slot for each token"):
        attend(case)


@pytest.mark.parametrize("is_fp8", [False, True])
def test_scales_are_for_fp8(is_fp8):
    case = PagedCase(CaseShape(step=STEPS["decode"], is_fp8=is_fp8))
    case.key_scale = None if is_fp8 else torch.ones(2)
    with pytest.raises(AssertionError, match="a cache in FP8"):
        attend(case)


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
