"""How large a step may be beside sequences that decode."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.config import ConfigError, SchedulerConfig
from penstock.engine.scheduling.prefill_budget import MAX_STEP_MS, MIN_PROMPT_TOKENS, step_budget

from .fake_device import expected_output
from .stack import Stack

TOKENS_PER_S = 1000.0
CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=2048, max_stall_ms=300.0)
LONG = 1500


@given(
    num_decoding=st.integers(0, 4096),
    rate=st.one_of(st.just(0.0), st.floats(1e-3, 1e7)),
    most=st.integers(1, 4096),
    max_stall_ms=st.floats(1e-3, 1e6),
)
def test_a_step_beside_decodes_is_as_long_as_it_may_be(
    num_decoding: int, rate: float, most: int, max_stall_ms: float
) -> None:
    config = SchedulerConfig(max_num_batched_tokens=most, max_stall_ms=max_stall_ms)
    budget = step_budget(config, num_decoding=num_decoding, prefill_tokens_per_s=rate)
    assert min(most, num_decoding + MIN_PROMPT_TOKENS) <= budget <= most
    if num_decoding == 0:
        max_stall_ms = max(max_stall_ms, MAX_STEP_MS)
    if rate == 0.0:
        assert budget == most
    elif budget < most and budget > num_decoding + MIN_PROMPT_TOKENS:
        prompt_tokens = budget - num_decoding
        assert prompt_tokens <= rate * max_stall_ms / 1e3 < prompt_tokens + 1


@pytest.mark.parametrize("max_stall_ms", [0.0, -1.0, float("inf"), float("nan")])
def test_a_limit_is_a_number_of_milliseconds(max_stall_ms: float) -> None:
    with pytest.raises(ConfigError, match="max-stall-ms"):
        SchedulerConfig(max_stall_ms=max_stall_ms)


def num_tokens_of_steps(config: SchedulerConfig) -> list[int]:
    """A short prompt comes; while it decodes, a long one; both end right."""
    stack = Stack(num_blocks=1000, config=config, max_model_len=2 * LONG)
    stack.device.tokens_per_s = TOKENS_PER_S
    stack.add("short", list(range(20)), max_tokens=40)
    stack.step()
    stack.add("long", [place % 50 for place in range(LONG)], max_tokens=3)
    stack.run()
    for name in ("short", "long"):
        expected = expected_output(stack.prompt_of[name], len(stack.tokens(name)))
        assert stack.tokens(name) == expected
    return [batch.num_tokens for batch in stack.device.batches if batch.scheduled]


def test_a_long_prompt_is_computed_in_chunks_that_end_in_time() -> None:
    # 300 ms at 1,000 tokens per second, and the token of the one who decodes.
    assert num_tokens_of_steps(CONFIG)[:7] == [20, 301, 301, 301, 301, 301, 2]
    in_less = replace(CONFIG, max_stall_ms=1.0)
    assert num_tokens_of_steps(in_less)[:3] == [20, MIN_PROMPT_TOKENS + 1, MIN_PROMPT_TOKENS + 1]
    in_more = replace(CONFIG, max_stall_ms=2000.0)
    assert num_tokens_of_steps(in_more)[:3] == [20, LONG + 1, 2]


def test_a_prompt_that_may_not_be_cut_is_computed_whole() -> None:
    whole = replace(CONFIG, enable_chunked_prefill=False, max_num_batched_tokens=2 * LONG)
    assert num_tokens_of_steps(whole)[:3] == [20, LONG + 1, 2]


def test_where_nobody_decodes_a_step_is_full() -> None:
    stack = Stack(num_blocks=2000, config=CONFIG, max_model_len=2 * LONG)
    stack.device.tokens_per_s = TOKENS_PER_S
    for shift in (0, 1):
        stack.add(f"{shift}", [(place + shift) % 50 for place in range(LONG)], max_tokens=1)
    stack.run()
    assert [batch.num_tokens for batch in stack.device.batches if batch.scheduled] == [
        2048,
        2 * LONG - 2048,
    ]


def test_a_step_is_short_for_minutes_after_another_tenant_has_left() -> None:
    """It may come back, and would wait for a step of the other's; no longer than five minutes."""
    stack = Stack(num_blocks=2000, config=CONFIG, max_model_len=2 * LONG)
    stack.device.tokens_per_s = TOKENS_PER_S
    stack.add("light", list(range(200)), tenant="light", max_tokens=1)
    stack.run()
    sizes = []
    for after_s in (100.0, 250.0):
        stack.clock.now_s += after_s
        before = len(stack.device.batches)
        stack.add(f"heavy{after_s}", [int(after_s), *range(LONG - 1)], tenant="heavy", max_tokens=1)
        stack.run()
        sizes.append(max(batch.num_tokens for batch in stack.device.batches[before:]))
    assert sizes == [MIN_PROMPT_TOKENS, LONG]
