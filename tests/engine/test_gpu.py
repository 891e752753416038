"""The engine on a CUDA device (`make gpu`): the same tokens as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
)
from penstock.engine.model_files import DEMO_MODEL_PATH
from penstock.engine.request import SamplingParams
from penstock.engine.startup import build_core

from .test_scheduled_parity import ARCHITECTURES, SCHEDULES, excuse, requests, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NUM_NEW = 24


def _config(model: str, device: str, schedule: str = "chunked", dtype: str = "float32"):  # type: ignore[no-untyped-def]
    scheduler, num_blocks = SCHEDULES[schedule]
    return EngineConfig(
        model=ModelConfig(model=model, dtype=dtype),  # type: ignore[arg-type]
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=scheduler,
        device=DeviceConfig(device=device),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_equal_transformers(
    name: str, schedule: str, expected_tokens: Callable[[str], tuple[Path, object, list[list[int]]]]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    path, model, expected = expected_tokens(name)
    core, info = build_core(_config(str(path), "cuda", schedule))
    assert info.device.startswith("cuda")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW)
    tokens = run(core, requests(params))
    num_excused = 0
    for index, request in enumerate(requests(params)):
        if tokens[f"r{index}"] != expected[index]:
            prompt = list(request.prompt_token_ids)
            gap = excuse(model, prompt, tokens[f"r{index}"], expected[index])
            print(f"{name}, {schedule}, prompt {index}: top two logits differ by {gap:.2e}")
            assert gap < 1e-4
            num_excused += 1
    assert num_excused <= sum(map(len, expected)) / 10_000


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_demo_model_runs_in_every_dtype(dtype: str) -> None:
    config = _config("demo", "cuda", dtype=dtype)
    # Sized from what is free, as a server does.
    config = replace(config, cache=CacheConfig(gpu_memory_utilization=0.3))
    core, info = build_core(config)
    assert DEMO_MODEL_PATH.is_dir()
    assert info.num_blocks * info.block_size >= info.max_model_len
    tokens = run(core, requests(SamplingParams(temperature=0.8, top_p=0.9, max_tokens=NUM_NEW)))
    assert all(tokens.values())
