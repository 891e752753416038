"""Agent sessions: what is kept for them, who goes first, and that nobody starves."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.config import SchedulerConfig

from . import agent_replay
from .agent_replay import PERSON, Replay, Turn, num_needed
from .fake_device import expected_output
from .stack import Stack

RETURN_S = 10.0


def make_trace(*, num_agents: int, num_turns: int) -> dict[str, list[Turn]]:
    """Agents with long prompts and short pauses, and a person with short ones."""
    rng = random.Random(5)
    trace = {}
    for name in (*(f"agent-{number}" for number in range(num_agents)), PERSON):
        is_agent = name != PERSON
        trace[name] = [
            Turn(
                session=name,
                new_prompt_tokens=rng.randint(1000, 2000) if is_agent and not turn
                else 400 if not turn else rng.randint(50, 500 if is_agent else 100),
                output_tokens=rng.randint(10, 40),
                ends_in_tool_call=is_agent and turn < num_turns - 1,
                pause_after_s=rng.uniform(0.5, 4.0) if is_agent else rng.uniform(4.0, 8.0),
                start_s=rng.uniform(0.0, 3.0) if is_agent else 3.0,
            )
            for turn in range(num_turns)
        ]  # fmt: skip
    return trace


@pytest.mark.exhaustive
@pytest.mark.parametrize("prompt_token_s", [0.002, 0.0005])
def test_agents_in_a_quarter_of_the_pool_that_they_need(
    monkeypatch: pytest.MonkeyPatch, prompt_token_s: float
) -> None:
    """Also where the step under way, 500 ms, takes longer than a person's prompt."""
    monkeypatch.setattr(agent_replay, "PROMPT_TOKEN_S", prompt_token_s)
    trace = make_trace(num_agents=6, num_turns=14)
    pool: Any = {"pool_tokens": num_needed(trace) // 4}
    before = Replay(trace, knows_sessions=False, **pool).run()
    outcome = Replay(trace, **pool).run()
    alone = Replay({PERSON: trace[PERSON]}, **pool).run()
    assert outcome.total_s <= 0.75 * before.total_s
    assert outcome.p99_ttft_s(PERSON) <= 1.5 * alone.p99_ttft_s(PERSON)
    assert outcome.slowest(name for name in trace if name != PERSON) <= 3.0


def stack_of(num_blocks: int, *, num_host_blocks: int = 0) -> Stack:
    stack = Stack(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        enable_prefix_caching=True,
        config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
    )
    stack.device.tokens_per_s = 20.0
    return stack


def finish(stack: Stack, request_id: str, prompt: list[int], **settings: Any) -> list[int]:
    """Run a request alone; the tokens of its prompt and its output."""
    arrival = stack.clock.now_s
    stack.add(request_id, prompt, arrival=arrival, max_tokens=4, **settings)
    stack.run()
    return prompt + stack.tokens(request_id)


def fill(stack: Stack, name: str, num_requests: int) -> None:
    """Have other requests use a part of the pool."""
    for number in range(num_requests):
        finish(stack, f"{name}{number}", [7, number, *range(18)])


def test_what_a_tool_call_left_is_kept_until_its_session_is_back() -> None:
    stack = stack_of(32)
    context = finish(stack, "a", list(range(28)), session="s")
    stack.scheduler.hold("a", RETURN_S)
    fill(stack, "other", 8)
    assert stack.blocks.tiers.device.num_held_evictions == 0
    stack.clock.now_s = 8.0
    finish(stack, "b", [*context, 1, 2], session="s", is_agent=True)
    assert stack.num_cached("b") >= len(context) - 4
    counters = stack.blocks.counters
    assert (counters.num_holds, counters.num_returns) == (1, 1)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_nobody_comes_back_for_is_evicted_like_anything_else(is_late: bool) -> None:
    stack = stack_of(32)
    context = finish(stack, "a", list(range(28)), session="s")
    if is_late:  # else the session is not known to be an agent's
        stack.scheduler.hold("a", RETURN_S)
        stack.clock.now_s = 2 * RETURN_S
        fill(stack, "later", 1)
    fill(stack, "other", 16)
    finish(stack, "b", [*context, 1, 2])
    assert stack.num_cached("b") < 8
    assert stack.blocks.counters.num_returns == 0


def test_a_running_sequence_takes_what_is_kept() -> None:
    stack = stack_of(18)
    finish(stack, "a", list(range(40)), session="s")
    stack.scheduler.hold("a", RETURN_S)
    tokens = finish(stack, "big", [9] * 58)
    assert tokens[58:] == expected_output([9] * 58, 4)
    assert stack.blocks.tiers.device.num_held_evictions > 0


def test_a_block_of_two_turns_is_kept_until_both_are_back() -> None:
    stack = stack_of(40)
    shared = list(range(16))
    first = finish(stack, "a", [*shared, 30, 31, 32, 33, 34], session="s")
    second = finish(stack, "b", [*shared, 40, 41, 42, 43, 44], session="t")
    stack.scheduler.hold("a", 3 * RETURN_S)
    stack.scheduler.hold("b", RETURN_S)
    finish(stack, "c", [*first, 1], session="s", is_agent=True)
    fill(stack, "other", 10)
    finish(stack, "d", [*second, 1], session="t", is_agent=True)
    assert stack.num_cached("d") >= len(second) - 4


def test_a_hold_for_a_request_that_is_not_known_does_nothing() -> None:
    stack = stack_of(32)
    stack.scheduler.hold("nobody", RETURN_S)
    finish(stack, "without session", [1, 2, 3])
    stack.scheduler.hold("without session", RETURN_S)
    assert stack.blocks.counters.num_holds == 0


def test_a_person_goes_before_agents_and_these_before_persons_of_a_minute_later() -> None:
    stack = stack_of(64)
    finish(stack, "first", [1] * 20)  # since then the engine knows how fast it is
    stack.add("runs", [2] * 40, max_tokens=8, arrival=0.0)
    for _ in range(2):
        stack.step()
    for name, arrival, is_agent in (("agent", 1.0, True), ("person", 2.0, False)):
        stack.add(name, [3, *name.encode()], max_tokens=1, arrival=arrival, is_agent=is_agent,
                  session=name)  # fmt: skip
    waiting = stack.scheduler._running_set.waiting
    assert [each.request.request_id for each in waiting.in_order()] == ["person", "agent"]
    stack.add("late", [3, 4], max_tokens=1, arrival=1000.0, session="late")
    assert [each.request.request_id for each in waiting.in_order()][-1] == "late"
    stack.run()


def test_beside_agents_a_person_who_was_here_before_passes_sessions_that_begin() -> None:
    stack = stack_of(64)
    finish(stack, "first", [1] * 20)  # since then the engine knows how fast it is
    finish(stack, "hello", [5] * 8, session="person")
    stack.add("runs", [2] * 40, max_tokens=8, arrival=90.0)
    for _ in range(2):
        stack.step()
    stack.clock.now_s = 100.0
    stack.add("begins", [4] * 40, max_tokens=1, arrival=10.0, session="new")
    waiting = stack.scheduler._running_set.waiting
    stack.add("before", [5, 6], max_tokens=1, arrival=100.0, session="person")
    assert [each.request.request_id for each in waiting.in_order()] == ["begins", "before"]
    stack.add("agent", [3] * 8, max_tokens=1, arrival=100.0, session="agent", is_agent=True)
    stack.add("beside", [5, 7], max_tokens=1, arrival=100.0, session="person")
    assert next(waiting.in_order()).request.request_id == "beside"
    stack.run()


def test_a_persons_blocks_outlive_what_agents_leave_with_their_answers() -> None:
    stack = stack_of(48)
    finish(stack, "calls", list(range(20)), session="calls")
    stack.scheduler.hold("calls", RETURN_S)
    person = finish(stack, "person", list(range(30, 50)), session="person")
    for number in range(2):
        finish(stack, f"answer{number}", [number] * 40, session=f"{number}", is_agent=True)
    for number in range(2):  # at once, and for more blocks than are empty
        stack.add(f"other{number}", [7 + number] * 56, max_tokens=4)
    stack.run()
    finish(stack, "again", [*person, 1], session="person")
    assert stack.num_cached("again") >= len(person) - 4


def test_a_step_in_which_a_persons_prompt_ends_has_no_agents_prompt_every_second_time() -> None:
    stack = stack_of(64)
    finish(stack, "first", [1] * 20)  # since then the engine knows how fast it is
    stack.device.tokens_per_s = 1e6
    finish(stack, "fast", [1] * 20)
    stack.add("agent", [2] * 50, max_tokens=1, session="agent", is_agent=True)
    stack.step()
    agents = stack.scheduler._running_set
    computed = []
    for number in range(3):
        before = agents.live[max(agents.live)].num_computed_tokens if number == 0 else computed[-1]
        stack.add(f"person{number}", [3, number], max_tokens=1, session=f"person{number}")
        stack.step()
        (left,) = agents.live.values()
        computed.append(left.num_computed_tokens)
        assert stack.tokens(f"person{number}"), "its prompt ended in this step"
        assert (computed[-1] == before) == (number % 2 == 0)
    stack.run()
    assert stack.tokens("agent") == expected_output([2] * 50, 1)


def test_an_agent_that_was_preempted_waits_for_blocks_like_anybody() -> None:
    stack = stack_of(18)
    finish(stack, "first", [1] * 20)  # since then the engine knows how fast it is
    for who in range(2):
        stack.add(
            f"{who}", [2 + who] * 30, max_tokens=16, session=f"{who}", is_agent=True,
            arrival=stack.clock.now_s,
        )  # fmt: skip
    stack.run()
    assert stack.scheduler.counters.num_preemptions > 0
    for who in range(2):
        assert stack.tokens(f"{who}") == expected_output([2 + who] * 30, 16)


def num_tokens_of_agents_step(stack: Stack) -> int:
    stack.step()
    return stack.device.batches[-1].num_tokens


def test_steps_are_short_while_a_person_beside_agents_is_likely_to_come() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=512)
    stack = Stack(num_blocks=600, config=config, enable_prefix_caching=True, max_model_len=2000)
    stack.device.tokens_per_s = 1000.0
    finish(stack, "calls", [1] * 200, session="agent")  # since then the engine knows how fast it is
    stack.scheduler.hold("calls", RETURN_S)
    stack.clock.now_s = 10.0
    first = finish(stack, "hello", [5] * 8, session="person")
    stack.clock.now_s = 20.0
    second = finish(stack, "again", [*first, 6], session="person")
    stack.add("agent", [2] * 1900, max_tokens=1, session="agent", is_agent=True, arrival=20.0)
    sizes = {}
    for after_s in (1.0, 5.0, 29.0, 31.0):  # the usual pause was 10 s
        stack.clock.now_s = 20.0 + after_s
        sizes[after_s] = num_tokens_of_agents_step(stack)
    assert sizes == {1.0: 500, 5.0: 100, 29.0: 100, 31.0: 500}
    # Her own prompt is not cut for that, and has the step for itself.
    stack.clock.now_s = 45.0
    stack.add("long", [*second, *[7] * 300], max_tokens=9, session="person", arrival=45.0)
    stack.step()
    assert stack.tokens("long")
    assert stack.device.batches[-1].num_tokens < 320
    stack.run()
    assert stack.tokens("agent") == expected_output([2] * 1900, 1)


def test_steps_are_short_while_sessions_begin_and_short_prompts_are_not_cut() -> None:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=2048)
    stack = Stack(num_blocks=1200, config=config, max_model_len=3000)
    stack.device.tokens_per_s = 1000.0
    finish(stack, "first", [1] * 200)
    for name, size in (("a", 1500), ("b", 1500)):
        stack.add(name, [2] * size, max_tokens=1, session=name, arrival=0.0)
    assert num_tokens_of_agents_step(stack) == 100
    stack.add("hello", [3] * 400, max_tokens=1, session="hello", arrival=0.0)
    assert num_tokens_of_agents_step(stack) == 400
    assert stack.tokens("hello") == expected_output([3] * 400, 1)
    stack.clock.now_s = 6.0
    assert num_tokens_of_agents_step(stack) == 500
    stack.run()


TURNS = st.lists(
    st.tuples(
        st.integers(0, 3),  # whose
        st.integers(1, 20),  # new tokens
        st.booleans(),  # whether the turn ends in a tool call
        st.integers(0, 12),  # steps until the next turn of anybody
        st.integers(0, 40),  # seconds that pass
    ),
    max_size=30,
)


@settings(max_examples=25)
@given(turns=TURNS, num_blocks=st.integers(17, 40), num_host_blocks=st.sampled_from([0, 12]))
def test_everybody_is_served_and_right_whatever_is_kept(
    turns: list[tuple[int, int, bool, int, int]], num_blocks: int, num_host_blocks: int
) -> None:
    """No clock runs in the end, so no hold ends: what waits must not wait for that."""
    stack = stack_of(num_blocks, num_host_blocks=num_host_blocks)
    contexts: dict[int, list[int]] = {}
    called: set[int] = set()
    calls = set()
    for number, (who, num_new, ends_in_call, num_steps, pause_s) in enumerate(turns):
        context = contexts.get(who, [])
        if len(context) + num_new > 55:
            context = []
        prompt = [*context, *((who + each) % 50 for each in range(num_new))]
        request_id = f"{number}"
        stack.add(
            request_id, prompt, max_tokens=4, arrival=stack.clock.now_s, session=f"s{who}",
            is_agent=who in called, tenant="one" if who < 3 else "two",
        )  # fmt: skip
        contexts[who] = prompt + expected_output(prompt, 4)
        called.discard(who)
        if ends_in_call:
            called.add(who)
            calls.add(request_id)
        for _ in range(num_steps):
            for output in stack.step():
                if output.is_last and output.request_id in calls:
                    stack.scheduler.hold(output.request_id, RETURN_S)
        stack.clock.now_s += pause_s
    stack.run()
    assert stack.scheduler._sessions.num_live == 0
    for request_id, prompt in stack.prompt_of.items():
        assert stack.tokens(request_id) == expected_output(prompt, 4)
