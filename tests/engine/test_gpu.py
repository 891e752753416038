"""The engine on a CUDA device (`make gpu`): the same tokens as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    DType,
    EngineConfig,
    ModelConfig,
    PreemptionMode,
    SchedulerConfig,
)
from penstock.engine.request import SamplingParams
from penstock.engine.startup import build_core

from .test_scheduled_parity import (
    ARCHITECTURES,
    NUM_NEW,
    SCHEDULES,
    check_greedy_parity,
    engine,
    requests,
    run,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_equal_transformers(
    name: str, schedule: str, expected_tokens: Callable[[str], Any]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    check_greedy_parity(name, schedule, expected_tokens, device="cuda")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_demo_model_runs_in_every_dtype(dtype: DType) -> None:
    config = EngineConfig(
        model=ModelConfig(dtype=dtype),
        # Sized from what is free, as a server does.
        cache=CacheConfig(gpu_memory_utilization=0.3),
        scheduler=SCHEDULES["chunked"][0],
        device=DeviceConfig(device="cuda"),
    )
    core, info = build_core(config)
    assert info.device.startswith("cuda")
    assert info.num_blocks * info.block_size >= info.max_model_len
    tokens = run(core, requests(SamplingParams(temperature=0.8, top_p=0.9, max_tokens=NUM_NEW)))
    assert all(tokens.values())


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
def test_preempted_streams_equal_undisturbed_ones(
    preemption: PreemptionMode, tiny_checkpoint: Callable[..., Path]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    path = tiny_checkpoint("LlamaForCausalLM")
    params = SamplingParams(temperature=0.9, max_tokens=NUM_NEW, ignore_eos=True)
    schedule = SchedulerConfig(max_num_batched_tokens=64, preemption=preemption)
    roomy = engine(path, schedule, 400, device="cuda")
    tight = engine(path, schedule, 24, device="cuda")
    assert run(tight, requests(params)) == run(roomy, requests(params))
    assert tight.scheduler.counters.num_preemptions > 0
