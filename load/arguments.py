"""Arguments that benches share."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, default=Path("build/bench"), help="folder for the files written"
    )


def positive(text: str) -> int:
    """A positive number.

    Raises:
        ValueError: it is none.
    """
    (number,) = counts(text)
    return number


def counts(text: str) -> tuple[int, ...]:
    """Positive numbers with commas between them.

    Raises:
        ValueError: it is none.
    """
    numbers = tuple(int(number) for number in text.split(","))
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers
