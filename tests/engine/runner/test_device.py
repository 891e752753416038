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
from penstock.engine.offline.prompts import engine_config as llm_config
from penstock.engine.runner.device import resolve_cudagraph_mode, resolve_kv_dtype, select_device
from penstock.engine.runner.model_runner import ModelRunner
from penstock.gateway.launch.cli import _parser
from penstock.gateway.launch.settings import (
    ENGINE_SETTINGS,
    SERVE_SETTINGS,
    engine_config,
    resolve_settings,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "on_gpu"),
    [
        ({}, "full"),
        ({"cudagraph_mode": "full"}, "full"),
        ({"cudagraph_mode": "piecewise"}, "piecewise"),
        ({"cudagraph_mode": "none"}, "none"),
    ],
)
def test_the_mode_of_graphs(asked: dict[str, Any], on_gpu: str) -> None:
    config = DeviceConfig(**asked)
    assert resolve_cudagraph_mode(config, CUDA) == on_gpu
    if config.cudagraph_mode in ("auto", "none"):
        assert resolve_cudagraph_mode(config, CPU) == "none"


def test_graphs_that_cannot_be_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
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
    config = _served("--kv-cache-dtype fp8 --cudagraph-mode piecewise")
    assert config.cache.kv_cache_dtype == "fp8"
    assert config.device.cudagraph_mode == "piecewise"


def _served(line: str, **variables: str) -> EngineConfig:
    words = ["serve", *line.split()]
    return engine_config(resolve_settings(vars(_parser().parse_args(words)), variables))


@pytest.mark.parametrize("command", ["serve", "engine"])
def test_enforce_eager_is_a_mode_of_graphs(command: str) -> None:
    """Not a second setting beside it, which could say something else."""
    flags = SERVE_SETTINGS if command == "serve" else ENGINE_SETTINGS
    for words in (["--enforce-eager"], ["--enforce-eager", "--cudagraph-mode", "none"]):
        given = vars(_parser().parse_args([command, *words]))
        config = engine_config(resolve_settings(given, {}, settings=flags))
        assert config.device.cudagraph_mode == "none"
    assert _served("", PENSTOCK_ENFORCE_EAGER="true") == _served("--cudagraph-mode none")
    assert _served("--no-enforce-eager") == _served("") == EngineConfig()
    assert llm_config("demo", {"enforce_eager": True}) == _served("--enforce-eager")
    assert not hasattr(DeviceConfig(), "enforce_eager")


@pytest.mark.parametrize("mode", ["piecewise", "full"])
def test_enforce_eager_is_refused_with_graphs(mode: str) -> None:
    said = f"--enforce-eager means --cudagraph-mode none: .* --cudagraph-mode {mode}"
    with pytest.raises(ConfigError, match=said):
        _served(f"--enforce-eager --cudagraph-mode {mode}")
    with pytest.raises(ConfigError, match=said):
        llm_config("demo", {"enforce_eager": True, "cudagraph_mode": mode})
    with pytest.raises(ConfigError, match="--enforce-eager must be true or false, not 'yes'"):
        llm_config("demo", {"enforce_eager": "yes"})
