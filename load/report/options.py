"""Arguments about the report, shared by benches."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), help="folder for the files written"
    )


def positive(text: str) -> int:
    """A positive number. Raises ValueError otherwise."""
    (number,) = counts(text)
    return number


def counts(text: str) -> tuple[int, ...]:
    """Comma-separated positive numbers. Raises ValueError otherwise."""
    numbers = tuple(int(number) for number in text.split(","))
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def rates(text: str) -> tuple[float, ...]:
    """Comma-separated positive numbers. Raises ValueError otherwise."""
    numbers = tuple(float(number) for number in text.split(","))
    if not all(number > 0 for number in numbers):  # infinite: all at once
        raise ValueError(text)
    return numbers


def json_object(text: str) -> dict[str, Any]:
    """Raises ValueError if it is none."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(text)
    return value


_OBJECTIVES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "e2el": "e2e_ms"}


def objective(text: str) -> tuple[str, float]:
    """A field of `Slo`, and its limit. Raises ValueError if it is none."""
    name, _, value = text.partition(":")
    if name not in _OBJECTIVES or not float(value) >= 0:
        raise ValueError(text)
    return _OBJECTIVES[name], float(value)


def settings_of(parsed: argparse.Namespace) -> dict[str, str | int | float | bool | None]:
    """The arguments as plain data, without secrets and paths of this machine."""
    hidden = ("run", "api_key", "flood_api_key", "out")
    return {
        name: value if isinstance(value, str | int | float | bool) or value is None else str(value)
        for name, value in vars(parsed).items()
        if name not in hidden
    }
