"""Typed access to a model's `config.json`: every mistake becomes a one-line error."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.engine.errors import ModelLoadError, UnsupportedOptionError
from penstock.engine.model_files.json_file import read_json

MAX_INTEGER = (1 << 31) - 1  # positions are kept in 32 bits

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80


def shown(value: object) -> str:
    """A value as messages show it: its `repr`, shortened if it is long."""
    return _REPR.repr(value)


class ConfigFields:
    """A JSON object of the file `path`, read field by field. A null counts as absent.

    Args:
        within: the name of the object inside the file; empty at the top level.
        names: what the object calls fields that are asked for by other names.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        path: Path,
        within: str = "",
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._values = values
        self.path = path
        self._prefix = f"{within}." if within else ""
        self._names = names or {}

    def renamed(self, **names: str) -> ConfigFields:
        """A view in which some of these fields are asked for by other names, as in
        `renamed(hidden_size="n_embd")`; no name: the object has no such field."""
        return ConfigFields(
            self._values, path=self.path, within=self._prefix[:-1], names={**self._names, **names}
        )

    def completed(self, defaults: Mapping[str, Any], whole: Mapping[str, Any]) -> ConfigFields:
        """The same with defaults for what is absent, and other values of the fields `whole`."""
        given = {name: each for name, each in self._values.items() if each is not None}
        nulls = dict.fromkeys(self._values.keys() - given.keys() - defaults.keys())
        return ConfigFields(
            {**defaults, **nulls, **given, **whole}, path=self.path, within=self._prefix[:-1]
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, name: str) -> bool:
        return self._values.get(self._own(name)) is not None

    def integer(
        self,
        name: str,
        default: int | None = None,
        *,
        minimum: int = 1,
        maximum: int = MAX_INTEGER,
    ) -> int:
        value = self._get(name, default)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not minimum <= value <= maximum:
            expected = f"expected an integer from {minimum} to {maximum}"
            raise self.error(name, f"{expected}, not {shown(value)}")
        return int(value)

    def is_null(self, name: str) -> bool:
        """Whether the field is there, as a null."""
        own = self._own(name)
        return own in self._values and self._values[own] is None

    def nullable_integer(self, name: str, default: int) -> int | None:
        """A positive integer, or None if the field is null; the default only if it is absent."""
        if self.is_null(name):
            return None
        return self.integer(name, default)

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        minimum: float = 1e-6,
        maximum: float = 1e6,
    ) -> float:
        value = self._get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= maximum:
            expected = f"expected a number from {minimum:g} to {maximum:g}"
            raise self.error(name, f"{expected}, not {shown(value)}")
        return float(value)

    def optional_number(self, name: str, *, minimum: float = 1e-6, maximum: float) -> float | None:
        return self.number(name, minimum=minimum, maximum=maximum) if name in self else None

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"expected true or false, not {shown(value)}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"expected a string, not {shown(value)}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"expected a list of strings, not {shown(value)}")
        return tuple(value)

    def integers(self, name: str, *, minimum: int = 1) -> tuple[int, ...]:
        values = self._get(name, ())
        is_list = isinstance(values, list | tuple)
        if not is_list or not all(type(each) is int and each >= minimum for each in values):
            kind = "positive integers" if minimum == 1 else f"integers from {minimum} on"
            raise self.error(name, f"expected a list of {kind}, not {shown(values)}")
        return tuple(values)

    def numbers(self, name: str, *, count: int) -> tuple[float, ...]:
        """A list of `count` positive numbers."""
        values = self._get(name, None)
        if not isinstance(values, list | tuple) or len(values) != count:
            raise self.error(name, f"expected a list of {count} numbers, not {shown(values)}")
        for value in values:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 < value < math.inf:
                raise self.error(name, f"expected positive numbers, not {shown(value)}")
        return tuple(map(float, values))

    def require(self, name: str, value: bool | None) -> None:
        """
        Raises:
            UnsupportedOptionError: the field is there, and another value.
        """
        found = self._values.get(self._own(name))
        if found is not None and found != value:
            raise self.unsupported(name, f"{shown(found)} is not supported; only {value} is")

    def token_ids(self, name: str, *, num_tokens: int, lowest: int = 0) -> tuple[int, ...]:
        """An id or a list of ids, each from `lowest` to below `num_tokens`; empty if absent."""
        value = self._values.get(self._own(name))
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            is_integer = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_integer or not lowest <= token_id < num_tokens:
                expected = f"expected a token id, or a list of them, from {lowest} to"
                raise self.error(name, f"{expected} {num_tokens - 1}, not {shown(value)}")
        return tuple(ids)

    def raw(self, name: str) -> Any:
        """The value as it is; None if absent."""
        return self._values.get(self._own(name))

    def section(self, name: str) -> ConfigFields:
        """An object within this one; empty if absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"expected an object, not {shown(value)}")
        return ConfigFields(value, path=self.path, within=self._prefix + name)

    def error(self, name: str, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {self._prefix}{self._own(name)}: {message}")

    def unsupported(self, name: str, message: str) -> UnsupportedOptionError:
        return UnsupportedOptionError(f"{self.path}: {self._prefix}{self._own(name)}: {message}")

    def _own(self, name: str) -> str:
        return self._names.get(name, name)

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(self._own(name))
        if value is not None:
            return value
        if default is None:
            raise self.error(name, "is missing")
        return default


def read_model_fields(path: Path) -> ConfigFields:
    """The `config.json` of the model in directory `path`."""
    file = path / "config.json"
    return ConfigFields(read_json(file), path=file)
