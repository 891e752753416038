"""The command line: `penstock serve`, `penstock chat` and `penstock bench`.

Every flag of `serve` is also an environment variable (`--max-model-len` is
`PENSTOCK_MAX_MODEL_LEN`) and a key of a TOML file given by `--config` (`max-model-len = 4096`).
The command line wins over the environment, and that over the file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import setproctitle

from penstock.engine.config import (
    DEMO_MODEL,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.errors import ConfigError
from penstock.gateway.launch.flags import FLAGS, Flag
from penstock.load.bench.commands import add_benches


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
    if settings["api_workers"] > 1 and settings["redis_url"] is None:
        raise ConfigError(
            f"--api-workers {settings['api_workers']} needs --redis-url: several gateways share "
            "their state"
        )
    if settings["ssl_certfile"] is None and settings["ssl_keyfile"] is not None:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile")


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
        told = "" if flag.is_secret else f": {value!r}"
        raise ConfigError(f"{source} has no sense{told}") from error
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
    from penstock.gateway.launch.supervisor import Supervisor

    settings = resolve_settings(vars(parsed), os.environ)
    _hide_secrets(vars(parsed), model=settings["model"])
    return Supervisor(settings, engine_config(settings)).run()


def _hide_secrets(given: Mapping[str, Any], *, model: str) -> None:
    """Take what is secret off the list of processes, and out of the children's environment."""
    secret = [flag for flag in FLAGS if flag.is_secret]
    for flag in secret:
        os.environ.pop(flag.variable, None)
    if any(flag.key in given for flag in secret):
        name = setproctitle.getthreadtitle()
        setproctitle.setproctitle(f"penstock serve {model} (arguments hidden)")
        setproctitle.setthreadtitle(name)


def _chat(parsed: argparse.Namespace) -> int:
    from penstock.clients.python import terminal_chat

    key = parsed.api_key or os.environ.get("PENSTOCK_API_KEY", "").split(",")[0].strip() or None
    return terminal_chat.run(parsed.base_url, api_key=key, model=parsed.model)
