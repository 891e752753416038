"""Flags, their environment variables and the config file, and what is refused."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import EngineConfig, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.gateway.config import GatewayConfig
from penstock.gateway.launch.cli import _parser, engine_config, resolve_settings
from penstock.gateway.launch.flags import FLAGS, parse_bytes


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
    return {**settings, "model": model, "engine_address": "x"}


def test_the_gateways_defaults_are_those_of_its_flags() -> None:
    silent = GatewayConfig.from_settings(gateway_settings(resolve_settings({}, {})))
    assert silent == GatewayConfig(
        engine_address="x", host_name=silent.host_name, model=ModelConfig(model="demo")
    )


def test_a_flag_of_the_gateway_reaches_it() -> None:
    given = [
        "serve", "--redis-url", "redis://:pw@host/1", "--api-workers", "3",
        "--response-log-bytes", "1M", "--response-log-ttl-s", "5", "--disconnect-grace-s", "6",
        "--stream-interval-ms", "7.5", "--session-ttl-s", "8", "--shutdown-grace-s", "9",
        "--api-keys-file", "keys.toml", "--request-deadline-ms", "10", "--max-queue-requests", "11",
        "--max-queue-tokens", "12", "--max-connections", "13", "--header-timeout-s", "14",
        "--body-timeout-s", "15", "--ssl-certfile", "cert", "--ssl-keyfile", "key",
        "--ssl-keyfile-password", "word", "--otlp-endpoint", "http://otlp", "--log-format", "json",
        "--session-storage", "optional", "--ping-interval-s", "16", "--redis-patience-ms", "17",
        "--keep-alive-s", "18",
    ]  # fmt: skip
    settings = resolve_settings(vars(_parser().parse_args(given)), {})
    values = {**gateway_settings(settings), "worker_index": 2, "num_workers": 3}
    assert GatewayConfig.from_settings(values) == GatewayConfig(
        engine_address="x",
        worker_index=2,
        num_workers=3,
        host_name="localhost",
        redis_url="redis://:pw@host/1",
        response_log_bytes=1 << 20,
        response_log_ttl_s=5,
        disconnect_grace_s=6,
        stream_interval_ms=7.5,
        session_ttl_s=8,
        shutdown_grace_s=9,
        api_keys_file="keys.toml",
        request_deadline_ms=10,
        max_queue_requests=11,
        max_queue_tokens=12,
        max_connections=13,
        header_timeout_s=14,
        body_timeout_s=15,
        ssl_certfile="cert",
        ssl_keyfile="key",
        ssl_keyfile_password="word",
        otlp_endpoint="http://otlp",
        ping_interval_s=16,
        redis_patience_ms=17,
        keep_alive_s=18,
        log_format="json",
        session_storage="optional",
        model=ModelConfig(model="demo"),
    )
    assert "pw" not in repr(GatewayConfig.from_settings(values))
    assert "word" not in repr(GatewayConfig.from_settings(values)).replace("password", "")


def test_what_is_secret_is_in_no_message(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("api-key = [{hunter2 = 1}]\n")
    with pytest.raises(ConfigError, match="api-key in the config file has no sense") as error:
        resolve_settings({"config": file}, {})
    assert "hunter2" not in str(error.value)


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
        ({"PENSTOCK_SESSION_RETENTION_S": "-1"}, "PENSTOCK_SESSION_RETENTION_S has no sense"),
        ({"PENSTOCK_API_WORKERS": "0"}, "PENSTOCK_API_WORKERS has no sense"),
        ({"PENSTOCK_API_WORKERS": "2"}, "--api-workers 2 needs --redis-url"),
        ({"PENSTOCK_MAX_CONNECTIONS": "1.5"}, "PENSTOCK_MAX_CONNECTIONS has no sense"),
        ({"PENSTOCK_SHUTDOWN_GRACE_S": "inf"}, "PENSTOCK_SHUTDOWN_GRACE_S has no sense"),
        ({"PENSTOCK_SESSION_STORAGE": "perhaps"}, "must be one of required, optional"),
        ({"PENSTOCK_SSL_KEYFILE": "key.pem"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"PENSTOCK_SESSION_RETENTION_S": "nan"}, "PENSTOCK_SESSION_RETENTION_S has no sense"),
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
