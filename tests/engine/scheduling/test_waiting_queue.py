"""The order of service: arrival, or priority with ageing."""

from __future__ import annotations

import random

import pytest

from penstock.engine.config import SchedulerConfig
from penstock.engine.errors import ConfigError, InvalidRequestError
from penstock.engine.request import Sequence
from penstock.engine.scheduling.preemption import choose_victim
from penstock.engine.scheduling.waiting_queue import ServiceOrder, WaitingQueue

from .stack import Clock, Stack, make_request


def sequence(seq_id: int, *, arrival: float = 0.0, priority: int = 0) -> Sequence:
    request = make_request(f"r{seq_id}", [1], arrival=arrival, priority=priority)
    return Sequence(request, seq_id=seq_id)


def drained(queue: WaitingQueue) -> list[int]:
    ids = []
    while (head := queue.peek()) is not None:
        ids.append(head.seq_id)
        queue.discard(head)
    assert len(queue) == 0
    return ids


def test_first_come_first_served_ignores_priority() -> None:
    queue = WaitingQueue(ServiceOrder("fcfs", aging_s=30.0, clock=Clock()))
    for seq_id, arrival, priority in ((0, 3.0, 0), (1, 1.0, 9), (2, 1.0, 0)):
        queue.push(sequence(seq_id, arrival=arrival, priority=priority))
    assert drained(queue) == [1, 2, 0]


def test_lower_priority_values_come_first_until_the_others_have_aged() -> None:
    clock = Clock()
    order = ServiceOrder("priority", aging_s=30.0, clock=clock)
    queue = WaitingQueue(order)
    patient, urgent = sequence(0, arrival=0.0, priority=1), sequence(1, arrival=20.0)
    clock.now_s = 20.0
    queue.push(patient)
    queue.push(urgent)
    assert queue.peek() is urgent
    clock.now_s = 29.9
    assert queue.peek() is urgent
    clock.now_s = 30.0  # one band up: equal now, and earlier
    assert queue.peek() is patient
    assert choose_victim([patient, urgent], order) is urgent


def test_ageing_agrees_with_sorting_by_rank() -> None:
    rng = random.Random(1)
    clock = Clock()
    order = ServiceOrder("priority", aging_s=10.0, clock=clock)
    queue = WaitingQueue(order)
    waiting: list[Sequence] = []
    for number in range(2000):
        clock.now_s += rng.random() * 2
        if rng.random() < 0.6:
            new = sequence(number, arrival=clock.now_s, priority=rng.randint(-3, 3))
            waiting.append(new)
            queue.push(new)
        elif waiting:
            head = queue.peek()
            assert head is min(waiting, key=order.rank)
            gone = rng.choice([head, rng.choice(waiting)])
            assert gone is not None
            waiting.remove(gone)
            queue.discard(gone)
        assert len(queue) == len(waiting)


def test_nobody_starves() -> None:
    """One place, urgent requests without end: the patient one is served all the same."""
    config = SchedulerConfig(max_num_seqs=1, scheduling_policy="priority", priority_aging_s=5.0)
    stack = Stack(config=config)
    stack.add("patient", [1], max_tokens=2, priority=2, arrival=0.0)
    for number in range(40):
        stack.clock.now_s = float(number)
        stack.add(f"urgent{number}", [2], max_tokens=2, arrival=float(number))
        stack.step()
    assert "patient" in stack.ended
    assert next(iter(stack.ended)).startswith("urgent")


def test_a_priority_nobody_would_heed_is_refused() -> None:
    stack = Stack()
    with pytest.raises(InvalidRequestError, match="--scheduling-policy priority") as refused:
        stack.add("a", [1], priority=1)
    assert refused.value.param == "priority"


def test_ageing_takes_time() -> None:
    with pytest.raises(ConfigError, match="priority-aging-s"):
        SchedulerConfig(priority_aging_s=0.0)
