"""The engine with every model family against `transformers.generate`, in the least favourable way:
in chunks, preempted, two steps in flight, deterministic."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.request import Request, SamplingParams
from penstock.engine.startup import build_core
from tests.support.tiers import tiered

from .greedy_parity import NEAR_TIE, excuse, expected_tokens, run
from .model_families import FAMILIES, SIX

NUM_NEW = 10


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(3, 160) for _ in range(length)] for length in (1, 17, 40, 65, 100)]


@pytest.mark.parametrize("name", tiered(FAMILIES, SIX))
def test_greedy_tokens_equal_transformers(name: str, tiny_checkpoint: Callable[..., Path]) -> None:
    architecture, options = FAMILIES[name]
    path = tiny_checkpoint(architecture, **options)
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(model=str(path), dtype="float32", max_model_len=128),
            cache=CacheConfig(num_blocks=36, block_size=4),
            scheduler=SchedulerConfig(max_num_batched_tokens=33, max_steps_in_flight=2),
            device=DeviceConfig(device="cpu", deterministic=True),
        )
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    tokens = run(
        core,
        [
            Request(
                request_id=f"r{index}", prompt_token_ids=tuple(prompt), sampling_params=params,
                arrival_s=float(index),
            )
            for index, prompt in enumerate(prompts())
        ],
    )  # fmt: skip
    assert core.scheduler.counters.num_preemptions > 0
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for index, prompt in enumerate(prompts()):
        expected = expected_tokens(model, prompt, NUM_NEW)
        found = tokens[f"r{index}"]
        assert found == expected or excuse(model, prompt, found, expected) < NEAR_TIE
