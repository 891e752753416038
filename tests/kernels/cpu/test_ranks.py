"""What ranks tell each other: the same sums on all of them, whoever comes first."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int64
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.parallel.ranks import Link, SharedRanks, shared_file
from penstock.kernels.cpu.library import CpuLibrary, load_library
from penstock.kernels.rms_norm import rms_norm
from penstock.kernels.torch_operations import NO_STEP, query_key_norm, query_key_squares

Body = Callable[[SharedRanks], Any]


def on_ranks(size: int, body: Body) -> list[Any]:
    """What each rank's thread returns: threads share memory as processes do, and the calls let
    them run at the same time."""
    fd = shared_file()
    try:
        ranks = [SharedRanks(rank=rank, size=size, fd=fd, store="") for rank in range(size)]
        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(body, ranks))
    finally:
        os.close(fd)


def exchange(
    library: CpuLibrary, ranks: SharedRanks, operation: str, parts: Tensor, y: Tensor, **others: Any
) -> None:
    library.run(
        operation, is_shared=False, parts=parts, y=y, ranks=ranks.structure(library),
        num_rows=c_int64(len(y)), size=y.shape[1], part_stride=parts.shape[1], **others,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def library(request) -> Iterator[CpuLibrary]:
    found = load_library(getattr(torch, request.param))
    assert found is not None
    return found


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_sums_are_in_the_order_of_the_ranks(library: CpuLibrary, data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 4), "ranks")
    num_rows, width = data.draw(st.integers(1, 5), "rows"), data.draw(st.integers(1, 70), "size")
    num_sums, seed = data.draw(st.integers(1, 6), "sums"), data.draw(st.integers(0, 9), "seed")
    has_residual = data.draw(st.booleans(), "residual")
    generator = torch.Generator().manual_seed(seed)
    shape = (num_sums, size, num_rows, width)
    given_parts = (torch.randn(shape, generator=generator) * 10).to(library.dtype)
    residual = torch.randn(num_rows, width, generator=generator).to(library.dtype)

    def body(ranks: SharedRanks) -> list[Tensor]:
        rng, sums = random.Random(seed * 10 + ranks.rank), []
        num_bytes = size * (num_rows * width + 3) * library.dtype.itemsize
        places = [
            ranks.memory.region(num_bytes).view(library.dtype).view(size, -1) for _ in range(2)
        ]
        for number in range(num_sums):
            parts, y = places[number % 2], torch.full_like(residual, torch.nan)
            time.sleep(rng.choice((0.0, 0.0, 0.0005)))
            parts[ranks.rank, : y.numel()] = given_parts[number, ranks.rank].flatten()
            added = residual if has_residual else None
            exchange(library, ranks, "sum_ranks", parts, y, residual=added)
            sums.append(y)
        return sums

    expected = given_parts[:, 0].float()
    for rank in range(1, size):
        expected = expected + given_parts[:, rank].float()
    expected = expected.to(library.dtype)
    if has_residual:
        expected = (expected.float() + residual.float()).to(library.dtype)
    for sums in on_ranks(size, body):
        assert torch.equal(torch.stack(sums), expected)


@settings(max_examples=15, deadline=None)
@given(size=st.integers(2, 4), num_rows=st.integers(0, 4), width=st.integers(16, 90))
def test_parts_are_gathered_side_by_side(
    library: CpuLibrary, size: int, num_rows: int, width: int
) -> None:
    whole = torch.randn(num_rows, width).to(library.dtype)
    part_size = -(-width // size)

    def body(ranks: SharedRanks) -> Tensor:
        num_bytes = size * (num_rows * part_size + 1) * library.dtype.itemsize
        parts = ranks.memory.region(num_bytes).view(library.dtype).view(size, -1)
        own = whole[:, ranks.rank * part_size : (ranks.rank + 1) * part_size]
        rows = parts[ranks.rank, : num_rows * part_size].view(num_rows, part_size)
        rows[:, : own.shape[1]] = own
        y = torch.full_like(whole, torch.nan)
        exchange(library, ranks, "gather_ranks", parts, y, part_size=part_size)
        return y

    assert all(torch.equal(each, whole) for each in on_ranks(size, body))


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_links_hand_on_rows_in_their_order(library: CpuLibrary, data: st.DataObject) -> None:
    """To each receiver, though one of them lags behind, and rows become more."""
    num_receivers = data.draw(st.integers(1, 3), "receivers")
    num_steps = data.draw(st.integers(1, 3), "steps on their way")
    counts = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=12), "rows")
    width, seed = data.draw(st.integers(1, 70), "size"), data.draw(st.integers(0, 9), "seed")
    generator = torch.Generator().manual_seed(seed)
    sent = [torch.randn(n, width, generator=generator).to(library.dtype) for n in counts]
    fd = shared_file()

    def body(rank: int) -> list[Tensor]:
        rng, received = random.Random(seed * 10 + rank), []
        link = Link(fd, rank=rank, num_ranks=1 + num_receivers, num_steps=num_steps)
        for x in sent:
            time.sleep(rng.choice((0.0, 0.0, 0.0005)))
            if link.is_sender:
                link.send(library, x)
            else:
                y = torch.full_like(x, torch.nan)
                link.receive(library, y)
                received.append(y)
        return received

    with ThreadPoolExecutor(1 + num_receivers) as threads:
        _, *all_received = threads.map(body, range(1 + num_receivers))
    os.close(fd)
    for received in all_received:
        assert all(torch.equal(y, x) for y, x in zip(received, sent, strict=True))


@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(2, 4), num_rows=st.integers(0, 4), sizes=st.tuples(*[st.integers(1, 70)] * 2)
)
def test_norms_are_over_the_parts_of_all_ranks(
    library: CpuLibrary, size: int, num_rows: int, sizes: tuple[int, int]
) -> None:
    """In C, and in torch."""
    whole = [torch.randn(num_rows, size * each).to(library.dtype) for each in sizes]
    weights = [torch.randn(size * each).to(library.dtype) for each in sizes]
    eps, offset = 1e-5, 0.5

    def body(ranks: SharedRanks) -> tuple[Tensor, ...]:
        def own(x: Tensor) -> Tensor:
            return x.chunk(size, dim=-1)[ranks.rank].contiguous()

        ranks.open(library.dtype, torch.device("cpu"))
        query_weight, key_weight = (own(each) for each in weights)
        x = torch.cat([own(each) for each in whole], dim=1)
        squares = query_key_squares(NO_STEP, x, *sizes)
        in_torch = query_key_norm(
            NO_STEP, x, squares, ranks, query_weight, key_weight, *sizes, eps, offset
        )
        y, places = torch.full_like(x, torch.nan), ranks.memory.region(size * 4 * 2 * 8)
        parts = places.view(torch.float32).view(size, -1)
        common: dict[str, Any] = {
            "x": x, "query_size": sizes[0], "key_size": sizes[1], "stride": sum(sizes),
            "num_rows": c_int64(num_rows), "is_shared": False,
        }  # fmt: skip
        library.run("query_key_squares", y=parts[ranks.rank], **common)
        library.run(
            "query_key_norm", y=y, parts=parts, part_stride=parts.shape[1],
            ranks=ranks.structure(library), query_weight=query_weight,
            key_weight=key_weight, eps=eps, offset=offset, **common,
        )  # fmt: skip
        return tuple(
            part for each in (in_torch, y) for part in torch.split(each, list(sizes), dim=1)
        )

    results = on_ranks(size, body)
    expected = [rms_norm(x, weight, eps, offset) for x, weight in zip(whole, weights, strict=True)]
    tolerance = {"atol": 1e-6, "rtol": 2 * torch.finfo(library.dtype).eps}
    for number, each in enumerate(expected * 2):
        got = torch.cat([parts[number] for parts in results], dim=1)
        torch.testing.assert_close(got, each, **tolerance)


def test_tensors_of_torch_are_summed_and_gathered() -> None:
    def body(ranks: SharedRanks) -> tuple[Tensor, ...]:
        ranks.open(torch.float32, torch.device("cpu"))
        x = torch.arange(6.0).view(2, 3) + 10 * ranks.rank
        assert ranks.minimum(5 - ranks.rank) == 3
        return ranks.sum(x), ranks.gather(x), ranks.sum(torch.ones(70, 40))

    x = torch.arange(6.0).view(2, 3)
    for total, gathered, ones in on_ranks(3, body):
        assert torch.equal(total, 3 * x + 30)
        assert torch.equal(gathered, torch.cat((x, x + 10, x + 20), dim=1))
        assert torch.equal(ones, torch.full((70, 40), 3.0))


def test_nobody_waits_for_ranks_that_were_given_up() -> None:
    """The second never comes; the first sleeps by then."""

    def body(ranks: SharedRanks) -> None:
        ranks.open(torch.float32, torch.device("cpu"))
        if ranks.rank == 0:
            ends = threading.Timer(0.05, ranks.give_up)
            ends.start()
            ranks.sum(torch.ones(1, 4))
            ends.join()

    on_ranks(2, body)


def test_nobody_waits_for_a_link_that_was_given_up() -> None:
    library = load_library(torch.float32)
    assert library is not None
    fd = shared_file()
    link = Link(fd, rank=0, num_ranks=2, num_steps=1)
    ends = threading.Timer(0.05, link.give_up)
    ends.start()
    for _ in range(3):  # there is room for one
        link.send(library, torch.ones(1, 4))
    ends.join()
    os.close(fd)


def test_regions_do_not_change_what_another_rank_has_written() -> None:
    fd = shared_file()
    first, second = (SharedRanks(rank=rank, size=2, fd=fd, store="") for rank in range(2))
    regions = [first.memory.region(4096) for _ in range(2)]
    for region in regions:
        region.fill_(7)
    assert all(bool((second.memory.region(4096) == 7).all()) for _ in range(2))
    os.close(fd)
