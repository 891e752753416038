"""The commands of the server: `penstock serve`, `engine`, `status`, `models` and `bench`, which the
script `penstock` of penstock-client runs.

Every option of `serve` is also an environment variable (`--max-model-len` is
`PENSTOCK_MAX_MODEL_LEN`) and a key of the TOML file that `--config` names (`max-model-len = 4096`),
or as with vLLM the YAML file.
The command line overrides the environment, and the environment overrides the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import setproctitle

from penstock.engine.config import (
    DEMO_MODEL,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    without_enforce_eager,
)
from penstock.engine.errors import ConfigError
from penstock.engine.model_files.packaged_models import PACKAGED_MODELS
from penstock.gateway.config import is_any
from penstock.gateway.launch import pool_status
from penstock.gateway.launch.arguments import OneLineParser, nearest
from penstock.gateway.launch.benches import add_benches
from penstock.gateway.launch.flags import (
    ENGINE_FLAGS,
    ENGINE_GROUPS,
    FLAGS,
    GROUPS,
    JSON,
    NOT_HERE,
    TEXT,
    WITHOUT_EFFECT,
    Flag,
)

_MODEL_FLAGS = (
    "tokenizer", "tokenizer_revision", "chat_template", "revision", "download_dir", "hf_overrides",
    "rope_scaling", "rope_theta", "model_impl", "trust_remote_code", "dtype", "quantization",
    "max_model_len", "kv_cache_dtype",
)  # fmt: skip
_SERVE_HELP = "see penstock serve --help"


def _key(option: str) -> str:
    """`--max-model-len` → `max_model_len`"""
    return option.lstrip("-").replace("-", "_")


def main(arguments: Sequence[str] | None = None) -> int:
    """A command with its options; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = _parser(has_benches=given[:1] == ["bench"]).parse_args(given)
    try:
        return int(parsed.run(parsed))
    except ConfigError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return 2


class _Extend(argparse.Action):
    """Adds values to a list. A value that is a list itself, as in JSON, stands for its items."""

    def __call__(
        self, _: argparse.ArgumentParser, found: argparse.Namespace, values: Any, __: object = None
    ) -> None:
        items = [each if isinstance(each, list) else [each] for each in values]
        before = getattr(found, self.dest, [])
        setattr(found, self.dest, [*before, *itertools.chain.from_iterable(items)])


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
    if not given.get("model") and "model_option" not in given:
        given["model"] = model
    return engine_config(resolve_settings(given, {}))


def _parser(*, has_benches: bool = False) -> argparse.ArgumentParser:
    parser = OneLineParser(prog="penstock")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        usage="%(prog)s [MODEL] [OPTION ...]",
        description="Start gateway and engine on this machine.",
        epilog="Each option is also an environment variable (--max-model-len: "
        "PENSTOCK_MAX_MODEL_LEN) and a key of the --config file (max-model-len = 4096). The "
        "command line overrides the environment, which overrides the file. Sizes and durations "
        "are plain numbers or have a unit: 512M, 2GiB, 250ms, 30s, 10m, 12h, 30d. Options of vLLM "
        "that have no meaning here are accepted, too; the log names them.",
        argument_default=argparse.SUPPRESS,  # tells what was given from what was not
    )
    serve.add_argument(
        "model", nargs="?", metavar="MODEL",
        help=f"{', '.join(PACKAGED_MODELS)}, a directory, a GGUF file or a Hugging Face Hub id; "
        f"default: {DEMO_MODEL}, which is built in",
    )  # fmt: skip
    serve.add_argument("--model", dest="model_option", metavar="MODEL", help="the same as MODEL")
    serve.add_argument("--config", type=Path, metavar="FILE", help="a TOML or YAML file of options")
    for title, flags in GROUPS.items():
        group = serve.add_argument_group(title)
        for flag in flags:
            _add_flag(group, flag)
    _add_without_effect(serve)
    serve.object_options = frozenset(
        ["--limit-mm-per-prompt"]
        + [name for each in WITHOUT_EFFECT for name in (*each.options, *each.lists)]
        + [f"--{flag.name}" for flag in FLAGS if flag.kind is JSON]
    )
    serve.options_elsewhere = NOT_HERE
    serve.set_defaults(run=_serve)
    engine = commands.add_parser(
        "engine",
        usage="%(prog)s [MODEL] [OPTION ...]",
        description="Start an engine for gateways on other machines (penstock serve --discover).",
        argument_default=argparse.SUPPRESS,
    )
    engine.add_argument("model", nargs="?", metavar="MODEL", help="as for penstock serve")
    engine.add_argument("--config", type=Path, metavar="FILE", help="a TOML file of options")
    for title, flags in ENGINE_GROUPS.items():
        group = engine.add_argument_group(title)
        for flag in flags:
            _add_flag(group, flag)
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
        argument_default=argparse.SUPPRESS,
    )
    models.add_argument(
        "model", nargs="?", metavar="MODEL",
        help=f"{', '.join(PACKAGED_MODELS)}, a directory, a GGUF file or a Hub id",
    )  # fmt: skip
    for flag in FLAGS:
        if flag.key in _MODEL_FLAGS:
            _add_flag(models, flag)
    models.set_defaults(run=_models)
    text = "Measure parts of penstock on this machine."
    bench = commands.add_parser("bench", description=text)
    if has_benches:  # finding them takes a while
        add_benches(bench)
    return parser


def _add_flag(group: argparse._ArgumentGroup | argparse.ArgumentParser, flag: Flag) -> None:
    text = flag.help
    if flag.default not in (None, ()):
        shown = flag.kind.show(flag.default)
        text += f" (default: {shown.lower() if isinstance(flag.default, bool) else shown})"
    names = (f"--{flag.name}", *flag.aliases)
    if isinstance(flag.default, bool):
        group.add_argument(*names, action=argparse.BooleanOptionalAction, help=text)
        return
    metavar = f"{{{','.join(flag.choices)}}}" if flag.choices else flag.kind.metavar
    more: dict[str, Any] = {"action": _Extend, "nargs": "+"} if flag.is_list else {}
    group.add_argument(*names, type=_reader(flag), metavar=metavar, help=text, **more)


def _add_without_effect(serve: argparse.ArgumentParser) -> None:
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


def _reader(flag: Flag) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return flag.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(_fault(flag, text)) from error

    return read


def _fault(flag: Flag, value: object) -> str:
    """What is wrong with a value; a secret's is not shown."""
    text = f"must be {flag.expected}"
    return text if flag.is_secret else f"{text}, not {value!r}"


def resolve_settings(
    given: Mapping[str, Any], environment: Mapping[str, str], *, flags: Sequence[Flag] = FLAGS
) -> dict[str, Any]:
    """Every option's value: from the command line, the environment, the file, or its default.

    Args:
        given: what the command line set, `model` and `config` included.

    Raises:
        ConfigError: the file has an unknown key, or a value is wrong.
    """
    file = _read_file(given.get("config") or environment.get("PENSTOCK_CONFIG"))
    known = {flag.key for flag in flags} | {"model"}
    unknown = sorted(set(file) - known - _NOT_SETTINGS.keys())
    if unknown:
        names = (flag.name for flag in flags)
        hint = nearest(unknown[0].replace("_", "-"), names)
        raise ConfigError(f"unknown in the config file: {', '.join(unknown)}{hint}")
    model = _one_model(given) or environment.get("PENSTOCK_MODEL") or file.get("model")
    if model is None:
        _check_lists(given, flags)
    settings: dict[str, Any] = {"model": DEMO_MODEL if model is None else model}
    for flag in flags:
        if flag.key in given:
            settings[flag.key] = given[flag.key]
        elif flag.variable in environment:
            settings[flag.key] = _read(flag, environment[flag.variable], flag.variable)
        elif flag.key in file:
            settings[flag.key] = _read(flag, file[flag.key], f"{flag.name} in the config file")
        else:
            settings[flag.key] = flag.default
    _check_names(settings)
    if flags is FLAGS:
        _check(settings)
    return settings


def _one_model(given: Mapping[str, Any]) -> str | None:
    """The model of the command line."""
    model, option = given.get("model"), given.get("model_option")
    if model and option and model != option:
        raise ConfigError(f"MODEL is {model!r}, but --model is {option!r}")
    return model or option


def _check_lists(given: Mapping[str, Any], flags: Sequence[Flag]) -> None:
    """Refuse a command line without a model, of which a list seems to have taken it.

    Raises:
        ConfigError: names the list.
    """
    for flag in flags:
        values: Sequence[str] = given.get(flag.key, ()) if flag.is_list else ()
        if len(values) > 1 and _looks_like_a_model(values[-1]):
            shown = "the last one" if flag.is_secret else repr(values[-1])
            raise ConfigError(
                f"--{flag.name} takes all values that follow it, and {shown} looks like the model: "
                "name the model first, or by --model"
            )


def _looks_like_a_model(text: str) -> bool:
    if re.fullmatch(r"[\w./~-]*/[\w.-]+|[\w.-]+\.gguf", text):
        return True
    return text in PACKAGED_MODELS and text != DEMO_MODEL  # which would be served anyway


def _check_names(settings: Mapping[str, Any]) -> None:
    if not isinstance(settings["model"], str) or not settings["model"]:
        raise ConfigError(f"model in the config file must be a text, not {settings['model']!r}")
    if not all(name.strip() for name in settings["served_model_name"]):
        raise ConfigError("--served-model-name is empty")


def _check(settings: Mapping[str, Any]) -> None:
    if not all(key.strip() for key in settings["api_key"]):
        raise ConfigError("--api-key is empty: every caller would match it")
    if settings["api_workers"] > 1 and settings["redis_url"] is None:
        raise ConfigError(
            f"--api-workers {settings['api_workers']} needs --redis-url: gateways share their "
            "state through Redis"
        )
    if settings["ssl_certfile"] is None and settings["ssl_keyfile"] is not None:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile")
    _check_pool(settings)


_TLS = ("tls_cert", "tls_key", "tls_ca")


def _check_pool(settings: Mapping[str, Any]) -> None:
    """Check the options about several engines."""
    is_remote = settings["discover"] or settings["engine"]
    if settings["discover"] and settings["redis_url"] is None:
        raise ConfigError("--discover needs --redis-url: engines register in Redis")
    if settings["ray_address"] is not None and not settings["discover"]:
        raise ConfigError("--ray-address needs --discover: Ray's engines register in Redis")
    most = settings["max_replicas"]
    if most is not None and settings["ray_address"] is None:
        raise ConfigError("--max-replicas needs --ray-address: elsewhere an autoscaler decides")
    if most is not None and not 0 < settings["replicas"] <= most:
        raise ConfigError(
            f"--max-replicas {most} must be at least --replicas {settings['replicas']}, and that 1"
        )
    if settings["replicas"] == 0 and not is_remote:
        raise ConfigError("--replicas 0 needs --engine or --discover: there would be no engine")
    if is_remote:
        _check_tls(settings, "--discover" if settings["discover"] else "--engine")


def _check_tls(settings: Mapping[str, Any], what: str) -> None:
    if missing := [f"--{name.replace('_', '-')}" for name in _TLS if settings[name] is None]:
        raise ConfigError(
            f"{what} needs {' and '.join(missing)}: between machines there is only mutual TLS"
        )


_ALIASES = {_key(alias): flag.key for flag in FLAGS for alias in flag.aliases}
_NOT_SETTINGS = {_key(name): name for each in WITHOUT_EFFECT for name in each.names}


def _read_file(path: Path | str | None) -> dict[str, Any]:
    if path is None:
        return {}
    if Path(path).suffix in (".yaml", ".yml"):
        values = _read_yaml(Path(path))
        return {_ALIASES.get(_key(name), _key(name)): value for name, value in values.items()}
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config file {path} is not TOML: {error}") from error
    except (ValueError, RecursionError) as error:
        kind = "nested too deeply" if isinstance(error, RecursionError) else "not UTF-8"
        raise ConfigError(f"the config file {path} is {kind}") from error
    return {_ALIASES.get(_key(name), _key(name)): value for name, value in values.items()}


def _read_yaml(path: Path) -> dict[str, Any]:
    """A configuration in YAML, as for vLLM; a null counts as absent."""
    import yaml  # type: ignore[import-untyped]  # `huggingface_hub` needs it, too

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the config file {path} is not YAML: {reason}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} is not a mapping of options")
    return {str(name): value for name, value in values.items() if value is not None}


def _read(flag: Flag, value: Any, source: str) -> Any:
    try:
        if isinstance(flag.default, bool):
            return _read_bool(value)
        if flag.is_list:
            return _read_list(flag, value)
        if isinstance(value, dict) and flag.kind in (JSON, TEXT):
            value = json.dumps(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(value, str) and (flag.kind.parse is str or not is_number):
            raise ValueError(value)
        return flag.parse(str(value))
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{source} {_fault(flag, value)}") from error


def _read_list(flag: Flag, value: Any) -> list[str]:
    is_json = isinstance(value, str) and value.startswith(("{", "["))
    items = value if isinstance(value, list) else [value] if is_json else value.split(",")
    if flag.kind.parse is not str:
        items = [json.dumps(item) if isinstance(item, dict) else item for item in items]
    if not all(isinstance(item, str) for item in items):
        raise ValueError(value)
    parsed = [flag.parse(item.strip()) for item in items]
    return [*itertools.chain.from_iterable(each if isinstance(each, list) else [each]
                                           for each in parsed)]  # fmt: skip


def _read_bool(value: Any) -> bool:
    text = str(value).lower()
    if text not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        raise ValueError(text)
    return text in ("1", "true", "yes", "on")


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """The engine's sections of all settings."""
    settings = without_enforce_eager(settings)
    return EngineConfig(
        model=_section(ModelConfig, settings),
        cache=_section(CacheConfig, settings),
        scheduler=_section(SchedulerConfig, settings),
        device=_section(DeviceConfig, settings),
        lora=_section(LoraConfig, settings),
    )


def _section(kind: type[Any], settings: Mapping[str, Any]) -> Any:
    return kind(**{name: settings[name] for name in kind.__slots__ if name in settings})


def _serve(parsed: argparse.Namespace) -> int:
    from penstock.gateway.launch.supervisor import Supervisor

    try:
        settings = resolve_settings(vars(parsed), os.environ)
        engine = engine_config(settings)
    except ConfigError as error:
        raise ConfigError(f"{error}; {_SERVE_HELP}") from error
    _hide_secrets(vars(parsed), model=settings["model"])
    unused = without_effect([*getattr(parsed, "without_effect", ()), *_ignored_in_file(parsed)])
    return Supervisor(settings, engine, without_effect=unused).run()


def _ignored_in_file(parsed: argparse.Namespace) -> list[str]:
    """Options of the config file that have no effect."""
    file = _read_file(getattr(parsed, "config", None) or os.environ.get("PENSTOCK_CONFIG"))
    return [_NOT_SETTINGS[key] for key in file if key in _NOT_SETTINGS]


def without_effect(options: Iterable[str]) -> list[str]:
    """Options of the command line that have no effect, each group with the reason."""
    given = dict.fromkeys(options)
    found = []
    for each in WITHOUT_EFFECT:
        known = {name: None for name in given if _without_no(name) in each.names}
        if known:
            found.append(f"{', '.join(known)} ({each.why})")
    return found


def _without_no(name: str) -> str:
    return f"--{name[5:]}" if name.startswith("--no-") else name


def _engine(parsed: argparse.Namespace) -> int:
    from penstock.gateway.launch.supervisor import EngineSupervisor

    try:
        settings = resolve_settings(vars(parsed), os.environ, flags=ENGINE_FLAGS)
        _check_tls(settings, "penstock engine")
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
    return pool_status.show(parsed.base_url)


def _hide_secrets(given: Mapping[str, Any], *, model: str) -> None:
    """Remove secrets from the list of processes and from the children's environment."""
    secret = [flag for flag in FLAGS if flag.is_secret]
    token = given.get("hf_token") or os.environ.get("PENSTOCK_HF_TOKEN")
    if token:
        os.environ["HF_TOKEN"] = token  # as the Hub's client reads it, in the children
    for flag in secret:
        os.environ.pop(flag.variable, None)
    if any(flag.key in given for flag in secret):
        name = setproctitle.getthreadtitle()
        setproctitle.setproctitle(f"penstock serve {model} (arguments hidden)")
        setproctitle.setthreadtitle(name)


def _models(parsed: argparse.Namespace) -> int:
    """In a process of its own, which may import torch."""
    given = {name: value for name, value in vars(parsed).items() if name != "run"}
    model, cache = _section(ModelConfig, given), _section(CacheConfig, given)
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
