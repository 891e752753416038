"""Running out of blocks costs a pause, never a token: victims, swapping, recomputing, no thrash."""

from __future__ import annotations

import random
from typing import Literal

import pytest

from penstock.engine.batch import Batch, BatchResult, BlockMoves, ScheduledSequence
from penstock.engine.config import SchedulerConfig
from penstock.engine.request import BeamSearch, Notice
from penstock.engine.scheduling.preemption import PreemptionCosts

from .fake_device import VOCAB_SIZE, expected_output
from .stack import Stack, make_request
from .test_histories import check_stream


def pressed(
    mode: Literal["auto", "swap", "recompute"],
    *,
    num_host_blocks: int = 500,
    enable_prefix_caching: bool = True,
    steps_in_flight: int = 1,
) -> Stack:
    """Twelve sequences of up to 60 tokens in a quarter of the blocks they need."""
    stack = Stack(
        num_blocks=45,
        block_size=4,
        num_host_blocks=num_host_blocks,
        enable_prefix_caching=enable_prefix_caching,
        config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=64,
            preemption=mode,
            max_steps_in_flight=steps_in_flight,
        ),
    )
    rng = random.Random(4)
    for number in range(12):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(5, 12))]
        stack.add(f"r{number}", prompt, max_tokens=48, arrival=float(number))
    return stack


def check_all(stack: Stack) -> None:
    stack.run()
    assert len(stack.ended) == 12
    for number in range(12):
        prompt = list(stack.prompt_of[f"r{number}"])
        assert stack.tokens(f"r{number}") == expected_output(prompt, 48)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_swapped_sequences_come_back_with_the_same_bytes(
    enable_prefix_caching: bool, steps_in_flight: int
) -> None:
    stack = pressed(
        "swap", enable_prefix_caching=enable_prefix_caching, steps_in_flight=steps_in_flight
    )
    check_all(stack)
    # Whatever the table, every position holds the very write it held at leaving.
    assert all(before == after for before, after in stack.device.returns)
    counters = stack.scheduler.counters
    assert counters.num_swaps == counters.num_preemptions == len(stack.device.returns) >= 10
    assert stack.blocks.counters.num_swapped_in > 0


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_swap_computes_nothing_twice(mode: Literal["swap", "recompute"]) -> None:
    stack = pressed(mode, enable_prefix_caching=False)
    check_all(stack)
    needed = sum(len(prompt) + 47 for prompt in stack.prompt_of.values())
    if mode == "swap":
        assert stack.device.num_computed == needed
        assert stack.scheduler.counters.num_recomputes == 0
    else:
        assert stack.device.num_computed > needed
        assert stack.scheduler.counters.num_swaps == 0
        assert stack.blocks.counters.num_swapped_out == 0


def test_a_full_host_tier_falls_back_to_recompute() -> None:
    stack = pressed("swap", num_host_blocks=10)
    check_all(stack)
    counters = stack.scheduler.counters
    assert counters.num_fallbacks == counters.num_recomputes > 0
    assert counters.num_swaps > 0


def test_no_host_tier_recomputes() -> None:
    stack = pressed("auto", num_host_blocks=0)
    check_all(stack)
    assert stack.scheduler.counters.num_swaps == 0 < stack.scheduler.counters.num_recomputes


def test_a_shared_block_stays_with_the_others() -> None:
    """The victim's copy goes to the host; those who share the block go on reading it."""
    stack = Stack(
        num_blocks=16,
        block_size=4,
        num_host_blocks=64,
        enable_prefix_caching=True,
        config=SchedulerConfig(preemption="swap"),
    )
    for name in ("a", "b", "c"):
        stack.add(name, [*range(20), ord(name) % 50], max_tokens=40)
    stack.run()
    assert stack.scheduler.counters.num_swaps > 0
    for name in ("a", "b", "c"):
        assert stack.tokens(name) == expected_output([*range(20), ord(name) % 50], 40)


def test_the_stream_is_told() -> None:
    stack = pressed("swap")
    stack.run()
    told = [stack.notices(f"r{number}") for number in range(12)]
    assert told[0] == []  # the first to arrive never leaves
    for notices in told:
        assert notices == [Notice.PREEMPTED, Notice.RESUMED] * (len(notices) // 2)
    assert sum(map(len, told)) == 2 * stack.scheduler.counters.num_preemptions


def test_the_first_come_are_not_held_up_by_the_later() -> None:
    stack = pressed("swap")
    stack.run()
    assert list(stack.ended)[:3] == ["r0", "r1", "r2"]


def test_a_returning_sequence_runs_before_it_can_leave_again() -> None:
    stack = pressed("swap")
    stack.run()
    counters = stack.scheduler.counters
    # Each return is worth its way: far fewer of them than steps.
    assert counters.num_preemptions * 4 < counters.num_steps
    seen: dict[int, int] = {}
    for batch in stack.device.batches:
        for item in batch.scheduled:
            seen[item.seq_id] = batch.step
        for seq_id in batch.left_seq_ids:
            assert seq_id in seen, "left without having run"


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("num_host_blocks", [0, 60, 400])
def test_samples_and_beams_under_pressure(
    mode: Literal["auto", "swap", "recompute"], is_caching: bool, num_host_blocks: int
) -> None:
    stack = Stack(
        num_blocks=60,
        block_size=4,
        num_host_blocks=num_host_blocks,
        enable_prefix_caching=is_caching,
        config=SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=48, preemption=mode),
    )
    rng = random.Random(8)
    requests = []
    for number in range(16):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 20))]
        params: dict[str, object] = {"max_tokens": rng.randint(8, 30)}
        if number % 3 == 1:
            params["n"] = 4
        if number % 3 == 2:
            params |= {"n": 2, "temperature": 0.0, "beam_search": BeamSearch(width=4)}
        requests.append(make_request(f"r{number}", prompt, arrival=float(number), **params))
        stack.core.add(requests[-1])
    stack.run()
    assert stack.scheduler.counters.num_preemptions > 0
    for request in requests:
        assert request.request_id in stack.ended
        check_stream(stack, request, is_whole=True)


def test_auto_weighs_what_it_has_measured() -> None:
    def costs(*, block_move_s: float, token_s: float) -> PreemptionCosts:
        learned = PreemptionCosts("auto", block_move_s=block_move_s)
        batch = Batch(step=1, scheduled=(ScheduledSequence(seq_id=0, num_new_tokens=100),))
        learned.observe(batch, BatchResult(step=1, token_ids={}, compute_s=100 * token_s))
        return learned

    victim = {"num_tokens": 160, "num_blocks": 10, "num_to_save": 10}
    assert costs(block_move_s=1e-4, token_s=1e-4).prefers_swap(**victim)  # 2 ms against 16 ms
    assert not costs(block_move_s=1e-3, token_s=1e-4).prefers_swap(**victim)  # 20 ms
    # What the host tier has already need not be moved there.
    assert costs(block_move_s=1e-3, token_s=1e-4).prefers_swap(**(victim | {"num_to_save": 2}))
    assert PreemptionCosts("auto").prefers_swap(**victim)  # before any measurement
    assert PreemptionCosts("swap", block_move_s=9.0).prefers_swap(**victim)
    assert not PreemptionCosts("recompute").prefers_swap(**victim)


def test_a_slow_link_is_learned() -> None:
    learned = PreemptionCosts("auto", block_move_s=1e-6)
    prefill = Batch(step=1, scheduled=(ScheduledSequence(seq_id=0, num_new_tokens=100),))
    learned.observe(prefill, BatchResult(step=1, token_ids={}, compute_s=0.01))
    victim = {"num_tokens": 160, "num_blocks": 10, "num_to_save": 10}
    assert learned.prefers_swap(**victim)
    moves = Batch(step=2, scheduled=(), moves=BlockMoves(swap_outs=((0, 0), (1, 1))))
    for _ in range(30):
        learned.observe(moves, BatchResult(step=2, token_ids={}, swap_out_s=0.1))
    assert not learned.prefers_swap(**victim)
