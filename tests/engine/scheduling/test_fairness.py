"""Tenants and their shares: deficit round robin in the waiting queue, and what a flood does."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.config import SchedulerConfig
from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import Sequence, SequenceStatus
from penstock.engine.scheduling.waiting_queue import (
    QUANTUM_TOKENS,
    FairTurns,
    ServiceOrder,
    WaitingQueue,
)
from tests.support.tiers import tiered

from .stack import Clock, Stack, make_request

TENANTS = "abc"
WEIGHTS = st.tuples(*[st.sampled_from([0.25, 1.0, 3.0])] * len(TENANTS))
COSTS = st.lists(st.integers(1, 2000), min_size=1, max_size=40)


class Queue:
    """A waiting queue and a model of it: lists."""

    def __init__(self, *, policy: str = "fcfs") -> None:
        self.clock = Clock()
        order = ServiceOrder(policy, aging_s=30.0, clock=self.clock)  # type: ignore[arg-type]
        self.queue = WaitingQueue(order)
        self.waiting: dict[int, Sequence] = {}
        self._ids = itertools.count()

    def push(
        self, tenant: str, num_tokens: int, *, weight: float = 1.0, priority: int = 0
    ) -> Sequence:
        seq_id = next(self._ids)
        request = make_request(
            f"r{seq_id}", [1] * num_tokens, tenant=tenant, weight=weight, priority=priority,
            arrival=self.clock.now_s,
        )  # fmt: skip
        sequence = self.waiting[seq_id] = Sequence(request, seq_id=seq_id)
        self.queue.push(sequence)
        return sequence

    def serve(self) -> Sequence:
        head = self.queue.peek()
        assert head is not None, "somebody waits, and nobody is served"
        self.queue.serve(head, num_tokens=len(head.token_ids))
        del self.waiting[head.seq_id]
        assert len(self.queue) == len(self.waiting)
        return head


@given(weights=WEIGHTS, costs=COSTS, num_served=st.integers(0, 119))
def test_shares_follow_weights_within_a_quantum(
    weights: tuple[float, ...], costs: list[int], num_served: int
) -> None:
    fair = FairTurns()
    of_tenant = dict(zip(TENANTS, weights, strict=True))
    served: defaultdict[str, int] = defaultdict(int)
    for tenant, weight in of_tenant.items():
        fair.join(tenant, weight)
    for cost in itertools.islice(itertools.cycle(costs), num_served):
        tenant = min(TENANTS, key=fair.turn)
        fair.serve(tenant)
        fair.charge(tenant, of_tenant[tenant], cost)
        served[tenant] += cost
    for one, other in itertools.permutations(TENANTS, 2):
        ahead = served[one] / of_tenant[one] - served[other] / of_tenant[other]
        assert ahead <= QUANTUM_TOKENS + max(costs) / of_tenant[one]


@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.sampled_from(TENANTS), st.integers(1, 1500)),
            st.just("serve"),
            st.integers(0, 60),  # who leaves
        ),
        max_size=80,
    ),
    weights=WEIGHTS,
)
def test_the_queue_serves_whoever_waits_in_the_order_it_tells(
    actions: list[tuple[str, int] | str | int], weights: tuple[float, ...]
) -> None:
    queue = Queue()
    of_tenant = dict(zip(TENANTS, weights, strict=True))
    for action in actions:
        if isinstance(action, tuple):
            queue.push(action[0], action[1], weight=of_tenant[action[0]])
        elif isinstance(action, int):
            for sequence in [s for s in queue.waiting.values() if s.seq_id == action]:
                queue.queue.discard(sequence)
                del queue.waiting[sequence.seq_id]
        elif queue.waiting:
            queue.serve()
        assert queue.queue.num_tokens == sum(len(s.token_ids) for s in queue.waiting.values())
    told = [sequence.seq_id for sequence in queue.queue.in_order()]
    came = [queue.serve().seq_id for _ in range(len(queue.waiting))]
    assert told == came
    assert queue.queue.peek() is None


@given(
    pushes=st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 999)), max_size=60),
    weights=WEIGHTS,
)
def test_within_a_tenant_arrival_decides(
    pushes: list[tuple[str, int]], weights: tuple[float, ...]
) -> None:
    queue = Queue()
    of_tenant = dict(zip(TENANTS, weights, strict=True))
    for tenant, num_tokens in pushes:
        queue.push(tenant, num_tokens, weight=of_tenant[tenant])
    came: defaultdict[str, list[int]] = defaultdict(list)
    while queue.waiting:
        sequence = queue.serve()
        came[sequence.request.tenant].append(sequence.seq_id)
    assert all(ids == sorted(ids) for ids in came.values())


@given(
    backlog=st.lists(st.integers(1, 3000), min_size=50, max_size=120),
    weight=st.sampled_from([0.1, 1.0, 10.0]),
    num_before=st.integers(0, 40),
)
def test_nobody_waits_longer_than_the_others_round(
    backlog: list[int], weight: float, num_before: int
) -> None:
    """However long the flood has had the queue to itself, a newcomer's turn is near."""
    queue = Queue()
    for num_tokens in backlog:
        queue.push("flood", num_tokens, weight=weight)
    for _ in range(num_before):
        queue.serve()
    newcomer = queue.push("small", 10)
    taken = 0
    while (served := queue.serve()) is not newcomer:
        taken += len(served.token_ids)
    assert taken <= QUANTUM_TOKENS * weight + max(backlog)


def test_one_request_at_a_time_earns_no_more_than_its_share() -> None:
    """Whoever asks anew the moment it is served must not be the first of every round."""
    queue = Queue()
    served: defaultdict[str, int] = defaultdict(int)
    for _ in range(200):
        queue.push("patient", 100)
    queue.push("eager", 100)
    for _ in range(200):
        sequence = queue.serve()
        served[sequence.request.tenant] += len(sequence.token_ids)
        if sequence.request.tenant == "eager":
            queue.push("eager", 100)
    assert abs(served["eager"] - served["patient"]) <= 2 * QUANTUM_TOKENS


def test_whoever_is_passed_keeps_its_turn() -> None:
    queue = Queue()
    passed = queue.push("flood", 10)
    queue.queue.charge(queue.push("small", 10), 100_000)
    for number in range(300):
        head = queue.queue.peek({"flood"})
        assert head is not None
        assert head is not passed
        queue.queue.serve(head, num_tokens=10)
        del queue.waiting[head.seq_id]
        queue.push(f"tenant{number}" if number % 2 else "small", 10)
    assert queue.queue.peek({"flood", "small"}) is not None
    assert queue.serve() is passed


def test_output_is_charged_when_it_ends() -> None:
    queue = Queue()
    sequences = [queue.push("talks", 10) for _ in range(50)]
    queue.push("brief", 10)
    queue.serve()
    queue.queue.charge(sequences[0], 100 * int(QUANTUM_TOKENS))
    queue.push("brief", 10)
    assert [queue.serve().request.tenant for _ in range(3)] == ["brief", "brief", "talks"]


def test_accounts_of_tenants_that_left_are_closed() -> None:
    queue = Queue()
    for number in range(5000):
        queue.push("stays", 600)
        queue.push(f"tenant{number}", 600)
        queue.serve()
        queue.serve()
    accounts = queue.queue._bands[0].turns._accounts
    assert len(accounts) < 500


def test_who_was_parked_returns_before_newcomers_of_any_tenant() -> None:
    queue = Queue()
    parked = queue.push("flood", 10)
    assert queue.serve() is parked
    queue.queue.charge(parked, 5000)
    queue.push("small", 10)
    parked.move_to(SequenceStatus.RUNNING)
    parked.move_to(SequenceStatus.PREEMPTED)
    queue.queue.push(parked)
    queue.waiting[parked.seq_id] = parked
    assert queue.serve() is parked


def test_a_backlog_gains_nothing_by_its_age_where_all_are_equal() -> None:
    queue = Queue(policy="priority")
    for _ in range(100):
        queue.push("flood", 600)
    queue.clock.now_s = 3600.0
    newcomer = queue.push("small", 600)
    assert newcomer in [queue.serve(), queue.serve()]


def test_a_more_urgent_priority_lets_others_age_further() -> None:
    queue = Queue(policy="priority")
    old = queue.push("a", 10)
    queue.clock.now_s = 3600.0
    urgent = queue.push("b", 10, priority=-2)
    assert queue.queue.order.band(old) == -2
    assert [queue.serve(), queue.serve()] == [old, urgent]


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, 5e-324, 1e300])
def test_a_weight_without_sense_is_refused(weight: float) -> None:
    with pytest.raises(InvalidRequestError, match="weight"):
        Stack().add("a", [1], weight=weight)


def ttft_p99(stack: Stack, *, num_small: int, num_flood: int) -> float:
    """Steps to the first token of the small tenant's requests, in a closed loop of its own; the
    flood keeps that many requests in the engine."""
    rng = random.Random(7)
    began: dict[str, int] = {}
    took: list[int] = []
    live = {"small": 0, "flood": 0}
    for step, number in zip(range(600), itertools.count(), strict=False):
        for tenant, target in (("small", num_small), ("flood", num_flood)):
            while live[tenant] < target:
                request_id = f"{tenant}-{number}-{live[tenant]}"
                prompt = [rng.randrange(50) for _ in range(rng.randint(8, 24))]
                stack.add(
                    request_id, prompt, tenant=tenant, max_tokens=rng.randint(4, 12),
                    arrival=float(step),
                )  # fmt: skip
                began[request_id] = step
                live[tenant] += 1
        stack.clock.now_s = float(step)
        for output in stack.step():
            tenant = output.request_id.partition("-")[0]
            if tenant == "small" and output.request_id in began:
                took.append(step - began.pop(output.request_id) + 1)
            live[tenant] -= output.is_last
    assert len(took) > 50
    return sorted(took)[math.ceil(0.99 * len(took)) - 1]


@pytest.mark.parametrize("num_small", tiered([1, 2, 4], [2]))
def test_a_flood_at_a_hundred_times_the_load_at_most_doubles_the_wait(num_small: int) -> None:
    def stack() -> Stack:
        config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64)
        return Stack(num_blocks=512, config=config)

    alone = ttft_p99(stack(), num_small=num_small, num_flood=0)
    flooded = ttft_p99(stack(), num_small=num_small, num_flood=100 * num_small)
    assert flooded <= 2 * alone


def test_positions_go_to_those_who_asked_four_times_a_second() -> None:
    stack = Stack(config=SchedulerConfig(max_num_seqs=1))
    stack.add("runs", [1] * 8, max_tokens=40)
    stack.add("silent", [2] * 5, max_tokens=1, arrival=1.0)
    stack.add("asks", [3] * 5, max_tokens=1, arrival=2.0, wants_queue_position=True)
    heard: list[tuple[float, int | None, int]] = []
    for step in range(60):
        stack.clock.now_s = step / 10
        if step == 20:
            stack.core.abort("silent")
        heard += [
            (stack.clock.now_s, output.queue_position, output.num_tokens_ahead)
            for output in stack.step()
            if output.queue_position is not None
        ]
    assert heard == [(0.0, 1, 5), (2.1, 0, 0)]
    assert "asks" in stack.ended


def test_who_asks_is_told_what_is_left_of_its_prompt() -> None:
    """After each step but the last that computes a part of it; the others are told nothing."""
    stack = Stack(config=SchedulerConfig(max_num_batched_tokens=8), num_blocks=64)
    stack.add("asks", [3] * 30, max_tokens=2, wants_queue_position=True)
    stack.add("silent", [2] * 30, max_tokens=2, arrival=1.0)
    heard = [
        (output.request_id, output.num_tokens_ahead)
        for _ in range(20)
        for output in stack.step()
        if output.num_tokens_ahead and output.queue_position is None
    ]
    left = [num for request_id, num in heard if request_id == "asks"]
    assert left == sorted(left, reverse=True)
    assert left
    assert all(0 < num < 30 for num in left)
    assert len(left) == len(heard)
    assert {"asks", "silent"} <= set(stack.ended)


def test_the_queue_tells_how_fast_it_drains() -> None:
    stack = Stack(config=SchedulerConfig(max_num_seqs=1), num_blocks=64)
    assert stack.scheduler.queue_tokens_per_s == 0.0
    for number in range(100):
        stack.add(f"r{number}", [number % 50] * 10, max_tokens=2, arrival=float(number))
    for step in range(100):
        stack.clock.now_s = step / 2
        stack.step()
    # A request of ten tokens lasts two steps: one second.
    assert stack.scheduler.queue_tokens_per_s == pytest.approx(10.0, rel=0.1)
    assert stack.scheduler.num_tokens_waiting == 10 * stack.scheduler.num_waiting
