"""Beside a tenant with few sequences or short prompts, one with more has a part of each step."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.scheduling import Scheduler
from penstock.engine.scheduling.heavy_tenants import MIN_DECODES
from tests.support.tiers import tiered

from .stack import Clock, Stack, make_request

# Seconds, of the demo model on a core.
STEP_S, PROMPT_TOKEN_S, DECODE_S = 0.4e-3, 0.135e-3, 0.16e-3
NUM_SLOTS, PROMPT_TOKENS = 96, 128  # those of heavy tenants may be longer


class Simulation:
    """The scheduler beside a device that only takes its time: tenants in closed loops."""

    def __init__(self, *, light: int, heavy: int = PROMPT_TOKENS) -> None:
        self.clock = Clock()
        self._num_prompt_tokens = {"light": light, "heavy": heavy}
        blocks = BlockManager(
            num_blocks=16384, block_size=16, num_host_blocks=0, enable_prefix_caching=False,
            clock=self.clock,
        )  # fmt: skip
        config = SchedulerConfig(max_num_seqs=NUM_SLOTS)
        self.scheduler = Scheduler(
            config, blocks, eos_token_ids=(), max_model_len=2048, clock=self.clock
        )
        self.num_tokens = Counter[str]()  # of output, by tenant
        self.waits_s: dict[str, list[float]] = {"light": [], "heavy": []}  # for first tokens
        self._rng = random.Random(3)
        self._numbers = itertools.count()
        self._asked_s: dict[str, float] = {}  # when, by id, until the first token
        self._next: list[tuple[float, str]] = []  # when a tenant asks again

    def open(self, tenant: str, num_streams: int) -> None:
        self._next += [(self.clock.now_s + 0.02 * number, tenant) for number in range(num_streams)]

    def run(self, seconds: float) -> None:
        end_s = self.clock.now_s + seconds
        while self.clock.now_s < end_s:
            self._ask()
            batch = self.scheduler.schedule()
            took_s = self._time(batch) if batch.scheduled else 1e-3
            self.clock.now_s += took_s
            sampled = {
                each.seq_id: (1,)
                for each in batch.scheduled
                if self.scheduler._running_set.live[each.seq_id].num_in_flight_tokens
            }
            result = BatchResult(step=batch.step, token_ids=sampled, compute_s=took_s)
            for output in self.scheduler.update(batch, result):
                tenant = output.request_id.partition("-")[0]
                self.num_tokens[tenant] += len(output.token_ids)
                if output.token_ids and output.request_id in self._asked_s:
                    asked_s = self._asked_s.pop(output.request_id)
                    self.waits_s[tenant].append(self.clock.now_s - asked_s)
                if output.is_last:
                    self._next.append((self.clock.now_s + self._rng.uniform(0.0, 0.01), tenant))

    def _ask(self) -> None:
        due = [each for each in self._next if each[0] <= self.clock.now_s]
        self._next = [each for each in self._next if each[0] > self.clock.now_s]
        for asked_s, tenant in due:
            request_id = f"{tenant}-{next(self._numbers)}"
            prompt = [self._rng.randrange(1000) for _ in range(self._num_prompt_tokens[tenant])]
            self.scheduler.add(
                make_request(
                    request_id, prompt, tenant=tenant, arrival=self.clock.now_s,
                    max_tokens=self._rng.randint(12, 20) if tenant == "light" else 100,
                )
            )  # fmt: skip
            self._asked_s[request_id] = asked_s

    def _time(self, batch: Batch) -> float:
        num_decodes = sum(each.num_new_tokens == 1 for each in batch.scheduled)
        num_prompt_tokens = batch.num_tokens - num_decodes
        return STEP_S + PROMPT_TOKEN_S * num_prompt_tokens + DECODE_S * num_decodes


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


@pytest.mark.parametrize(
    ("num_heavy", "num_prompt_tokens", "light_prompt_tokens"),
    tiered(
        [
            (150, PROMPT_TOKENS, PROMPT_TOKENS),
            (150, PROMPT_TOKENS, 32),
            (6, 1000, PROMPT_TOKENS),
            (3, 1000, PROMPT_TOKENS),
            (1, 1900, PROMPT_TOKENS),
        ],
        [(150, PROMPT_TOKENS, 32), (3, 1000, PROMPT_TOKENS)],
    ),
)
def test_a_light_tenant_waits_at_most_half_as_long_again_beside_a_heavy_one(
    num_heavy: int, num_prompt_tokens: int, light_prompt_tokens: int
) -> None:
    """In the time of a simulated device; and the heavy one loses little."""
    alone = Simulation(light=light_prompt_tokens)
    alone.open("light", 2)
    alone.run(6.0)
    beside = Simulation(light=light_prompt_tokens, heavy=num_prompt_tokens)
    beside.open("light", 2)
    beside.run(1.0)
    beside.open("heavy", num_heavy)
    beside.run(4.0)  # until the slots are shared
    beside.waits_s["light"].clear()
    before = Counter(beside.num_tokens)
    beside.run(12.0)
    waits_s = beside.waits_s["light"]
    assert len(waits_s) > 50
    assert p99(waits_s) <= 1.5 * p99(alone.waits_s["light"])
    # A token costs its part of the prompt too, 100 of which share one.
    token_s = DECODE_S + (num_prompt_tokens - PROMPT_TOKENS) / 100 * PROMPT_TOKEN_S
    assert (beside.num_tokens - before)["heavy"] > 12.0 * 0.6 / token_s / 2


def test_a_tenant_alone_is_not_limited() -> None:
    stack = stack_of(128)
    for number in range(100):
        stack.add(f"alone{number}", [1, 2, 3], tenant="alone", max_tokens=3)
    for _ in range(2):
        stack.step()
        assert len(stack.device.batches[-1].scheduled) == 100
    stack.run()


def stack_of(max_num_seqs: int) -> Stack:
    config = SchedulerConfig(max_num_seqs=max_num_seqs)
    return Stack(num_blocks=2048, config=config, max_model_len=512)


def test_a_light_tenants_prompt_has_a_step_of_its_own_but_not_always() -> None:
    stack = stack_of(64)
    for number in range(40):
        stack.add(f"heavy{number}", [1, 2, 3], tenant="heavy", max_tokens=400)
    stack.step()
    sizes = []
    for number in range(6):
        stack.add(f"light{number}", [5] * 20, tenant="light", max_tokens=1)
        assert f"light{number}" in {output.request_id for output in stack.step()}
        sizes.append(len(stack.device.batches[-1].scheduled))
    assert sizes == [1, 1, 1 + MIN_DECODES, 1, 1 + MIN_DECODES, 1]


@pytest.mark.parametrize("tokens_per_s", [1000.0, 50_000.0])
def test_where_tokens_are_many_a_floods_steps_leave_the_gateway_a_core(tokens_per_s: float) -> None:
    stack = stack_of(64)
    stack.device.tokens_per_s = tokens_per_s
    for number in range(40):
        stack.add(f"heavy{number}", list(range(100)), tenant="heavy", max_tokens=400)
    for _ in range(5):
        stack.step()
    assert not any(batch.spares_core for batch in stack.device.batches)
    stack.add("light", [5] * 20, tenant="light", max_tokens=3)
    first, second = (stack.step() and stack.device.batches[-1] for _ in range(2))
    assert (len(first.scheduled), first.spares_core) == (1, False)
    assert len(second.scheduled) > 1
    assert second.spares_core == (tokens_per_s > 5000.0)


def test_a_flood_has_both_cores_again_once_it_is_alone() -> None:
    config = SchedulerConfig(max_num_seqs=64)
    stack = Stack(num_blocks=100, block_size=256, config=config, max_model_len=512)
    stack.device.tokens_per_s = 50_000.0
    for number in range(8):  # all of them in each step, so that steps repeat
        stack.add(f"heavy{number}", list(range(50)), tenant="heavy", max_tokens=400)
    stack.add("light", [5] * 20, tenant="light", max_tokens=1)
    for _ in range(5):
        stack.step()
    assert stack.device.batches[-1].spares_core
    stack.clock.now_s += 11.0
    for _ in range(3):
        stack.step()
        assert not stack.device.batches[-1].spares_core


TENANTS = {"light": 1.0, "other": 1.0, "heavy": 1.0, "paying": 4.0}


@settings(max_examples=20)
@given(
    arrivals=st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(list(TENANTS)), st.integers(1, 80), st.sampled_from([1, 1, 1, 3])
            ),
            max_size=12,
        ),
        max_size=16,
    ),
    max_num_seqs=st.sampled_from([4, 16, 128]),
    num_heavy=st.sampled_from([0, 10, 90]),
    num_blocks=st.sampled_from([64, 2048]),
    max_steps_in_flight=st.sampled_from([1, 2]),
    seconds=st.sampled_from([0.0, 3.0]),
)
def test_nobody_starves(
    arrivals: list[list[tuple[str, int, int]]],
    max_num_seqs: int,
    num_heavy: int,
    num_blocks: int,
    max_steps_in_flight: int,
    seconds: float,
) -> None:
    """Who can decode does so within as many steps as the turns of all take, though prompts of
    others keep coming; no step is empty while something could run; all ends, as it would alone."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=256,
        max_steps_in_flight=max_steps_in_flight,
    )  # fmt: skip
    stack = Stack(num_blocks=num_blocks, config=config, max_model_len=128)
    numbers = itertools.count()
    waited = Counter[int]()  # steps since its last token, by seq_id
    longest = 2 * math.ceil(max_num_seqs / MIN_DECODES) + max_steps_in_flight + 1

    def add(tenant: str, num_tokens: int, n: int, max_tokens: int) -> None:
        number = next(numbers)
        prompt = [(number * 7 + place) % 50 for place in range(num_tokens)]
        stack.add(
            f"{tenant}-{number}", prompt, tenant=tenant, weight=TENANTS[tenant],
            max_tokens=max_tokens, n=min(n, max_num_seqs), arrival=stack.clock.now_s,
        )  # fmt: skip

    for _ in range(num_heavy):
        add("heavy", 3, 1, 20)
    for new in arrivals:
        for tenant, num_tokens, n in new:
            add(tenant, num_tokens, n, 1 + num_tokens % 7)
        stack.clock.now_s += seconds
        num_batches = len(stack.device.batches)
        stack.step()
        for batch in stack.device.batches[num_batches:]:
            scheduled = {each.seq_id for each in batch.scheduled}
            assert scheduled or not stack.scheduler.num_running
            for seq_id, sequence in stack.scheduler._running_set.running.items():
                is_decoding = sequence.num_output_tokens > 0
                waited[seq_id] = 0 if seq_id in scheduled or not is_decoding else waited[seq_id] + 1
                assert waited[seq_id] <= longest
    stack.run()
    assert len(stack.ended) == next(numbers)


@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_who_is_heavy_depends_on_weights(weight: float) -> None:
    stack = stack_of(64)
    stack.add("light", [1, 2, 3], tenant="light", max_tokens=40)
    for number in range(8):
        stack.add(f"many{number}", [1, 2, 3], tenant="many", weight=weight, max_tokens=40)
    stack.step()
    heavy = stack.scheduler._running_set.tenant_slots.heavy_tenants()
    assert heavy == ({"many"} if weight == 1.0 else set())


def test_nobody_is_heavy_when_all_have_left_long_ago() -> None:
    stack = Stack()
    for tenant in ("a", "b"):
        stack.add(tenant, [1, 2, 3], max_tokens=2, tenant=tenant)
    stack.run()
    stack.clock.now_s += 1000.0
    assert stack.step() == []  # as an engine does on any message while it has no work
