"""The command line: `penstock serve`, `penstock chat` and `penstock bench`.

Every flag of `serve` is also an environment variable (`--max-model-len` is
`PENSTOCK_MAX_MODEL_LEN`) and a key of a TOML file given by `--config` (`max-model-len = 4096`).
The command line wins over the environment, and that over the file.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.config import (
    DEMO_MODEL,
    DTYPES,
    QUANTIZATIONS,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.errors import ConfigError
from penstock.load.benches import add_benches

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """A size such as `512M`, `2GiB` or `1000`; binary multiples.

    Raises:
        ValueError: it is no size.
    """
    digits = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = digits[-1:] if digits[-1:] in _SIZES else ""
    size = float(digits.removesuffix(unit)) * _SIZES[unit]
    if not 1 <= size < math.inf:
        raise ValueError(f"{text!r} is not a size")
    return int(size)


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting of `serve`: its flag, how its text is read, and where it belongs."""

    name: str
    default: Any
    help: str
    parse: Callable[[str], Any] = str
    choices: tuple[str, ...] = ()
    is_list: bool = False

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def variable(self) -> str:
        return "PENSTOCK_" + self.key.upper()


_MODEL, _CACHE, _SCHEDULER = ModelConfig(), CacheConfig(), SchedulerConfig()

FLAGS: tuple[Flag, ...] = (
    # where it listens and whom it lets in
    Flag("host", "127.0.0.1", "address to listen on; the default takes only this machine"),
    Flag("port", 8000, "port to listen on; 0 takes a free one", int),
    Flag("api-key", (), "a key that callers must send; may be repeated", is_list=True),
    Flag("allowed-origins", (), "browser origins let in besides the server's own; may be "
         "repeated, * for all", is_list=True),
    Flag("served-model-name", (), "name(s) of the model in the API; default: MODEL as given",
         is_list=True),
    Flag("trust-request-chat-template", False, "let requests bring their own chat template"),
    Flag("max-body-bytes", 4 << 20, "largest request body", parse_bytes),
    Flag("session-store-bytes", 256 << 20, "memory for stored responses", parse_bytes),
    Flag("session-retention-s", 600.0, "seconds for which the KV of a stored response is preferred "
         "to other cached KV; 0: not at all", float),
    Flag("log-level", "info", "least severe messages logged",
         choices=("debug", "info", "warning", "error")),
    # the model
    Flag("revision", None, "branch, tag or commit of a model on the Hub"),
    Flag("dtype", _MODEL.dtype, "type of weights and activations", choices=DTYPES),
    Flag("quantization", _MODEL.quantization, "int8: weights of the layers in a byte each, faster "
         "and a little less exact (CPU only)", choices=QUANTIZATIONS),
    Flag("load-format", _MODEL.load_format, "dummy: random weights, for measuring",
         choices=("auto", "dummy")),
    Flag("max-model-len", None, "context in tokens; default: the model's own", int),
    Flag("generation-config", _MODEL.generation_config,
         "auto: sampling defaults and EOS from generation_config.json", choices=("auto", "none")),
    # memory
    Flag("block-size", _CACHE.block_size, "tokens in a KV block", int),
    Flag("kv-cache-memory-bytes", None, "memory for KV blocks, as 512M or 2GiB; default: a share "
         "of what is free", parse_bytes),
    Flag("gpu-memory-utilization", _CACHE.gpu_memory_utilization,
         "share of a GPU's memory to use in all", float),
    Flag("num-blocks", None, "KV blocks, instead of a size in bytes", int),
    Flag("enable-prefix-caching", _CACHE.enable_prefix_caching,
         "share KV between requests whose tokens begin alike"),
    Flag("swap-space", None, "GiB of host memory for KV that the device has no room for, 0: none; "
         "default: a moderate share of what is free", float),
    Flag("num-host-blocks", None, "KV blocks in host memory, instead of --swap-space", int),
    # scheduling
    Flag("max-num-seqs", _SCHEDULER.max_num_seqs, "sequences running at once", int),
    Flag("max-num-batched-tokens", _SCHEDULER.max_num_batched_tokens,
         "tokens computed in one step", int),
    Flag("enable-chunked-prefill", _SCHEDULER.enable_chunked_prefill,
         "compute a long prompt over several steps"),
    Flag("preemption", _SCHEDULER.preemption, "what becomes of a sequence's KV when blocks run "
         "out; auto: what costs less", choices=("auto", "swap", "recompute")),
    Flag("scheduling-policy", _SCHEDULER.scheduling_policy,
         "fcfs: by arrival; priority: by the requests' priority first",
         choices=("fcfs", "priority")),
    Flag("priority-aging-s", _SCHEDULER.priority_aging_s,
         "seconds of waiting that move a request up by one priority", float),
    # the device
    Flag("device", "auto", "where the model runs", choices=("auto", "cpu", "cuda")),
    Flag("deterministic", False, "results do not depend on what else is computed: batch, chunks, "
         "preemption, caches (CPU only)"),
    Flag("num-threads", None, "CPU threads of the engine; default: one a core", int),
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """The `penstock` command; its exit code."""
    parsed = _parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except ConfigError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock", description="An LLM serving system.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="start a server",
        description="Start gateway and engine on this machine.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        argument_default=argparse.SUPPRESS,  # so that what was not given can be told apart
    )
    serve.add_argument("model", nargs="?", metavar="MODEL", help=f"a directory or a Hugging Face "
                       f"Hub id; without one, the built-in model {DEMO_MODEL!r}")  # fmt: skip
    serve.add_argument("--config", type=Path, help="a TOML file of flags")
    for flag in FLAGS:
        _add_flag(serve, flag)
    serve.set_defaults(run=_serve)
    chat = commands.add_parser("chat", help="chat with a server in the terminal")
    chat.add_argument("--base-url", default="http://127.0.0.1:8000", help="default: %(default)s")
    chat.add_argument("--api-key", help="default: the first in PENSTOCK_API_KEY")
    chat.add_argument("--model", help="default: the server's first")
    chat.set_defaults(run=_chat)
    text = "measure parts of penstock on this machine"
    add_benches(commands.add_parser("bench", help=text, description=f"{text.capitalize()}."))
    return parser


def _add_flag(parser: argparse.ArgumentParser, flag: Flag) -> None:
    text = flag.help if flag.default in (None, ()) else f"{flag.help} (default: {flag.default})"
    if isinstance(flag.default, bool):
        parser.add_argument(f"--{flag.name}", action=argparse.BooleanOptionalAction, help=text)
    elif flag.is_list:
        parser.add_argument(f"--{flag.name}", action="append", help=text)
    else:
        parser.add_argument(
            f"--{flag.name}", type=flag.parse, choices=flag.choices or None, help=text
        )


def resolve_settings(given: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Every flag's value: from the command line, the environment, the file, or its default.

    Args:
        given: what the command line said, `model` and `config` included.

    Raises:
        ConfigError: a key of the file that is none of ours, or a value that has no sense.
    """
    file = _read_file(given.get("config") or environment.get("PENSTOCK_CONFIG"))
    known = {flag.key for flag in FLAGS} | {"model"}
    unknown = sorted(set(file) - known)
    if unknown:
        raise ConfigError(f"the config file has unknown keys: {', '.join(unknown)}")
    settings: dict[str, Any] = {
        "model": given.get("model")
        or environment.get("PENSTOCK_MODEL")
        or file.get("model", DEMO_MODEL)
    }
    for flag in FLAGS:
        if flag.key in given:
            settings[flag.key] = given[flag.key]
        elif flag.variable in environment:
            settings[flag.key] = _read(flag, environment[flag.variable], flag.variable)
        elif flag.key in file:
            settings[flag.key] = _read(flag, file[flag.key], f"{flag.name} in the config file")
        else:
            settings[flag.key] = flag.default
    _check(settings)
    return settings


def _check(settings: Mapping[str, Any]) -> None:
    if not isinstance(settings["model"], str):
        raise ConfigError(f"model in the config file must be a text, not {settings['model']!r}")
    if not all(key.strip() for key in settings["api_key"]):
        raise ConfigError("--api-key is empty: anybody would have it")
    if not 0 <= settings["port"] < 1 << 16:
        raise ConfigError(f"--port {settings['port']} is not between 0 and 65535")
    if not 0 <= settings["session_retention_s"] < math.inf:
        raise ConfigError("--session-retention-s must be a number of seconds, 0 or more")


def _read_file(path: Path | str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the config file {path}: {error}") from error
    return {key.replace("-", "_"): value for key, value in values.items()}


def _read(flag: Flag, value: Any, source: str) -> Any:
    try:
        if isinstance(flag.default, bool):
            return _read_bool(value)
        if flag.is_list:
            return _read_list(value)
        result = flag.parse(str(value))
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{source} has no sense: {value!r}") from error
    if flag.choices and result not in flag.choices:
        raise ConfigError(f"{source} must be one of {', '.join(flag.choices)}, not {value!r}")
    return result


def _read_list(value: Any) -> list[str]:
    items = value if isinstance(value, list) else value.split(",")
    if not all(isinstance(item, str) for item in items):
        raise ValueError(value)
    return [item.strip() for item in items]


def _read_bool(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError(text)
    return text in ("1", "true", "yes", "on")


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """The engine's sections out of all settings."""
    return EngineConfig(
        model=_section(ModelConfig, settings),
        cache=_section(CacheConfig, settings),
        scheduler=_section(SchedulerConfig, settings),
        device=_section(DeviceConfig, settings),
    )


def _section(kind: type[Any], settings: Mapping[str, Any]) -> Any:
    return kind(**{name: settings[name] for name in kind.__slots__ if name in settings})


def _serve(parsed: argparse.Namespace) -> int:
    from penstock.gateway.supervisor import Supervisor

    settings = resolve_settings(vars(parsed), os.environ)
    return Supervisor(settings, engine_config(settings)).run()


def _chat(parsed: argparse.Namespace) -> int:
    from penstock.clients.python import terminal_chat

    key = parsed.api_key or os.environ.get("PENSTOCK_API_KEY", "").split(",")[0].strip() or None
    return terminal_chat.run(parsed.base_url, api_key=key, model=parsed.model)
