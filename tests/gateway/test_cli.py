"""Flags, their environment variables and the config file, and what is refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import EngineConfig, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.gateway.cli import FLAGS, _parser, engine_config, parse_bytes, resolve_settings
from penstock.gateway.config import GatewayConfig


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('model = "from/file"\nport = 1\nmax-num-seqs = 2\nallowed-origins = ["*"]\n')
    environment = {"PENSTOCK_CONFIG": str(file), "PENSTOCK_PORT": "3", "PENSTOCK_DTYPE": "float16"}
    settings = resolve_settings({"port": 4}, environment)
    assert (settings["model"], settings["port"]) == ("from/file", 4)
    assert (settings["max_num_seqs"], settings["dtype"]) == (2, "float16")
    assert settings["allowed_origins"] == ["*"]
    assert resolve_settings({}, environment)["port"] == 3
    assert resolve_settings({}, {"PENSTOCK_CONFIG": str(file)})["port"] == 1
    assert resolve_settings({}, {})["model"] == "demo"


def test_lists_and_switches_from_the_environment() -> None:
    environment = {
        "PENSTOCK_API_KEY": "one, two",
        "PENSTOCK_ENABLE_CHUNKED_PREFILL": "off",
        "PENSTOCK_KV_CACHE_MEMORY_BYTES": "2GiB",
    }
    settings = resolve_settings({}, environment)
    assert settings["api_key"] == ["one", "two"]
    config = engine_config(settings)
    assert config.scheduler.enable_chunked_prefill is False
    assert config.cache.kv_cache_memory_bytes == 2 << 30


def test_kv_memory_and_scheduling() -> None:
    given = [
        "serve", "--no-enable-prefix-caching", "--swap-space", "0.5", "--num-host-blocks", "0",
        "--preemption", "swap", "--scheduling-policy", "priority", "--priority-aging-s", "2.5",
        "--session-retention-s", "0",
    ]  # fmt: skip
    settings = resolve_settings(vars(_parser().parse_args(given)), {})
    config = engine_config(settings)
    assert config.cache.enable_prefix_caching is False
    assert (config.cache.swap_space, config.cache.num_host_blocks) == (0.5, 0)
    assert (config.scheduler.preemption, config.scheduler.scheduling_policy) == ("swap", "priority")
    assert config.scheduler.priority_aging_s == 2.5
    assert GatewayConfig.from_settings(gateway_settings(settings)).session_retention_s == 0
    silent = resolve_settings({}, {})
    assert engine_config(silent) == EngineConfig()
    assert GatewayConfig.from_settings(gateway_settings(silent)).session_retention_s == 600


def gateway_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """As the supervisor hands them on."""
    model = asdict(ModelConfig(model=settings["model"]))
    return {**settings, "model": model, "engine_address": "ipc://x"}


def test_every_flag_is_parsed_under_its_key() -> None:
    arguments = [
        "serve",
        "org/model",
        "--api-key",
        "a",
        "--api-key",
        "b",
        "--no-enable-chunked-prefill",
    ]
    given = vars(_parser().parse_args(arguments))
    settings = resolve_settings(given, {})
    assert settings["api_key"] == ["a", "b"]
    assert settings["enable_chunked_prefill"] is False
    assert settings["model"] == "org/model"
    assert set(settings) == {flag.key for flag in FLAGS} | {"model"}


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("4k", 4096), ("512M", 512 << 20), ("2GiB", 2 << 30), ("1.5g", 3 << 29)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "inf", "nan", "1e400", "G", "1X"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        ({"PENSTOCK_PORT": "http"}, "PENSTOCK_PORT has no sense"),
        ({"PENSTOCK_PORT": "70000"}, "not between"),
        ({"PENSTOCK_DTYPE": "int3"}, "must be one of"),
        ({"PENSTOCK_API_KEY": ""}, "api-key is empty"),
        ({"PENSTOCK_API_KEY": "a,,b"}, "api-key is empty"),
        ({"PENSTOCK_KV_CACHE_MEMORY_BYTES": "inf"}, "no sense"),
        ({"PENSTOCK_ENABLE_CHUNKED_PREFILL": "perhaps"}, "no sense"),
        ({"PENSTOCK_CONFIG": "/no/such/file"}, "cannot read"),
        ({"PENSTOCK_PREEMPTION": "perhaps"}, "must be one of auto, swap, recompute"),
        ({"PENSTOCK_SCHEDULING_POLICY": "lottery"}, "must be one of fcfs, priority"),
        ({"PENSTOCK_SESSION_RETENTION_S": "-1"}, "--session-retention-s"),
        ({"PENSTOCK_SESSION_RETENTION_S": "nan"}, "--session-retention-s"),
    ],
)
def test_variables_without_sense(environment: dict[str, str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        resolve_settings({}, environment)


@pytest.mark.parametrize(
    "environment",
    [
        {"PENSTOCK_SWAP_SPACE": "-1"},
        {"PENSTOCK_SWAP_SPACE": "nan"},
        {"PENSTOCK_NUM_HOST_BLOCKS": "-1"},
        {"PENSTOCK_PRIORITY_AGING_S": "0"},
    ],
)
def test_values_that_the_engine_refuses(environment: dict[str, str]) -> None:
    settings = resolve_settings({}, environment)
    [name] = environment
    flag = "--" + name.removeprefix("PENSTOCK_").lower().replace("_", "-")
    with pytest.raises(ConfigError, match=flag):
        engine_config(settings)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model = 5", "must be a text"),
        ("api-key = [1]", "no sense"),
        ("colour = 1", "unknown keys: colour"),
        ("port = ", "cannot read"),
    ],
)
def test_files_without_sense(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match=fault):
        resolve_settings({"config": tmp_path / "file"}, {})
