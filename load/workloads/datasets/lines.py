"""JSONL files that people bring: objects line by line, and faults that name the line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from penstock.engine.errors import ConfigError


def read_lines(path: Path, *, max_lines: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The first objects of a file, each with its place for messages; empty lines do not count.

    Raises:
        ConfigError: no such file, nothing in it, or a line that is no JSON object.
    """
    num_read = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if num_read == max_lines:
                    return
                if line.strip():
                    num_read += 1
                    yield f"{path}, line {number}", _object(line, f"{path}, line {number}")
    except OSError as error:
        raise ConfigError(f"--dataset-path: cannot read {path}: {error.strerror}") from error
    if num_read == 0:
        raise ConfigError(f"--dataset-path: {path} is empty")


def positive_int(value: object, name: str, place: str) -> int:
    """A count.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{place}: {name} must be a whole number of 1 or more, not {value!r}")
    return value


def _object(line: bytes, place: str) -> Mapping[str, Any]:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{place}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: an object is needed")
    return value
