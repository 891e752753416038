"""The commands of the server: `penstock serve`, `engine`, `status`, `models` and `bench`, which the
script `penstock` of penstock-client runs. `launch.settings` reads their options.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import setproctitle

from penstock.engine.config import DEMO_MODEL, CacheConfig, EngineConfig, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.model_files.packaged_models import PACKAGED_MODELS
from penstock.engine.settings.declaration import Group, settings_of, take_twins
from penstock.gateway.config import MUTUAL_TLS, is_any
from penstock.gateway.launch.arguments import OneLineParser, SettingsParser, add_setting
from penstock.gateway.launch.benches import add_benches
from penstock.gateway.launch.settings import (
    ENGINE_SETTINGS,
    SERVE_SETTINGS,
    engine_config,
    ignored_in_file,
    resolve_settings,
)
from penstock.gateway.launch.vllm_options import NOT_HERE, WITHOUT_EFFECT, without_effect

_USAGE = "%(prog)s [MODEL] [OPTION ...]"
_EPILOG = (
    "Each option is also an environment variable (--max-model-len: PENSTOCK_MAX_MODEL_LEN) and a "
    "key of the --config file (max-model-len = 4096). The command line overrides the environment, "
    "which overrides the file. Sizes and durations are plain numbers or have a unit: 512M, 2GiB, "
    "250ms, 30s, 10m, 12h, 30d."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """A command with its options; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = _parser(has_benches=given[:1] == ["bench"]).parse_args(given)
    try:
        return int(parsed.run(parsed))
    except ConfigError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return 2


class _Note(argparse.Action):
    """Notes an option that has no effect."""

    def __call__(
        self,
        _: argparse.ArgumentParser,
        found: argparse.Namespace,
        __: object,
        option: str | None = None,
    ) -> None:
        setattr(found, self.dest, [*getattr(found, self.dest, []), option])


def parse_engine_config(words: Sequence[str], *, model: str) -> EngineConfig:
    """The engine's part of a `serve` command line, where it names no other model of this one. A
    mistake ends the process with a line that says it."""
    given = vars(_parser().parse_args(["serve", *words]))
    return engine_config(resolve_settings({"model": model, **given}, {}))


def _parser(*, has_benches: bool = False) -> argparse.ArgumentParser:
    parser = OneLineParser(prog="penstock")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=SettingsParser)
    serve = commands.add_parser(
        "serve",
        usage=_USAGE,
        description="Start gateway and engine on this machine.",
        epilog=f"{_EPILOG} Options of vLLM that have no meaning here are accepted, too; the log "
        "names them.",
    )
    serve.add_settings(
        SERVE_SETTINGS,
        model=f"{', '.join(PACKAGED_MODELS)}, a directory, a GGUF file or a Hugging Face Hub id; "
        f"default: {DEMO_MODEL}, which is built in",
    )
    _add_without_effect(serve)
    serve.options_elsewhere = NOT_HERE
    serve.set_defaults(run=_serve)
    engine = commands.add_parser(
        "engine",
        usage=_USAGE,
        description="Start an engine for gateways on other machines (penstock serve --discover).",
        epilog=_EPILOG,
    )
    engine.add_settings(ENGINE_SETTINGS, model="as for penstock serve")
    engine.set_defaults(run=_engine)
    status = commands.add_parser("status", description="Show a server's engines.")
    status.add_argument("--base-url", metavar="URL", default="http://127.0.0.1:8000",
                        help="default: %(default)s")  # fmt: skip
    status.set_defaults(run=_status)
    models = commands.add_parser(
        "models",
        description="Say whether a model would run natively or through transformers, the memory "
        "it needs, and what of it fits here. Nothing is loaded; of a model on the Hub only small "
        "files are fetched. Without MODEL: the models that are on this machine.",
    )
    models.add_argument(
        "model", nargs="?", metavar="MODEL",
        help=f"{', '.join(PACKAGED_MODELS)}, a directory, a GGUF file or a Hub id",
    )  # fmt: skip
    for each in settings_of(ModelConfig, CacheConfig):
        if (each.group is Group.MODEL and each.key != "model") or each.key == "kv_cache_dtype":
            add_setting(models, each)
    models.set_defaults(run=_models)
    text = "Measure parts of penstock on this machine."
    bench = commands.add_parser("bench", description=text)
    if has_benches:  # finding them takes a while
        add_benches(bench)
    return parser


def _add_without_effect(serve: SettingsParser) -> None:
    more: dict[str, Any] = {
        "dest": "without_effect", "action": _Note, "help": argparse.SUPPRESS,
    }  # fmt: skip
    for each in WITHOUT_EFFECT:
        for name in each.switches:
            opposite = (f"--no-{name[2:]}",) if name.startswith("--") else ()
            serve.add_argument(name, *opposite, nargs=0, **more)
        for name in each.options:
            serve.add_argument(name, **more)
        for name in each.lists:
            serve.add_argument(name, nargs="+", **more)
        serve.object_options |= {*each.options, *each.lists}


def _serve(parsed: argparse.Namespace) -> int:
    from penstock.gateway.launch.supervisor import Supervisor

    try:
        settings = resolve_settings(vars(parsed), os.environ)
        engine = engine_config(settings)
        ignored = ignored_in_file(vars(parsed), os.environ)
    except ConfigError as error:
        raise ConfigError(f"{error}; see penstock serve --help") from error
    _hide_secrets(vars(parsed), model=settings["model"])
    unused = without_effect([*getattr(parsed, "without_effect", ()), *ignored])
    return Supervisor(settings, engine, without_effect=unused).run()


def _engine(parsed: argparse.Namespace) -> int:
    from penstock.gateway.launch.supervisor import EngineSupervisor

    try:
        settings = resolve_settings(vars(parsed), os.environ, settings=ENGINE_SETTINGS)
        MUTUAL_TLS.check("penstock engine", settings)
        host, _, port = settings["listen"].rpartition(":")
        settings |= {"host": host.strip("[]"), "port": int(port)}
        if settings["redis_url"] and not settings["advertise"] and is_any(settings["host"]):
            raise ConfigError(f"--listen {settings['listen']} needs --advertise with --redis-url: "
                              "gateways need an address to connect to")  # fmt: skip
        engine = engine_config(settings)
    except ConfigError as error:
        raise ConfigError(f"{error}; see penstock engine --help") from error
    _hide_secrets(vars(parsed), model=settings["model"])
    return EngineSupervisor(settings, engine).run()


def _status(parsed: argparse.Namespace) -> int:
    from penstock.gateway.launch import pool_status  # loads an HTTP client

    return pool_status.show(parsed.base_url)


def _hide_secrets(given: Mapping[str, Any], *, model: str) -> None:
    """Remove secrets from the list of processes and from the children's environment."""
    secret = [each for each in SERVE_SETTINGS if each.is_secret]
    token = given.get("hf_token") or os.environ.get("PENSTOCK_HF_TOKEN")
    if token:
        os.environ["HF_TOKEN"] = token  # as the Hub's client reads it, in the children
    for each in secret:
        os.environ.pop(each.variable, None)
    if any(each.key in given for each in secret):
        name = setproctitle.getthreadtitle()
        setproctitle.setproctitle(f"penstock serve {model} (arguments hidden)")
        setproctitle.setthreadtitle(name)


def _models(parsed: argparse.Namespace) -> int:
    """In a process of its own, which may import torch."""
    given = take_twins(settings_of(ModelConfig), vars(parsed))
    model, cache = ModelConfig.of(given), CacheConfig.of(given)
    settings = {
        "model": {name: getattr(model, name) for name in given if hasattr(model, name)},
        "cache": {"kv_cache_dtype": cache.kv_cache_dtype},
    }
    command = [
        sys.executable,
        "-m",
        "penstock.engine.model_files.model_summary",
        json.dumps(settings),
    ]
    return subprocess.run(command, check=False).returncode  # noqa: S603
