"""The whole engine core against `transformers.generate`: 16 prompts of mixed length together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.request import SamplingParams
from tests.support.tiers import tiered

from .greedy_parity import (
    ARCHITECTURES,
    NUM_NEW,
    SCHEDULES,
    check_greedy_parity,
    engine,
    requests,
    run,
)

# Each schedule, then each other architecture with the one that asks most of it.
CASES = [
    *(("llama", schedule) for schedule in SCHEDULES),
    *((name, "small pool") for name in ARCHITECTURES if name != "llama"),
]


@pytest.mark.parametrize(("name", "schedule"), tiered(CASES, CASES[1:4] + CASES[-1:]))
def test_greedy_tokens_equal_transformers(
    name: str, schedule: str, expected_tokens: Callable[[str], Any]
) -> None:
    check_greedy_parity(name, schedule, expected_tokens)


@pytest.mark.parametrize(
    "schedule", tiered([name for name in SCHEDULES if name != "whole"], ["small pool"])
)
def test_seeded_sampling_does_not_depend_on_the_schedule(
    schedule: str, tiny_checkpoint: Callable[..., Path]
) -> None:
    """A draw depends on (seed, index, position) alone, so a stream is the same in any batch."""
    path = tiny_checkpoint("LlamaForCausalLM")
    params = SamplingParams(
        temperature=0.9, top_p=0.95, repetition_penalty=1.1, max_tokens=NUM_NEW, ignore_eos=True
    )
    alone: dict[str, list[int]] = {}
    for request in requests(params):
        alone |= run(engine(path, SCHEDULES["whole"][0], 400), [request])
    assert run(engine(path, *SCHEDULES[schedule]), requests(params)) == alone
