"""Arguments about the report, shared by benches."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

from penstock.engine.errors import ConfigError
from penstock.load.report.summary import Slo


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


_OBJECTIVES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2e": "e2e_ms", "e2el": "e2e_ms"}


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    add = group.add_argument
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="objectives in milliseconds, such as ttft:200 tpot:50 e2e:5000",
    )
    add("--label", default="", help="label in the title and file names")
    add_out(parser)


def slo_of(parsed: argparse.Namespace) -> Slo:
    """Raises ConfigError for an invalid objective."""
    limits: dict[str, float] = {}
    for text in parsed.goodput:
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in _OBJECTIVES or not limit >= 0:
            raise ConfigError(
                f"--goodput {text!r}: objectives are ttft, tpot and e2e in ms, such as ttft:200"
            )
        limits[_OBJECTIVES[name]] = limit
    return Slo(**limits)


def file_stem(bench: str, label: str) -> str:
    """The name of a report's files: the bench and the label, in the characters of file names."""
    return f"{bench}-{re.sub(r'[^A-Za-z0-9._-]+', '-', label)}" if label else bench


def settings_of(parsed: argparse.Namespace) -> dict[str, str | int | float | bool | None]:
    """The arguments as plain data, without secrets and paths of this machine."""
    hidden = ("run", "api_key", "out")
    return {
        name: value if isinstance(value, str | int | float | bool) or value is None else str(value)
        for name, value in vars(parsed).items()
        if name not in hidden
    }
