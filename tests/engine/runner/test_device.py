"""What is settled at start by the device: graphs, and the type of the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.config import CacheConfig, DeviceConfig, EngineConfig
from penstock.engine.errors import ConfigError
from penstock.engine.runner.device import resolve_cudagraph_mode, resolve_kv_dtype, select_device
from penstock.engine.runner.model_runner import ModelRunner
from penstock.gateway.launch.cli import _parser, engine_config, resolve_settings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "on_gpu"),
    [
        ({}, "full"),
        ({"cudagraph_mode": "full"}, "full"),
        ({"cudagraph_mode": "piecewise"}, "piecewise"),
        ({"cudagraph_mode": "none"}, "none"),
        ({"enforce_eager": True}, "none"),
        ({"enforce_eager": True, "cudagraph_mode": "none"}, "none"),
    ],
)
def test_the_mode_of_graphs(asked: dict[str, Any], on_gpu: str) -> None:
    config = DeviceConfig(**asked)
    assert resolve_cudagraph_mode(config, CUDA) == on_gpu
    if config.cudagraph_mode in ("auto", "none"):
        assert resolve_cudagraph_mode(config, CPU) == "none"


def test_graphs_that_cannot_be_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    both = DeviceConfig(enforce_eager=True, cudagraph_mode="full")
    with pytest.raises(
        ConfigError, match=r"--enforce-eager cannot be used with .*--cudagraph-mode full"
    ):
        resolve_cudagraph_mode(both, CUDA)
    config = EngineConfig(device=DeviceConfig(device="cpu", cudagraph_mode="piecewise"))
    with pytest.raises(ConfigError, match="--cudagraph-mode piecewise needs a GPU"):
        ModelRunner(config, tiny_checkpoint())


def test_the_type_of_the_cache(tiny_checkpoint: Callable[..., Path]) -> None:
    fp8 = CacheConfig(kv_cache_dtype="fp8")
    assert resolve_kv_dtype(CacheConfig(), torch.bfloat16) == torch.bfloat16
    assert resolve_kv_dtype(fp8, torch.bfloat16) == torch.float8_e4m3fn
    runners = [
        ModelRunner(EngineConfig(cache=cache, device=DeviceConfig(device="cpu")), tiny_checkpoint())
        for cache in (CacheConfig(num_blocks=32), replace(fp8, num_blocks=32))
    ]
    assert runners[0].info.bytes_per_block == 4 * runners[1].info.bytes_per_block  # of float32
    assert runners[1].info.kv_cache_dtype == "float8_e4m3fn"


def test_a_gpu_takes_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert select_device(DeviceConfig(deterministic=True)).type == "cuda"
    assert select_device(DeviceConfig(device="cpu", deterministic=True)).type == "cpu"


def test_they_are_flags() -> None:
    words = ["serve", "--kv-cache-dtype", "fp8", "--cudagraph-mode", "piecewise", "--enforce-eager"]
    config = engine_config(resolve_settings(vars(_parser().parse_args(words)), {}))
    assert config.cache.kv_cache_dtype == "fp8"
    assert (config.device.cudagraph_mode, config.device.enforce_eager) == ("piecewise", True)
