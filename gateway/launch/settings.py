"""Which settings each command has, and how they are read: every one is also an environment variable
(`--max-model-len` is `PENSTOCK_MAX_MODEL_LEN`) and a key of the TOML file that `--config` names
(`max-model-len = 4096`), or as with vLLM the YAML file.

The command line overrides the environment, and the environment overrides the file.
`engine.settings.declaration` says how a setting is declared.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engine import config
from penstock.engine.config import DEMO_MODEL, EngineConfig
from penstock.engine.errors import ConfigError
from penstock.engine.model_files.packaged_models import PACKAGED_MODELS
from penstock.engine.settings.declaration import (
    Setting,
    key_of,
    settings_of,
    take_twins,
    variable_of,
)
from penstock.gateway.config import GatewayConfig, SharedConfig
from penstock.gateway.launch.arguments import nearest
from penstock.gateway.launch.config import EngineLaunchConfig, ServeConfig, check_replicas
from penstock.gateway.launch.vllm_options import WITHOUT_EFFECT

_OF_ENGINE = tuple(config.SECTIONS.values())
SERVE = (*_OF_ENGINE, ServeConfig, GatewayConfig)
ENGINE = (*_OF_ENGINE, EngineLaunchConfig, SharedConfig)
SERVE_SETTINGS, ENGINE_SETTINGS = settings_of(*SERVE), settings_of(*ENGINE)

_NOT_SETTINGS = {key_of(name): name for each in WITHOUT_EFFECT for name in each.names}


class _Found(NamedTuple):
    """A value that somebody set.

    Attributes:
        source: where, for a message; None: on the command line, which was checked.
    """

    value: Any
    source: str | None


def resolve_settings(
    given: Mapping[str, Any],
    environment: Mapping[str, str],
    *,
    settings: Sequence[Setting] = SERVE_SETTINGS,
) -> dict[str, Any]:
    """Every setting's value by key: from the command line, the environment, the file, or its
    default.

    Args:
        given: what the command line set, and `config`.

    Raises:
        ConfigError: the file has an unknown key, a value is wrong, or settings do not go together.
    """
    file = _read_file(given, environment, settings)
    _refuse_unknown(file, settings)

    def find(key: str) -> _Found | None:
        places = (
            (given, key, None),
            (environment, variable_of(key), variable_of(key)),
            (file, key, f"{key.replace('_', '-')} in the config file"),
        )
        for values, name, source in places:
            if name in values and (values[name] != "" or key != "model"):  # nor is "" a model
                return _Found(values[name], source)
        return None

    if find("model") is None:
        _check_lists(given, settings)
    values: dict[str, Any] = {}
    for each in _with_twins(settings):
        found = find(each.key)
        if found is None:
            values[each.key] = each.default
        elif found.source is None:
            values[each.key] = found.value
        else:
            values[each.key] = each.read(found.value, found.source)
    values = take_twins(settings, values)
    if "replicas" in values:
        check_replicas(values)
    for each in settings:
        each.check_needs(values)
    return values


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """The engine's sections of all settings."""
    sections: dict[str, Any] = {name: kind.of(settings) for name, kind in config.SECTIONS.items()}
    return EngineConfig(**sections)


def ignored_in_file(given: Mapping[str, Any], environment: Mapping[str, str]) -> list[str]:
    """Options of the config file that have no effect; the arguments are those of
    `resolve_settings`."""
    file = _read_file(given, environment, SERVE_SETTINGS)
    return [_NOT_SETTINGS[key] for key in file if key in _NOT_SETTINGS]


def _refuse_unknown(file: Mapping[str, Any], settings: Sequence[Setting]) -> None:
    names = [each.name for each in _with_twins(settings)]
    unknown = sorted(file.keys() - set(map(key_of, names)) - _NOT_SETTINGS.keys())
    if unknown:
        hint = nearest(unknown[0].replace("_", "-"), names)
        raise ConfigError(f"unknown in the config file: {', '.join(unknown)}{hint}")


def _with_twins(settings: Iterable[Setting]) -> Iterator[Setting]:
    for each in settings:
        yield from (each, *each.twins)


def _check_lists(given: Mapping[str, Any], settings: Sequence[Setting]) -> None:
    """Refuse a command line without a model, of which a list seems to have taken it.

    Raises:
        ConfigError: names the list.
    """
    for each in settings:
        values: Sequence[str] = given.get(each.key, ()) if each.is_list else ()
        if len(values) > 1 and _looks_like_a_model(values[-1]):
            shown = "the last one" if each.is_secret else repr(values[-1])
            raise ConfigError(
                f"{each.flag} takes all values that follow it, and {shown} looks like the model: "
                "name the model first, or by --model"
            )


def _looks_like_a_model(text: str) -> bool:
    if re.fullmatch(r"[\w./~-]*/[\w.-]+|[\w.-]+\.gguf", text):
        return True
    return text in PACKAGED_MODELS and text != DEMO_MODEL  # which would be served anyway


def _read_file(
    given: Mapping[str, Any], environment: Mapping[str, str], settings: Sequence[Setting]
) -> dict[str, Any]:
    """The configuration file's values by key; without a file none.

    Raises:
        ConfigError: it cannot be read, or is no TOML or YAML.
    """
    path = given.get("config") or environment.get(variable_of("config"))
    if path is None:
        return {}
    read = _read_yaml if Path(path).suffix in (".yaml", ".yml") else _read_toml
    aliases = {key_of(alias): each.key for each in settings for alias in each.aliases}
    return {aliases.get(key_of(name), key_of(name)): value for name, value in read(path).items()}


def _read_toml(path: Path | str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the config file {path} is not TOML: {error}") from error
    except (ValueError, RecursionError) as error:
        kind = "nested too deeply" if isinstance(error, RecursionError) else "not UTF-8"
        raise ConfigError(f"the config file {path} is {kind}") from error


def _read_yaml(path: Path | str) -> dict[str, Any]:
    """A configuration in YAML, as for vLLM; a null counts as absent."""
    import yaml  # type: ignore[import-untyped]  # `huggingface_hub` needs it, too

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise ConfigError(f"cannot read the config file {path}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the config file {path} is not YAML: {reason}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the config file {path} is not a mapping of options")
    return {str(name): value for name, value in values.items() if value is not None}
