"""Prompts of several tenants in one step: nobody waits for the end of another's long one."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.config import SchedulerConfig
from penstock.engine.scheduling.prefill_budget import split_budget

from .stack import Stack

BUDGET = 32
LONG = 400


def stack_of(*, max_steps_in_flight: int = 1) -> Stack:
    config = SchedulerConfig(
        max_num_seqs=8, max_num_batched_tokens=BUDGET, max_steps_in_flight=max_steps_in_flight
    )
    return Stack(num_blocks=2048, config=config, max_model_len=512)


def add(stack: Stack, name: str, num_tokens: int, **settings: int) -> None:
    rng = random.Random(name)
    prompt = [rng.randrange(50) for _ in range(num_tokens)]
    stack.add(name, prompt, tenant=name.partition("-")[0], **settings)


def steps_to_first_token(stack: Stack, name: str) -> int:
    for number in range(1, 1000):
        if any(output.request_id == name and output.token_ids for output in stack.step()):
            return number
    pytest.fail(f"{name} has no token")


@given(
    needs=st.dictionaries(st.text(max_size=3), st.integers(0, 300), min_size=1, max_size=6),
    budget=st.integers(0, 400),
)
def test_parts_are_equal_and_nothing_is_left_that_somebody_needs(
    needs: dict[str, int], budget: int
) -> None:
    parts = split_budget(needs, budget)
    given_out = sum(parts.values())
    assert all(0 <= parts[tenant] <= needs[tenant] for tenant in needs)
    assert given_out <= budget
    assert given_out == min(budget, sum(needs.values()))
    for tenant, part in parts.items():
        if part < needs[tenant]:  # it wanted more: nobody has more than it has, but for rounding
            assert max(parts.values()) <= part + 1


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_a_short_prompt_is_computed_beside_a_long_one(max_steps_in_flight: int) -> None:
    stack = stack_of(max_steps_in_flight=max_steps_in_flight)
    add(stack, "flood-0", LONG, max_tokens=2)
    add(stack, "flood-1", LONG, max_tokens=2)
    stack.step()
    add(stack, "small-0", BUDGET // 2, max_tokens=2)
    assert steps_to_first_token(stack, "small-0") <= max_steps_in_flight
    stack.run()


def test_two_long_prompts_of_two_tenants_take_turns() -> None:
    stack = stack_of()
    for number in range(3):
        add(stack, f"flood-{number}", LONG, max_tokens=2)
    stack.step()
    add(stack, "small-0", 160, max_tokens=2)
    assert steps_to_first_token(stack, "small-0") <= 2 * 160 / BUDGET + 1
    stack.run()


def test_a_long_prompt_goes_on_beside_whoever_comes_after_it() -> None:
    """And not a token of a step's budget is lost to the parting."""
    stack = stack_of()
    add(stack, "flood-0", LONG, max_tokens=1)
    stack.step()
    for number in range(20):
        add(stack, f"small-{number}", 100, max_tokens=1)
    assert steps_to_first_token(stack, "flood-0") <= 2 * LONG / BUDGET + 1
    assert all(batch.num_tokens == BUDGET for batch in stack.device.batches)
    stack.run()


def test_a_tenant_alone_computes_one_prompt_after_the_other() -> None:
    stack = stack_of()
    for number in range(4):
        add(stack, f"alone-{number}", LONG, max_tokens=1)
    stack.run()
    assert list(stack.ended) == [f"alone-{number}" for number in range(4)]
    assert len(stack.device.batches) == 4 * LONG / BUDGET + 1  # the last one tells who left
