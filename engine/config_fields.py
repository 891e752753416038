"""Typed access to a model's `config.json`: every mistake becomes a one-line error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engine.errors import ModelLoadError
from penstock.engine.json_file import read_json


class ConfigFields:
    """A JSON object of the file `path`, read field by field. A null counts as absent.

    Args:
        within: the name of the object inside the file; empty at the top level.
    """

    def __init__(self, values: Mapping[str, Any], *, path: Path, within: str = "") -> None:
        self._values = values
        self.path = path
        self._prefix = f"{within}." if within else ""

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._get(name, default)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or value < minimum:
            raise self.error(name, f"expected an integer of at least {minimum}, not {value!r}")
        return int(value)

    def nullable_integer(self, name: str, default: int) -> int | None:
        """A positive integer, or None if the field is null; the default only if it is absent."""
        if name in self._values and self._values[name] is None:
            return None
        return self.integer(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.error(name, f"expected a positive number, not {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if name in self else None

    def boolean(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"expected true or false, not {value!r}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"expected a string, not {value!r}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"expected a list of strings, not {value!r}")
        return tuple(value)

    def section(self, name: str) -> ConfigFields:
        """An object within this one; empty if absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"expected an object, not {value!r}")
        return ConfigFields(value, path=self.path, within=self._prefix + name)

    def error(self, name: str, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {self._prefix}{name}: {message}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is not None:
            return value
        if default is None:
            raise self.error(name, "is missing")
        return default


def read_model_fields(path: Path) -> ConfigFields:
    """The `config.json` of the model in directory `path`."""
    file = path / "config.json"
    return ConfigFields(read_json(file), path=file)
