"""The three allocation schemes: their counts against independent ones, and the bars."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.batch import Batch
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.errors import ConfigError
from penstock.engine.request import Request, SamplingParams
from penstock.engine.scheduling import Scheduler
from penstock.load.bench.kv import (
    ContiguousPool,
    ContiguousScheme,
    PagedScheme,
    Replay,
    StandInDevice,
)
from penstock.load.workloads.lengths import TracedRequest, TraceSpec, make_trace

MAX_TOKENS, MAX_MODEL_LEN = 1024, 2048
NUM_SLOTS = 2048 * 16


def max_length() -> ContiguousScheme:
    return ContiguousScheme("max length", lambda _: MAX_MODEL_LEN, max_batched_tokens=2048)


def declared() -> ContiguousScheme:
    return ContiguousScheme(
        "prompt + max_tokens",
        lambda request: request.num_prompt_tokens + MAX_TOKENS,
        max_batched_tokens=2048,
    )


def exact() -> ContiguousScheme:
    return ContiguousScheme("exact", lambda request: request.num_tokens, max_batched_tokens=2048)


def paged(block_size: int = 16) -> PagedScheme:
    return PagedScheme(
        block_size=block_size,
        max_tokens=MAX_TOKENS,
        max_model_len=MAX_MODEL_LEN,
        max_batched_tokens=2048,
    )


# -- the bars: counts, the same on every machine ----------------------------------------------


@pytest.fixture(scope="module")
def replays() -> dict[str, Replay]:
    """The default workload of `penstock bench kv`."""
    trace = make_trace(TraceSpec())
    schemes = (max_length(), declared(), exact(), paged())
    return {scheme.name: scheme.replay(trace, num_slots=NUM_SLOTS) for scheme in schemes}


def test_paged_waste_is_under_four_per_cent(replays: dict[str, Replay]) -> None:
    assert 0.0 < replays["paged, block 16"].waste < 0.02  # the bar is 0.04
    assert replays["exact"].waste > 0.3
    assert replays["prompt + max_tokens"].waste > 0.6
    assert replays["max length"].waste > 0.75


def test_paged_holds_many_times_the_sequences(replays: dict[str, Replay]) -> None:
    block_16 = replays["paged, block 16"]
    assert block_16.num_before_preemption is not None
    assert block_16.num_held >= 2 * replays["prompt + max_tokens"].num_held
    assert block_16.num_held >= 4 * replays["max length"].num_held
    assert block_16.mean_running >= 2 * replays["prompt + max_tokens"].mean_running
    assert block_16.mean_running >= 4 * replays["max length"].mean_running


def test_every_scheme_serves_every_request(replays: dict[str, Replay]) -> None:
    # The last token of an output is sampled and never computed.
    work = sum(request.num_tokens - 1 for request in make_trace(TraceSpec()))
    for name, replay in replays.items():
        assert replay.num_finished == 2000
        is_paged = name.startswith("paged")
        assert (replay.num_preemptions > 0) == is_paged
        assert (replay.num_computed_tokens > work) == is_paged  # recomputed
        assert is_paged or replay.num_computed_tokens == work
        for used, allocated in zip(replay.used, replay.allocated, strict=True):
            assert 0 < used <= allocated <= NUM_SLOTS


def test_smaller_blocks_waste_less() -> None:
    trace = make_trace(TraceSpec(num_requests=150))
    wastes = [paged(size).replay(trace, num_slots=NUM_SLOTS).waste for size in (8, 16, 32, 64)]
    assert wastes == sorted(wastes)


# -- paged: the scheduler's own figures against what the device was told ----------------------


@dataclass
class Census:
    """Counts blocks and tokens from batches alone, as a device could."""

    block_size: int
    blocks: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)

    def take(self, batch: Batch) -> tuple[int, int]:
        for seq_id in batch.left_seq_ids:
            del self.blocks[seq_id], self.computed[seq_id]
        for item in batch.scheduled:
            if item.entry is not None:
                self.blocks[item.seq_id] = 0
                self.computed[item.seq_id] = item.entry.num_computed_tokens
            self.blocks[item.seq_id] += len(item.new_block_ids)
            self.computed[item.seq_id] += item.num_new_tokens
        return sum(self.blocks.values()) * self.block_size, sum(self.computed.values())


@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_slots_are_what_the_device_holds(block_size: int) -> None:
    trace = make_trace(TraceSpec(num_requests=60))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=60, max_num_batched_tokens=2048, preemption="recompute"),
        BlockManager(
            num_blocks=6000 // block_size, block_size=block_size, enable_prefix_caching=False
        ),
        eos_token_ids=(0,),
        max_model_len=MAX_MODEL_LEN,
    )
    for index, request in enumerate(trace):
        scheduler.add(
            Request(
                request_id=str(index),
                prompt_token_ids=(2 + index,) * request.num_prompt_tokens,
                sampling_params=SamplingParams(max_tokens=MAX_TOKENS),
                arrival_s=0.0,
            )
        )
    device = StandInDevice([request.num_output_tokens for request in trace])
    census, used, allocated = Census(block_size), [], []
    while scheduler.has_work():
        batch = scheduler.schedule()
        num_allocated, num_used = census.take(batch)
        assert scheduler.slots() == (num_allocated, num_allocated - num_used)
        if batch.scheduled:
            allocated.append(num_allocated)
            used.append(num_used)
        scheduler.update(batch, device.run(batch))
    assert scheduler.counters.num_preemptions > 0
    assert scheduler.slots() == (0, 0)
    replay = paged(block_size).replay(trace, num_slots=6000)
    assert (replay.used, replay.allocated) == (used, allocated)


def test_a_sequence_ends_at_its_own_length_whatever_it_declared() -> None:
    trace = [TracedRequest(5, 4), TracedRequest(16, 1), TracedRequest(3, MAX_TOKENS)]
    replay = paged().replay(trace, num_slots=NUM_SLOTS)
    assert replay.num_finished == 3
    assert replay.num_steps == MAX_TOKENS
    assert replay.running[:5] == [3, 2, 2, 2, 1]
    assert replay.allocated[:5] == [48, 32, 32, 32, 16]
    assert replay.used[:5] == [24, 10, 12, 14, 7]
    assert replay.used[-1] == 3 + MAX_TOKENS - 1


def test_requests_join_when_they_arrive() -> None:
    trace = [TracedRequest(4, 3), TracedRequest(4, 3, arrival=1.5), TracedRequest(4, 2, arrival=50)]
    for scheme in (paged(), max_length()):
        replay = scheme.replay(trace, num_slots=NUM_SLOTS)
        assert replay.running == [1, 1, 2, 1, 1, 1, 1]
        assert replay.num_finished == 3


# -- contiguous ---------------------------------------------------------------------------------


def test_a_reservation_is_held_to_the_end() -> None:
    trace = [TracedRequest(5, 4), TracedRequest(6, 2), TracedRequest(1, 1)]
    scheme = ContiguousScheme("ten", lambda _: 10, max_batched_tokens=2048)
    replay = scheme.replay(trace, num_slots=25)  # two fit; the third waits for the second
    assert replay.running == [2, 2, 2, 1]
    assert replay.allocated == [20, 20, 20, 10]
    assert replay.used == [11, 13, 8, 8]
    assert replay.waste == pytest.approx(1 - 40 / 70)
    assert replay.mean_running == pytest.approx(7 / 4)
    assert replay.utilisation == pytest.approx(40 / 100)


def test_a_long_prompt_takes_several_steps() -> None:
    scheme = ContiguousScheme("all", lambda _: 40, max_batched_tokens=8)
    replay = scheme.replay([TracedRequest(20, 2)], num_slots=40)
    assert replay.used == [8, 16, 20, 21]


def test_a_pool_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot hold one request"):
        declared().replay([TracedRequest(10, 1)], num_slots=1000)
    with pytest.raises(ConfigError, match="context"):
        paged().replay([TracedRequest(10, 1)], num_slots=1000)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=80))
def test_no_two_pieces_overlap_and_holes_grow_together(moves: list[tuple[bool, int]]) -> None:
    num_slots = 60
    pool, owners = ContiguousPool(num_slots), [0] * num_slots
    pieces: dict[int, tuple[int, int]] = {}
    for name, (is_release, number) in enumerate(moves, start=1):
        if is_release and pieces:
            start, size = pieces.pop(sorted(pieces)[number % len(pieces)])
            pool.release(start, size)
            owners[start : start + size] = [0] * size
        elif not is_release:
            start_or_none = pool.allocate(number)
            holes = [
                start
                for start in range(num_slots - number + 1)
                if not any(owners[start : start + number])
            ]
            assert start_or_none == (holes[0] if holes else None)
            if start_or_none is not None:
                owners[start_or_none : start_or_none + number] = [name] * number
                pieces[name] = (start_or_none, number)
