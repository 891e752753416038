"""Flags, their environment variables and the config file, and what is refused."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import BLOCK_SIZE, EngineConfig, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.settings.declaration import Group, Setting
from penstock.engine.settings.kinds import (
    INTERVAL,
    MILLISECONDS,
    SECONDS,
    parse_bytes,
    parse_duration,
    show_bytes,
    show_duration,
)
from penstock.gateway.config import GatewayConfig
from penstock.gateway.launch.cli import _hide_secrets, _parser, main
from penstock.gateway.launch.ray_engines import environment_of
from penstock.gateway.launch.settings import (
    ENGINE_SETTINGS,
    SERVE_SETTINGS,
    engine_config,
    resolve_settings,
)


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


def test_a_variable_that_is_empty() -> None:
    """As files for containers leave them."""
    settings = resolve_settings({}, {"PENSTOCK_MODEL": "", "PENSTOCK_ALLOWED_MEDIA_DOMAINS": ""})
    assert settings["model"] == resolve_settings({"model": ""}, {})["model"] == "demo"
    assert GatewayConfig.from_settings(gateway_settings(settings)).allowed_media_domains == ("",)


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
        engine_address="x",
        host_name=silent.host_name,
        data_dir=None,  # only the command keeps chats where nobody has said it
        model=ModelConfig(model="demo"),
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
        data_dir=None,
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


def test_the_hubs_token_reaches_the_children_and_no_list_of_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "before")
    titles: list[str] = []
    monkeypatch.setattr("setproctitle.setproctitle", titles.append)
    _hide_secrets({"hf_token": "hunter2"}, model="demo")
    assert os.environ["HF_TOKEN"] == "hunter2"
    assert titles == ["penstock serve demo (arguments hidden)"]


def test_what_is_secret_is_in_no_message(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("api-key = [{hunter2 = 1}]\n")
    with pytest.raises(ConfigError, match="api-key in the config file must be") as error:
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
    assert set(settings) == {flag.key for flag in SERVE_SETTINGS} | {"model"}


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
    ("text", "value_s"),
    [("30", 30), ("2.5", 2.5), ("250ms", 0.25), ("90s", 90), ("10m", 600), ("10min", 600),
     ("1.5h", 5400), (" 30D ", 2592000), ("0", 0), ("1e3", 1000)],
)  # fmt: skip
def test_durations(text: str, value_s: float) -> None:
    assert SECONDS.parse(text) == pytest.approx(value_s)
    assert MILLISECONDS.parse(f"{value_s}s") == pytest.approx(value_s * 1000)


def test_a_plain_number_of_a_duration_has_its_options_unit() -> None:
    assert (MILLISECONDS.parse("250"), MILLISECONDS.parse("2s")) == (250, 2000)
    assert (SECONDS.parse("250"), SECONDS.parse("2m")) == (250, 120)


@pytest.mark.parametrize("text", ["", "x", "-1", "-1s", "inf", "nan", "infs", "d", "1w", "1 0"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        parse_duration(text)


def test_an_interval_is_more_than_nothing() -> None:
    with pytest.raises(ValueError, match="more than 0"):
        INTERVAL.parse("0ms")


@pytest.mark.parametrize("size", [1, 1000, 1024, 1536, 4 << 20, 256 << 20, 3 << 40])
def test_a_size_is_shown_as_it_can_be_given(size: int) -> None:
    assert parse_bytes(show_bytes(size)) == size


@pytest.mark.parametrize("value_s", [0, 0.25, 1, 75, 90, 600, 3600, 30 * 86400])
def test_a_duration_is_shown_as_it_can_be_given(value_s: float) -> None:
    assert parse_duration(show_duration(value_s)) == pytest.approx(value_s)


def test_units_in_the_file_and_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text('session-ttl-s = "7d"\nresponse-log-bytes = "1G"\nkeep-alive-s = 20\n')
    environment = {"PENSTOCK_CONFIG": str(file), "PENSTOCK_MAX_STALL_MS": "1s"}
    settings = resolve_settings({}, {**environment, "PENSTOCK_SWAP_SPACE": "512M"})
    assert (settings["session_ttl_s"], settings["response_log_bytes"]) == (604800, 1 << 30)
    assert (settings["keep_alive_s"], settings["max_stall_ms"]) == (20, 1000)
    assert settings["swap_space"] == 0.5


@pytest.mark.parametrize("text", ["17", "0", "-16", "1", "1000000", "x"])
def test_impossible_block_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        BLOCK_SIZE.parse(text)


def error_line(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a mistake on the command line prints."""
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("serve", "--prot", "3"),
            "penstock serve: error: unknown option --prot (did you mean --port?)",
        ),
        (("serve", "--port", "x"), "--port must be between 0 and 65535, not 'x'"),
        (("serve", "--block-size", "17"), "--block-size must be an even number from 2 to"),
        (("serve", "--session-ttl-s", "3w"), "--session-ttl-s must be a number of seconds, or"),
        (("serve", "--dtype", "int3"), "--dtype must be one of auto, bfloat16"),
        (("serve", "--port"), "--port: expected one argument"),
        (("serve", "--api-server-count", "0"), "error: --api-workers must be a whole number, 1 or"),
        (("serve", "--session-ttl-s", "0"), "--session-ttl-s must be a number of seconds, or"),
        (("serve", "--session-ttl-s", "1e300d"), "--session-ttl-s must be a number of seconds"),
        (("serve", "--max-num-seqs", "0"), "--max-num-seqs must be a whole number from 1"),
        (("serve", "--max-num-seqs", "99999999999"), "a whole number from 1 to 1000000"),
        (("serve", "--num-threads", "100000"), "--num-threads must be a whole number from 1 to"),
        (("serve", "a", "b"), "unexpected argument 'b'"),
        (
            ("bench", "serve", "--conurrency", "3"),
            "penstock bench serve: error: unknown option --conurrency (did you mean",
        ),
        (("bench", "serve", "--num-prompts", "x"), "--num-prompts must be a whole number, not 'x'"),
        (("bench", "serve", "--num-prompts=-1s"), "--num-prompts must be a whole number, not"),
        (("bench", "serve", "--transport", "x"), "--transport must be one of sse, websocket, not"),
        (("bench", "servr"), "unknown command 'servr' (did you mean serve?)"),
        (("serve", "--enforce-eager=1"), "takes no value, but got '1'; see penstock serve"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = error_line(*arguments, capsys=capsys)
    assert line in found
    assert found.endswith("--help\n")
    if arguments[:1] == ("serve",):
        assert found.endswith("; see penstock serve --help\n")


def test_a_mistake_in_the_environment_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_BLOCK_SIZE", "17")
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == (
        "penstock: error: PENSTOCK_BLOCK_SIZE must be an even number from 2 to 65536, not '17'; "
        "see penstock serve --help\n"
    )


def test_help_has_groups_units_and_no_raw_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help=all"])
    text = capsys.readouterr().out
    for group in Group:
        assert f"\n{group}:\n" in text
    for shown in ("--max-body-bytes SIZE", "(default: 30d)", "(default: 256M)", "--block-size N"):
        assert shown in " ".join(text.split())
    assert "268435456" not in text
    assert "MAX_BODY_BYTES" not in text


@pytest.mark.parametrize("each", [each for each in SERVE_SETTINGS if each.shown_default])
def test_a_default_is_shown_as_it_can_be_given(each: Setting) -> None:
    assert each.read(each.shown_default, "here") == each.default


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        ({"PENSTOCK_PORT": "http"}, "PENSTOCK_PORT must be between 0 and 65535, not"),
        ({"PENSTOCK_PORT": "70000"}, "must be between 0 and 65535"),
        ({"PENSTOCK_DTYPE": "int3"}, "must be one of"),
        ({"PENSTOCK_API_KEY": ""}, "PENSTOCK_API_KEY must be a key that is not empty"),
        ({"PENSTOCK_API_KEY": "a,,b"}, "PENSTOCK_API_KEY must be a key that is not empty"),
        ({"PENSTOCK_ENFORCE_EAGER": "perhaps"}, "PENSTOCK_ENFORCE_EAGER must be true or false"),
        ({"PENSTOCK_ALLOWED_ORIGINS": "[1]"}, "_ALLOWED_ORIGINS must be an origin such as"),
        ({"PENSTOCK_ALLOWED_ORIGINS": "a.example"}, "_ORIGINS must be an origin such as https://"),
        ({"PENSTOCK_LIMIT_MM_PER_PROMPT": "cats=3"}, "_PROMPT must be image=N with N from 0 to"),
        ({"PENSTOCK_KV_CACHE_MEMORY_BYTES": "inf"}, "must be a size such as 4M or 2GiB"),
        ({"PENSTOCK_ENABLE_CHUNKED_PREFILL": "perhaps"}, "must be true or false"),
        ({"PENSTOCK_CONFIG": "/no/such/file"}, "cannot read"),
        ({"PENSTOCK_PREEMPTION": "perhaps"}, "must be one of auto, swap, recompute"),
        ({"PENSTOCK_SCHEDULING_POLICY": "lottery"}, "must be one of fcfs, priority"),
        ({"PENSTOCK_SESSION_RETENTION_S": "-1"}, "PENSTOCK_SESSION_RETENTION_S must be"),
        ({"PENSTOCK_API_WORKERS": "0"}, "PENSTOCK_API_WORKERS must be"),
        ({"PENSTOCK_API_WORKERS": "2"}, "--api-workers 2 needs --redis-url"),
        ({"PENSTOCK_MAX_CONNECTIONS": "1.5"}, "PENSTOCK_MAX_CONNECTIONS must be"),
        ({"PENSTOCK_SHUTDOWN_GRACE_S": "inf"}, "PENSTOCK_SHUTDOWN_GRACE_S must be"),
        ({"PENSTOCK_SESSION_STORAGE": "perhaps"}, "must be one of required, optional"),
        ({"PENSTOCK_SSL_KEYFILE": "key.pem"}, "--ssl-keyfile needs --ssl-certfile"),
        ({"PENSTOCK_SESSION_RETENTION_S": "nan"}, "PENSTOCK_SESSION_RETENTION_S must be"),
    ],
)
def test_wrong_variables(environment: dict[str, str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        resolve_settings({}, environment)


@pytest.mark.parametrize(
    ("key", "text"),
    [("swap_space", "-1"), ("swap_space", "nan"), ("swap_space", "1e18"),
     ("gpu_memory_utilization", "1.5"), ("gpu_memory_utilization", "nan"),
     ("num_host_blocks", "-1"), ("priority_aging_s", "0"), ("max_lora_rank", "513")],
)  # fmt: skip
def test_a_value_is_checked_wherever_it_comes_from(key: str, text: str, tmp_path: Path) -> None:
    [declared] = [each for each in SERVE_SETTINGS if each.key == key]
    expected = re.escape(declared.kind.expected)
    with pytest.raises(ConfigError, match=f"^{declared.variable} must be {expected}, not"):
        resolve_settings({}, {declared.variable: text})
    file = tmp_path / "file"
    file.write_text(f"{key} = {text}")
    with pytest.raises(ConfigError, match=f"^{declared.name} in the config file must be"):
        resolve_settings({"config": file}, {})
    with pytest.raises(ConfigError, match=f"^{declared.flag} must be {expected}, not"):
        engine_config({key: float(text)})  # as in Python: `LLM(swap_space=-1)`


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("model = 5", "must be a text"),
        ("host = 5", "must be an address, not 5"),
        ("host = {a = 1}", "must be an address"),
        ("port = true", "must be between 0 and 65535, not True"),
        ("served-model-name = ['']", "served-model-name in the config file must be a name that"),
        ("api-key = [1]", "must be a list of texts"),
        ("enforce-eager = 2", "enforce-eager in the config file must be true or false, not 2"),
        ("colour = 1", "unknown in the config file: colour$"),
        ("max-num-seq = 1", r"max_num_seq \(did you mean max-num-seqs\?\)"),
        ("port = ", "is not TOML: Invalid value"),
        (f"port = {'[' * 5000}", "nested too deeply"),
    ],
)
def test_wrong_files(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ConfigError, match=fault):
        resolve_settings({"config": tmp_path / "file"}, {})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"replicas": 0}, "--replicas 0 needs --engine or --discover"),
        ({"discover": True}, "--discover needs --redis-url"),
        ({"engine": ["a:1"]}, "--engine needs --tls-cert and --tls-key and --tls-ca"),
        ({"engine": ["a:1"], "tls_cert": "c", "tls_key": "k"}, "--engine needs --tls-ca: between"),
        ({"ray_address": "auto"}, "--ray-address needs --discover"),
    ],
)
def test_options_about_several_engines_that_do_not_go_together(
    given: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        resolve_settings(given, {})


def test_an_engine_reads_its_own_options_only() -> None:
    environment = {"PENSTOCK_LISTEN": "0.0.0.0:0", "PENSTOCK_PORT": "1"}
    settings = resolve_settings({"max_num_seqs": 3}, environment, settings=ENGINE_SETTINGS)
    assert (settings["listen"], settings["max_num_seqs"]) == ("0.0.0.0:0", 3)
    assert "port" not in settings
    assert "routing" not in settings
    with pytest.raises(ConfigError, match="PENSTOCK_LISTEN must be an address and a port"):
        resolve_settings({}, {"PENSTOCK_LISTEN": "7000"}, settings=ENGINE_SETTINGS)


def test_an_engine_placed_by_ray_gets_what_differs_from_the_defaults() -> None:
    given = {"tls_ca": "/ca", "max_num_seqs": 3, "served_model_name": ["a", "b"], "port": 7}
    settings = json.loads(json.dumps(resolve_settings(given, {})))  # as the process gets them
    environment = environment_of(settings)
    assert environment == {
        "PENSTOCK_TLS_CA": "/ca",
        "PENSTOCK_MAX_NUM_SEQS": "3",
        "PENSTOCK_SERVED_MODEL_NAME": "a,b",
    }
    again = resolve_settings({}, environment, settings=ENGINE_SETTINGS)
    assert again["served_model_name"] == ["a", "b"]
