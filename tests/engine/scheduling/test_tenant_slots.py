"""Slots among tenants: a tenant alone has them all, a flood leaves some to the others."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.config import SchedulerConfig
from penstock.engine.scheduling.tenant_slots import TenantSlots

from .stack import Clock, Stack

NUM_SLOTS = 16
NUM_KEPT = 2


def stack_of(max_num_seqs: int = NUM_SLOTS) -> Stack:
    """With blocks and a budget for everybody: only slots are short."""
    config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=4096)
    return Stack(num_blocks=512, config=config)


def add(stack: Stack, tenant: str, count: int, *, max_tokens: int = 40, n: int = 1) -> list[str]:
    """Requests of a tenant's; their names."""
    first = len(stack.prompt_of)
    names = [f"{tenant}{number}" for number in range(first, first + count)]
    for name in names:
        stack.add(name, [1, 2, 3], tenant=tenant, max_tokens=max_tokens, n=n)
    return names


def holders(stack: Stack) -> Counter[str]:
    """Slots by tenant, those kept for forks too."""
    running_set = stack.scheduler._running_set
    counts: Counter[str] = Counter()
    for seq_id, sequence in running_set.running.items():
        counts[sequence.request.tenant] += 1 + running_set.reserved.get(seq_id, 0)
    return counts


@given(
    max_num_seqs=st.integers(1, 40),
    rounds=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    is_other_gone=st.booleans(),
)
def test_a_tenant_alone_has_every_slot(
    max_num_seqs: int, rounds: list[int], is_other_gone: bool
) -> None:
    stack = stack_of(max_num_seqs)
    if is_other_gone:
        add(stack, "other", 3, max_tokens=1)
        stack.run()
        stack.clock.now_s += 10.0
    for count in rounds:
        add(stack, "alone", count, max_tokens=3)
        for _ in range(2):
            stack.step()
            is_full = len(stack.device.batches[-1].scheduled) == max_num_seqs
            assert is_full or not stack.scheduler.num_waiting
    stack.run()


def test_a_flood_leaves_slots_to_whoever_comes_and_they_start_at_once() -> None:
    stack = stack_of()
    add(stack, "flood", 100)
    stack.step()
    assert holders(stack) == {"flood": NUM_SLOTS}  # nobody else has been seen
    for _ in range(20):
        names = add(stack, "small", NUM_KEPT, max_tokens=2)
        first = {output.request_id for output in stack.step()}
        assert first >= set(names)  # the next step has their first tokens
        assert holders(stack)["flood"] <= NUM_SLOTS - NUM_KEPT
        stack.step()
    stack.run()
    assert stack.scheduler.counters.num_preemptions == NUM_KEPT  # once, for the first


def test_a_flood_is_displaced_only_by_who_may_go_before_it() -> None:
    config = SchedulerConfig(
        max_num_seqs=NUM_SLOTS, max_num_batched_tokens=4096, scheduling_policy="priority"
    )
    stack = Stack(num_blocks=512, config=config)
    add(stack, "flood", NUM_SLOTS)
    stack.step()
    stack.add("later", [1, 2, 3], tenant="small", max_tokens=2, priority=1)
    stack.step()
    assert holders(stack) == {"flood": NUM_SLOTS}
    stack.add("small", [1, 2, 3], tenant="small", max_tokens=2)
    assert "small" in {output.request_id for output in stack.step()}
    stack.run()


def test_of_wide_requests_none_is_displaced() -> None:
    """A part of one waits for the others."""
    stack = stack_of()
    add(stack, "flood", NUM_SLOTS // 4, n=4)
    stack.step()
    stack.step()
    assert holders(stack) == {"flood": NUM_SLOTS}
    add(stack, "small", 1, max_tokens=2)
    stack.step()
    assert stack.scheduler.counters.num_preemptions == 0
    stack.run()


def test_the_slots_are_the_floods_again_when_the_others_have_been_gone_for_a_while() -> None:
    stack = stack_of()
    add(stack, "small", 1, max_tokens=1)
    add(stack, "flood", 100)
    stack.step()
    stack.step()
    assert holders(stack) == {"flood": NUM_SLOTS - NUM_KEPT}
    stack.clock.now_s += 10.0
    stack.step()
    assert holders(stack) == {"flood": NUM_SLOTS}


@pytest.mark.parametrize("width", [3, NUM_SLOTS])
def test_a_wide_request_gets_in_beside_others(width: int) -> None:
    """Neither the flood's next nor the small tenant's may go before it for ever."""
    stack = stack_of()
    for tenant in "abcdef":  # many share the slots: three are more than its share
        add(stack, tenant, 1, max_tokens=1)
    add(stack, "flood", 30, max_tokens=6)
    add(stack, "small", 1, max_tokens=3)
    stack.step()
    (wide,) = add(stack, "wide", 1, max_tokens=3, n=width)
    for _ in range(200):
        if wide in stack.ended:
            break
        add(stack, "flood", 1, max_tokens=6)
        add(stack, "small", 1, max_tokens=3)
        stack.step()
    assert wide in stack.ended
    stack.run()


def test_weights_are_shares() -> None:
    clock = Clock()
    slots = TenantSlots(NUM_SLOTS, clock)
    slots.add_sequence("heavy", 3.0)
    slots.add_sequence("light", 1.0)
    assert slots.is_within_share("heavy", 12)
    assert not slots.is_within_share("heavy", 13)
    assert slots.is_within_share("light", 4)
    assert not slots.is_within_share("light", 5)


def test_everybody_has_one_slot_however_many_there_are() -> None:
    slots = TenantSlots(NUM_SLOTS, Clock())
    for number in range(100):
        slots.add_sequence(f"tenant{number}", 1.0)
        slots.acquire(f"tenant{number}")
        slots.release(f"tenant{number}")
        assert slots.is_within_share(f"tenant{number}", 1)
    assert not slots.is_within_share("tenant0", 2)


def test_tenants_that_left_are_forgotten() -> None:
    clock = Clock()
    slots = TenantSlots(NUM_SLOTS, clock)
    slots.add_sequence("stays", 1.0)
    for number in range(1000):
        clock.now_s += 1.0
        slots.add_sequence(f"tenant{number}", 0.1)
        slots.remove_sequence(f"tenant{number}")
        assert not slots.is_within_share("stays", NUM_SLOTS)
    assert len(slots._tenants) <= 12
    clock.now_s += 10.0
    assert slots.is_within_share("stays", NUM_SLOTS)


@settings(max_examples=40)
@given(
    data=st.data(),
    max_num_seqs=st.sampled_from([1, 3, 8, 16]),
    widths=st.sampled_from([[1], [1, 1, 2], [1, 1, 3, 16]]),
)
@pytest.mark.exhaustive
def test_who_waits_has_its_share_or_no_slot_is_free(
    data: st.DataObject, max_num_seqs: int, widths: list[int]
) -> None:
    """At the latest after two steps that others' shorter prompts have to themselves. And everybody
    is served in the end, however wide."""
    stack = stack_of(max_num_seqs)
    num_left_out = 0  # steps in a row
    for _ in range(data.draw(st.integers(1, 40))):
        for tenant in data.draw(st.lists(st.sampled_from("abc"), max_size=6)):
            width = min(data.draw(st.sampled_from(widths)), max_num_seqs)
            add(stack, tenant, 1, max_tokens=data.draw(st.integers(1, 9)), n=width)
        stack.clock.now_s += data.draw(st.sampled_from([0.1, 6.0]))
        batch = stack.scheduler.schedule()
        num_left_out = 0 if max(widths) > 1 or are_shared(stack) else num_left_out + 1
        assert num_left_out <= 2
        stack.scheduler.update(batch, stack.device.submit(batch).result())
        stack.check_blocks()
    stack.run()


def are_shared(stack: Stack) -> bool:
    """Whether nobody waits below its share, by a step that was just planned."""
    running_set = stack.scheduler._running_set
    waiting = {
        s.request.tenant for s in running_set.live.values() if s.seq_id not in running_set.running
    }
    if not waiting or not running_set.num_free_slots:
        return True
    return running_set.num_free_slots <= NUM_KEPT and not any(
        running_set.tenant_slots.is_within_share(tenant, 1) for tenant in waiting
    )


def test_who_left_may_come_back_for_some_minutes() -> None:
    clock = Clock()
    slots = TenantSlots(NUM_SLOTS, clock)
    for tenant in ("stays", "leaves"):
        slots.add_sequence(tenant, 1.0)
    slots.remove_sequence("leaves")
    assert slots.are_several
    assert not slots.another_may_come()  # it still counts
    clock.now_s += 11.0
    assert not slots.are_several
    assert slots.another_may_come()
    slots.add_sequence("leaves", 1.0)
    assert not slots.another_may_come()
    slots.remove_sequence("leaves")
    clock.now_s += 299.0
    assert slots.another_may_come()
    clock.now_s += 2.0
    assert not slots.another_may_come()
    for number in range(1000):
        slots.add_sequence(f"t{number}", 1.0)
        slots.remove_sequence(f"t{number}")
    clock.now_s += 11.0
    assert slots.another_may_come()
    assert len(slots._away) <= 100
