"""How a setting is declared: once, at its field of a configuration.

    max_num_seqs: int = setting(128, Group.SCHEDULING, "sequences running at once", whole(1, 10**6))

From this come the option of the command line (`--max-num-seqs`), the environment variable
(`PENSTOCK_MAX_NUM_SEQS`), the key of the configuration file (`max-num-seqs`), the help, the row in
`gateway/OPTIONS.md`, and the check of its values, wherever they come from: a `Section` refuses
others. `gateway.launch.settings` says which configurations a command has, and reads them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast

from penstock.engine.errors import ConfigError
from penstock.engine.settings.kinds import TEXT, Kind, parse_bool

T = TypeVar("T")
_NONE: Mapping[str, Any] = MappingProxyType({})


class Group(StrEnum):
    """The groups of settings, in the order in which `--help` shows them."""

    MODEL = "model"
    LISTEN = "listen"
    SECURITY = "security"
    MEMORY = "memory"
    SCHEDULING = "scheduling"
    ADAPTERS = "adapters"
    ENGINES = "several engines"
    SESSIONS = "sessions"
    REDIS = "Redis"
    LOGGING = "logging"


class Need(NamedTuple):
    """What a setting needs beside it, unless it has its default.

    Attributes:
        keys: of the settings that must be there.
        why: for the message.
    """

    keys: tuple[str, ...]
    why: str = ""

    def check(self, what: str, values: Mapping[str, Any]) -> None:
        """
        Args:
            what: needs them, for the message.

        Raises:
            ConfigError: some are not there.
        """
        if missing := [flag_of(key) for key in self.keys if not values[key]]:
            why = f": {self.why}" if self.why else ""
            raise ConfigError(f"{what} needs {' and '.join(missing)}{why}")


class Part(NamedTuple):
    """A key of a JSON object, and the kind of its value."""

    key: str
    kind: Kind = TEXT


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A declared setting.

    Attributes:
        field: of the configuration.
        name: of the option, without its hyphens, and in the configuration file.
        aliases: other options that mean the same, with their hyphens: vLLM's names.
        spellings: other texts for a value.
        switches: names of options without a value, and the values of this one that they stand for.
        parts: of an object: names of options, and the keys that they set.
        is_daily: `--help` shows it; the others are shown by `--help=all`.
        is_secret: its text is in no message, and in no list of processes.
    """

    default: Any
    group: Group
    help: str
    kind: Kind
    field: str = ""
    name: str = ""
    aliases: tuple[str, ...] = ()
    spellings: Mapping[str, str]
    switches: Mapping[str, Any]
    parts: Mapping[str, Part]
    needs: tuple[Need, ...] = ()
    is_daily: bool = False
    is_secret: bool = False

    @property
    def key(self) -> str:
        return key_of(self.name)

    @property
    def flag(self) -> str:
        return f"--{self.name}"

    @property
    def options(self) -> tuple[str, ...]:
        """All that the command line has for it."""
        return (self.flag, *self.aliases, *(twin.flag for twin in self.twins))

    @property
    def twins(self) -> tuple[Setting, ...]:
        """Settings that `take_twins` makes values of this one."""
        kinds: dict[str, tuple[Any, Kind]] = dict.fromkeys(self.switches, (False, TEXT))
        kinds |= {name: (None, part.kind) for name, part in self.parts.items()}
        plain = replace(self, aliases=(), spellings=_NONE, switches=_NONE, parts=_NONE, needs=())
        return tuple(
            replace(plain, name=name, default=default, kind=kind)
            for name, (default, kind) in kinds.items()
        )

    @property
    def variable(self) -> str:
        return variable_of(self.key)

    @property
    def is_list(self) -> bool:
        """Whether several values may follow the option, and it may be repeated."""
        return isinstance(self.default, tuple)

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def shown_default(self) -> str:
        """As `--help` shows it, and a user may write it; empty if there is none."""
        if self.default in (None, ()):
            return ""
        return str(self.default).lower() if self.is_switch else self.kind.show(self.default)

    @property
    def meanings(self) -> dict[str, str]:
        """Of its twins' options: the value or the key of an object that each stands for."""
        switches = {f"--{name}": str(value) for name, value in self.switches.items()}
        return switches | {f"--{name}": part.key for name, part in self.parts.items()}

    def fault(self, value: object, expected: str | None = None) -> str:
        """What is wrong with a value; a secret's is not shown."""
        text = f"must be {expected or ('true or false' if self.is_switch else self.kind.expected)}"
        return text if self.is_secret else f"{text}, not {value!r}"

    def parse(self, text: str) -> Any:
        """
        Raises:
            ValueError: the text is no value of this setting.
        """
        return self.kind.parse(self.spellings.get(text, text))

    def read(self, value: Any, source: str) -> Any:
        """A value from the environment or a file.

        Args:
            source: where it is from, for the message.

        Raises:
            ConfigError: it is no value of this setting.
        """
        try:
            if self.is_switch:
                return parse_bool(value)
            if self.is_list:
                return self._read_list(value, source)
            if isinstance(value, dict) and self.kind.is_object:
                value = json.dumps(value)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not isinstance(value, str) and (self.kind.convert is str or not is_number):
                raise ValueError(value)
            return self.parse(str(value))
        except ValueError as error:
            raise ConfigError(f"{source} {self.fault(value)}") from error

    def _read_list(self, value: Any, source: str) -> list[Any]:
        """From a list, a text with commas or, of some kinds, JSON."""
        items = [value]
        if isinstance(value, list):
            items = value
        elif isinstance(value, str) and not value.startswith(("{", "[")):
            items = value.split(",")
        if self.kind.convert is not str:
            items = [json.dumps(item) if isinstance(item, dict) else item for item in items]
        if not all(isinstance(item, str) for item in items):
            raise ConfigError(f"{source} {self.fault(value, 'a list of texts')}")
        found = [self.parse(item.strip()) for item in items]
        return [*itertools.chain.from_iterable(each if isinstance(each, list) else [each]
                                               for each in found)]  # fmt: skip

    def check(self, value: Any) -> None:
        """
        Raises:
            ConfigError: it is no value of this setting.
        """
        if value is None and self.default is None:
            return
        for each in value if self.is_list else (value,):
            if not (isinstance(each, bool) if self.is_switch else self.kind.is_right(each)):
                raise ConfigError(f"{self.flag} {self.fault(each)}")

    def check_needs(self, values: Mapping[str, Any]) -> None:
        """
        Args:
            values: of all settings by key, this one included. A need of others is not checked.

        Raises:
            ConfigError: this one is set, and one that it needs is not.
        """
        value = values[self.key]
        if value == self.default or value in (None, (), []):
            return
        is_number = isinstance(self.default, int | float) and not self.is_switch
        for need in self.needs:
            if values.keys() >= set(need.keys):
                need.check(f"{self.flag} {value}" if is_number else self.flag, values)


def key_of(name: str) -> str:
    """`--max-model-len` → `max_model_len`"""
    return name.lstrip("-").replace("-", "_")


def flag_of(key: str) -> str:
    """`max_model_len` → `--max-model-len`"""
    return f"--{key.replace('_', '-')}"


def variable_of(key: str) -> str:
    """`max_model_len` → `PENSTOCK_MAX_MODEL_LEN`"""
    return f"PENSTOCK_{key.upper()}"


def setting(
    default: T,
    group: Group,
    help: str,  # noqa: A002  # as argparse calls it
    kind: Kind = TEXT,
    *,
    name: str = "",
    aliases: tuple[str, ...] = (),
    spellings: Mapping[str, str] = _NONE,
    switches: Mapping[str, Any] = _NONE,
    parts: Mapping[str, Part] = _NONE,
    needs: tuple[Need, ...] = (),
    is_daily: bool = False,
    is_secret: bool = False,
    in_code: T | None = None,
) -> T:
    """A field of a `Section` that is a setting; the arguments are those of `Setting`.

    Args:
        default: a bool makes a switch, a tuple a list.
        name: of the option, if it is not the field's.
        in_code: the field's value where a section is made without settings, if it is not the
            default.
    """
    declared = Setting(
        default=default, group=group, help=help, kind=kind, name=name, aliases=aliases,
        spellings=spellings, switches=switches, parts=parts, needs=needs, is_daily=is_daily,
        is_secret=is_secret,
    )  # fmt: skip
    return cast("T", _field(declared, default if in_code is None else in_code))


def same_as(section: type[Section], name: str) -> Any:
    """A field that is a setting which another section declares."""
    found = _find(section, name)
    return _field(replace(found, field=""), found.default)


def default_of(section: type[Section], name: str) -> Any:
    """The default of a section's setting, for what may be made without the section."""
    return _find(section, name).default


def _find(section: type[Section], name: str) -> Setting:
    [found] = [each for each in settings_of(section) if each.field == name]
    return found


def _field(declared: Setting, default: Any) -> Any:
    return field(default=default, repr=not declared.is_secret, metadata={"setting": declared})


@dataclass(frozen=True, slots=True)
class Section:
    """A configuration whose fields are settings, or described in its docstring.

    Raises:
        ConfigError: a value is not as it is declared.
    """

    def __post_init__(self) -> None:
        declared = settings_of(type(self))
        values = {each.key: getattr(self, each.field) for each in declared}
        for each in declared:
            each.check(values[each.key])
            each.check_needs(values)

    @classmethod
    def of(cls: type[S], settings: Mapping[str, Any], **others: Any) -> S:
        """The section from settings by key; those of other sections are ignored.

        Args:
            others: fields that are no settings.
        """
        found = {
            each.field: tuple(settings[each.key]) if each.is_list else settings[each.key]
            for each in settings_of(cls)
            if each.key in settings
        }
        return cls(**found, **others)


S = TypeVar("S", bound=Section)


def settings_of(*sections: type[Section]) -> tuple[Setting, ...]:
    """All that the sections declare, each once."""
    return _settings_of(cast("tuple[Any, ...]", sections))


@cache
def _settings_of(sections: tuple[Any, ...]) -> tuple[Setting, ...]:
    found: dict[str, Setting] = {}
    for section in sections:
        for item in fields(section):
            if "setting" in item.metadata:
                declared: Setting = item.metadata["setting"]
                name = declared.name or item.name.replace("_", "-")
                found.setdefault(key_of(name), replace(declared, field=item.name, name=name))
    return tuple(found.values())


def others_of(section: type[Section]) -> tuple[str, ...]:
    """The fields of a section that are no settings."""
    return tuple(item.name for item in fields(section) if "setting" not in item.metadata)


def grouped(settings: Iterable[Setting]) -> dict[Group, tuple[Setting, ...]]:
    """Settings by their groups, in order; those of daily use first."""
    found = sorted(settings, key=lambda each: not each.is_daily)
    groups = {group: tuple(each for each in found if each.group is group) for group in Group}
    return {group: them for group, them in groups.items() if them}


def take_twins(settings: Iterable[Setting], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key in which switches and parts are the values that they stand for.

    Raises:
        ConfigError: one has a wrong value, or a setting has another one, too.
    """
    found = dict(values)
    for each in settings:
        for twin in each.twins:
            twin.check(found.get(twin.key, twin.default))
        for name, value in each.switches.items():
            if found.pop(key_of(name), False):
                _take_switch(each, name, value, found)
        parts = {}
        for name, part in each.parts.items():
            if (value := found.pop(key_of(name), None)) is not None:
                parts[part.key] = _object(value) if part.kind.is_object else value
        if parts:
            each.check(found.get(each.key))
            found[each.key] = json.dumps({**_object(found.get(each.key)), **parts})
    return found


def _take_switch(each: Setting, name: str, value: Any, found: dict[str, Any]) -> None:
    other = found.get(each.key, each.default)
    if other not in (each.default, value):
        raise ConfigError(
            f"--{name} means {each.flag} {value}: it cannot be used with {each.flag} {other}"
        )
    found[each.key] = value


def _object(value: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    return json.loads(value) if isinstance(value, str) else value or {}
