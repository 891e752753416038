"""Paged attention in Triton against its definition in float64; on a GPU, larger and in bfloat16."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.kernels.paged_case import CaseShape, PagedCase
from tests.support.tiers import tiered
from torch import Tensor

from penstock.kernels.gpu import paged_attention as triton_attention
from penstock.kernels.gpu.device_limits import DeviceLimits
from penstock.kernels.gpu.paged_attention import paged_attention_triton
from penstock.kernels.gpu.paged_decode import choose_splits

DECODES = [(0, 1), (6, 1), (30, 1), (70, 1)]
MIXED = [(17, 1), (0, 9), (40, 1), (3, 45)]
# Relative to the largest number there can be, 1: half precision rounds weights and results.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SMALL_TILES = {"BLOCK_M": 16, "BLOCK_N": 16}


def attend(case: PagedCase, **more: Any) -> Tensor:
    return paged_attention_triton(*case.tensors, **(case.arguments | more))


def check(case: PagedCase, **more: Any) -> None:
    output, tolerance = attend(case, **more), TOLERANCES[case.shape.dtype]
    assert output.dtype == case.shape.dtype
    torch.testing.assert_close(output.double(), case.expected(), atol=tolerance, rtol=tolerance)


@st.composite
def shapes(draw: st.DrawFn, dtypes: list[torch.dtype]) -> CaseShape:
    sequence = st.tuples(st.integers(0, 80), st.just(1) | st.integers(1, 24))
    scoring = draw(
        st.sampled_from([{}, {"soft_cap": 5.0}, {"soft_cap": 50.0}, {"has_alibi": True}])
    )
    return CaseShape(
        step=draw(st.lists(sequence, min_size=1, max_size=3)),
        block_size=draw(st.sampled_from([8, 16, 32, 64, 128])),
        heads=draw(st.sampled_from([(1, 1), (3, 3), (4, 2), (3, 1), (10, 2), (6, 1), (7, 1)])),
        head_dim=draw(st.sampled_from([32, 64, 80, 96, 112, 128, 192, 256])),
        dtype=draw(st.sampled_from(dtypes)),
        is_fp8=draw(st.booleans()),
        has_sinks=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 100)),
        num_shared=draw(st.integers(0, 3)),
        **scoring,
    )


@settings(max_examples=15, deadline=None)
@given(
    shape=shapes([torch.float32, torch.float16]),
    seed=st.integers(0, 1000),
    block_n=st.sampled_from([16, 32]),
    split_len=st.none() | st.sampled_from([16, 48]),
)
def test_equals_the_definition(
    shape: CaseShape, seed: int, block_n: int, split_len: int | None, device: str
) -> None:
    case = PagedCase(shape, seed=seed, device=device)
    check(case, config={"BLOCK_M": 32, "BLOCK_N": block_n}, split_len=split_len)


@pytest.mark.parametrize(
    ("step", "dtype"),
    [(DECODES, torch.float16), (MIXED, torch.float32)],
    ids=["decodes", "mixed"],
)
def test_the_heuristics_choose_what_works(step: Any, dtype: torch.dtype, device: str) -> None:
    check(PagedCase(CaseShape(step=step, head_dim=128, dtype=dtype), device=device))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("heads", [(8, 8), (32, 8), (7, 1), (32, 2)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_long_contexts(dtype: torch.dtype, heads: Any, head_dim: int, is_fp8: bool) -> None:
    step = [(4096, 1), (1023, 1), (0, 1), (8000, 200), (0, 700), (333, 2), (16_000, 1)]
    shape = CaseShape(step=step, dtype=dtype, heads=heads, head_dim=head_dim, is_fp8=is_fp8)
    check(PagedCase(shape, device="cuda"))
    options = {"window": 1000, "soft_cap": 30.0, "has_sinks": True, "num_shared": 20}
    check(PagedCase(replace(shape, **options), device="cuda"))


@pytest.mark.parametrize("window", tiered([1, 7, 16, 30], [7]))
def test_windows_narrower_than_a_tile_of_queries(window: int, device: str) -> None:
    """Some rows then see nothing of the tile of keys that others begin with."""
    shape = CaseShape(step=[(20, 60), (0, 50)], heads=(1, 1), window=window)
    check(PagedCase(shape, device=device), config={"BLOCK_M": 32, "BLOCK_N": 16})


def test_any_number_of_splits_gives_the_same(device: str) -> None:
    shape = CaseShape(step=[(400, 1), (2, 1), (63, 1)], heads=(8, 1), has_sinks=True)
    case = PagedCase(shape, device=device)
    for split_len in (16, 128):  # 26 splits are more than are merged at once
        check(case, config=SMALL_TILES, split_len=split_len)


@pytest.mark.parametrize("window", tiered([None, 40], [40]))
def test_with_fixed_splits_a_row_does_not_depend_on_its_batch(
    window: int | None, device: str
) -> None:
    case = PagedCase(CaseShape(step=DECODES, head_dim=64, window=window), device=device)
    together = attend(case, config=SMALL_TILES, split_len=16)
    for seq in range(len(DECODES)):
        alone = attend(case.only(seq), config=SMALL_TILES, split_len=16)
        assert torch.equal(alone, together[seq : seq + 1])


@pytest.mark.parametrize(
    ("dtype", "window"),
    tiered(
        [(torch.float16, 7), (torch.float16, None), (torch.float32, None), (torch.float32, 40)],
        [(torch.float16, 7)],
    ),
)
def test_an_invariant_token_depends_on_what_is_before_it_alone(
    dtype: torch.dtype, window: int | None, device: str
) -> None:
    """Alone, in chunks of any size, and beside others, its bits are the same."""
    whole = PagedCase(
        CaseShape(step=[(0, 70), (3, 1), (20, 25)], head_dim=64, window=window, dtype=dtype),
        device=device,
    )
    together = attend(whole, config=SMALL_TILES, is_invariant=True)
    check(whole, config=SMALL_TILES, is_invariant=True)
    query, keys, values, layout = whole.tensors
    for start, end in [(0, 1), (13, 14), (1, 13), (40, 70), (69, 70)]:
        chunk = replace(
            layout,
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([end], dtype=torch.int32, device=device),
            block_tables=layout.block_tables[:1],
            slot_mapping=layout.slot_mapping[start:end],
            max_query_len=end - start,
            max_seq_len=end,
        )
        alone = paged_attention_triton(
            query[start:end], keys, values, chunk, **whole.arguments,
            config=SMALL_TILES, is_invariant=True,
        )  # fmt: skip
        assert torch.equal(alone, together[start:end])


def test_an_invariant_batch_may_be_padded(device: str) -> None:
    """With one token and a length of 0, as a captured batch of decodes is."""
    case = PagedCase(CaseShape(step=DECODES, head_dim=64), device=device)
    query, keys, values, layout = case.tensors
    lens = layout.seq_lens.clone()
    lens[-1] = 0
    padded = paged_attention_triton(
        query, keys, values, replace(layout, seq_lens=lens), **case.arguments, is_invariant=True
    )
    assert torch.equal(padded[:-1], attend(case, is_invariant=True)[:-1])
    assert not padded[-1].any()


def test_bounds_may_be_larger_than_what_is_there(device: str) -> None:
    """A captured launch is made for the longest context."""
    case = PagedCase(CaseShape(step=DECODES, head_dim=64, has_sinks=True), device=device)
    case.layout = replace(case.layout, max_seq_len=100_000)
    check(case, config=SMALL_TILES)
    check(case, config=SMALL_TILES, split_len=4096)
    case.layout = replace(case.layout, max_query_len=64)
    check(case, config=SMALL_TILES)


@pytest.mark.parametrize(
    ("step", "split_len"),
    tiered([(DECODES, 16), (MIXED, None)], [(MIXED, None)]),
    ids=["decodes", "mixed"],
)
def test_padding_of_a_batch(step: Any, split_len: int | None, device: str) -> None:
    case = PagedCase(CaseShape(step=step, has_sinks=True), device=device)
    num_tokens = len(case.query)
    options = {"config": SMALL_TILES, "split_len": split_len}
    padded = attend(case.padded(num_empty=2, num_zero=3), **options)
    torch.testing.assert_close(padded[:num_tokens], attend(case, **options), atol=1e-6, rtol=0)
    assert torch.equal(padded[num_tokens:], torch.zeros_like(padded[num_tokens:]))


def test_a_batch_of_nothing(device: str) -> None:
    case = PagedCase(CaseShape(step=DECODES), device=device)
    layout = case.layout
    case.query = case.query[:0]
    case.layout = replace(
        layout,
        query_start_loc=layout.query_start_loc[:1],
        seq_lens=layout.seq_lens[:0],
        block_tables=layout.block_tables[:0],
    )
    assert attend(case).shape == (0, 4, 32)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about NaN
@pytest.mark.parametrize("seq", [1, 2], ids=["prefill", "decode"])
def test_a_broken_sequence_does_not_spoil_its_neighbours(seq: int, device: str) -> None:
    case = PagedCase(CaseShape(step=MIXED, block_size=8, heads=(4, 1)), device=device)
    expected = case.expected()
    case.spoil(seq)
    start, end = case.layout.query_start_loc[seq : seq + 2].tolist()
    output = attend(case, config=SMALL_TILES)
    assert output[start:end].isnan().all()
    others = torch.ones(len(output), dtype=torch.bool, device=device)
    others[start:end] = False
    torch.testing.assert_close(output[others].double(), expected[others], atol=1e-5, rtol=1e-5)


def test_queries_may_lie_among_keys_and_values(device: str) -> None:
    """As the projection leaves them, when nothing has turned them since."""
    case = PagedCase(CaseShape(step=MIXED), device=device)
    row = torch.full((len(case.query), 8, 32), torch.nan, device=device)
    row[:, :4] = case.query
    case.query = row[:, :4]
    check(case, config=SMALL_TILES)


def test_scales_may_be_one_for_all(device: str) -> None:
    case = PagedCase(CaseShape(step=MIXED, is_fp8=True), device=device)
    case.key_scale.fill_(0.02)
    case.value_scale.fill_(0.03)
    expected = attend(case, config=SMALL_TILES)
    case.key_scale = torch.tensor(0.02, device=device)
    case.value_scale = torch.tensor(0.03, device=device)
    assert torch.equal(attend(case, config=SMALL_TILES), expected)


@pytest.mark.parametrize("step", tiered([DECODES, MIXED], [DECODES]), ids=["decodes", "mixed"])
def test_contiguous_blocks_need_no_table(step: Any, device: str) -> None:
    case = PagedCase(CaseShape(step=step, head_dim=64), device=device)
    expected = attend(case, config=SMALL_TILES)
    table = case.layout.block_tables
    num_seqs, width = table.shape
    ids = torch.arange(1, num_seqs * width + 1, device=device).view(num_seqs, width)
    is_block = table < len(case.key_cache)
    for name in ("key_cache", "value_cache"):
        cache = getattr(case, name)
        moved = torch.full((num_seqs * width + 1, *cache.shape[1:]), torch.nan, device=device)
        moved[ids[is_block]] = cache[table[is_block].long()]
        setattr(case, name, moved)
    first = torch.full_like(table, 10**6)
    first[:, 0] = ids[:, 0]
    case.layout = replace(case.layout, block_tables=first)
    assert torch.equal(attend(case, config=SMALL_TILES, is_contiguous=True), expected)


def test_slots_beyond_two_to_the_31_numbers(device: str) -> None:
    """Of a cache that takes no memory where it is not touched."""
    case = PagedCase(CaseShape(step=MIXED, is_fp8=True, dtype=torch.float16), device=device)
    expected = attend(case, config=SMALL_TILES)
    num_more = (1 << 31) // case.key_cache[0].numel()
    for name in ("key_cache", "value_cache"):
        cache = getattr(case, name)
        larger = torch.empty(
            (num_more + len(cache), *cache.shape[1:]), dtype=cache.dtype, device=device
        )
        larger.view(torch.uint8)[num_more:] = cache.view(torch.uint8)
        setattr(case, name, larger)
    case.layout = replace(case.layout, block_tables=case.layout.block_tables + num_more)
    assert torch.equal(attend(case, config=SMALL_TILES), expected)


def test_tuned_configurations_are_used(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    asked = []

    def tuned(operation: str, key: str) -> dict[str, int]:
        asked.append((operation, key))
        return SMALL_TILES

    monkeypatch.setattr(triton_attention, "tuned", tuned)
    check(PagedCase(CaseShape(step=MIXED, head_dim=64), device=device))
    key = "head_dim 64 group 2 block_size 16 float32 float32 paged"
    assert asked == [("paged_prefill", key), ("paged_decode", key)]


@example(num_rows=1, max_visible=135_169, num_processors=18)  # were 124 once
@given(
    num_rows=st.integers(1, 5000),
    max_visible=st.integers(1, 200_000),
    num_processors=st.integers(1, 200),
)
def test_splits_fill_the_device_and_no_more(
    num_rows: int, max_visible: int, num_processors: int
) -> None:
    limits = DeviceLimits(num_processors=num_processors, shared_bytes=0)
    num_splits, min_split_len = choose_splits(num_rows, max_visible, 64, limits)
    assert num_splits >= 1
    assert min_split_len >= 128
    num_slots = 2 * num_processors
    assert num_splits == 1 or num_splits * num_rows <= 4 * num_slots
    if max_visible >= 128 * num_slots:
        assert num_splits * num_rows >= 0.5 * num_slots


@pytest.mark.parametrize(
    ("num_rows", "max_visible", "expected"),
    [
        (8, 65_536, (30, 128)),  # one sequence: into as many as fill 132 processors twice
        (8, 1000, (8, 128)),  # but none shorter than two tiles
        (256, 4096, (1, 128)),  # 32 sequences fill them
        (320, 4096, (3, 128)),  # 40 do not fill the second round
        (256, 65_536, (4, 4096)),  # the longest may be alone in its length
    ],
)
def test_splits_on_a_card_of_132_processors(
    num_rows: int, max_visible: int, expected: tuple[int, int]
) -> None:
    limits = DeviceLimits(num_processors=132, shared_bytes=0)
    assert choose_splits(num_rows, max_visible, 64, limits) == expected


def test_one_token_is_computed_where_a_launch_could_take_more(device: str) -> None:
    case = PagedCase(CaseShape(step=[(20, 1)]), device=device)
    case.layout = replace(case.layout, max_query_len=6)
    check(case)
