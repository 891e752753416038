"""Kinds of values: how a text is read, which values are right, how a default is shown."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DURATIONS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "min": 60.0, "s": 1.0, "ms": 0.001}
_MAX_DURATION_S = 100 * 365 * 86400.0  # more overflows the integers of Redis
_ON, _OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of value.

    Attributes:
        metavar: stands for the value in `--help`.
        expected: what a value must be, for the message about one that is wrong.
        convert: a text to a value, or a list of several; raises ValueError.
        accepts: whether a value is right; may raise TypeError, ValueError or AttributeError for
            one that is not.
        show: a default as `--help` shows it; a text that `parse` reads.
        choices: all values, if they are few.
        is_object: a JSON object, which a file may have as such, and a command line key by key.
    """

    metavar: str
    expected: str
    convert: Callable[[str], Any] = str
    accepts: Callable[[Any], bool] = lambda _: True
    show: Callable[[Any], str] = str
    choices: tuple[str, ...] = ()
    is_object: bool = False

    def parse(self, text: str) -> Any:
        """
        Raises:
            ValueError: the text is no value of this kind.
        """
        found = self.convert(text)
        if not all(map(self.is_right, found if isinstance(found, list) else [found])):
            raise ValueError(f"{text!r} is not {self.expected}")
        return found

    def is_right(self, value: Any) -> bool:
        """Whether `value` is of this kind."""
        try:
            return self.accepts(value)
        except (TypeError, ValueError, AttributeError):
            return False


def parse_bytes(text: str) -> int:
    """A size in bytes, as `512M`, `2GiB` or `1000`; units are binary multiples.

    Raises:
        ValueError: it is no size.
    """
    digits = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = digits[-1:] if digits[-1:] in _SIZES else ""
    size = float(digits.removesuffix(unit)) * _SIZES[unit]
    if not 1 <= size < math.inf:
        raise ValueError(f"{text!r} is not a size")
    return int(size)


def parse_gib(text: str) -> float:
    """A size in GiB: a plain number, or a size with its unit, as `512M`.

    Raises:
        ValueError: it is neither.
    """
    try:
        return float(text)
    except ValueError:
        return parse_bytes(text) / _SIZES["g"]


def parse_duration(text: str, *, unit_s: float = 1.0) -> float:
    """A duration, as `30`, `250ms`, `90s`, `10m`, `1.5h` or `30d`: from 0 to 100 years.

    Args:
        unit_s: what a plain number counts, in seconds; the result is in it too.

    Raises:
        ValueError: it is no duration.
    """
    digits = text.strip().lower()
    number = digits.rstrip("dhmins")
    unit = digits[len(number) :]
    if unit and unit not in _DURATIONS:
        raise ValueError(f"{text!r} has an unknown unit")
    value = float(number)
    if unit:
        value *= _DURATIONS[unit] / unit_s
    if not 0 <= value * unit_s <= _MAX_DURATION_S:
        raise ValueError(f"{text!r} is not a duration")
    return value


def parse_tokens(text: str) -> int:
    """A number of tokens, 1 or more, as vLLM reads it: `2k` is 2,000 and `2K` 2,048; so with m, g
    and t.

    Raises:
        ValueError: it is no such number.
    """
    digits, unit = text.strip(), 1
    if (power := "kmgt".find(digits[-1:].lower())) >= 0 and digits:
        unit = (1000 if digits[-1].islower() else 1024) ** (power + 1)
        digits = digits[:-1]
    number = float(digits) if unit % 10 == 0 else int(digits)
    if not 1 <= number * unit < math.inf or number * unit != int(number * unit):
        raise ValueError(f"{text!r} is no number of tokens")
    return int(number * unit)


def show_bytes(size: int) -> str:
    """A size in the largest unit that divides it, as `256M`."""
    unit = max((name for name in _SIZES if size % _SIZES[name] == 0), key=_SIZES.__getitem__)
    return f"{size // _SIZES[unit]}{unit.upper()}"


def show_duration(value: float, *, unit_s: float = 1.0) -> str:
    """A duration in the largest unit that divides it, as `30d`; 0 has none."""
    ms = round(value * unit_s * 1000)
    for unit in ("d", "h", "m", "s"):
        count, rest = divmod(ms, round(_DURATIONS[unit] * 1000))
        if count and not rest:
            return f"{count}{unit}"
    return f"{ms}ms" if ms else "0"


def parse_bool(value: object) -> bool:
    """Whether a text or value of a file says yes.

    Raises:
        ValueError: it says neither yes nor no.
    """
    text = str(value).lower()
    if text not in (*_ON, *_OFF):
        raise ValueError(f"{value!r} is neither true nor false")
    return text in _ON


def whole(lowest: float = -math.inf, highest: float = math.inf) -> Kind:
    """Whole numbers."""
    bounds = f" from {lowest} to {highest}" if highest < math.inf else f", {lowest} or more"
    return Kind(
        "N",
        f"a whole number{bounds * (lowest > -math.inf)}",
        int,
        lambda value: lowest <= value <= highest,
    )


def one_of(literal: Any) -> Kind:
    """The values of a `Literal`, or of a sequence."""
    choices = tuple(get_args(literal) or literal)
    return Kind(
        f"{{{','.join(choices)}}}",
        f"one of {', '.join(choices)}",
        accepts=lambda value: value in choices,
        choices=choices,
    )


def _is_object(value: Any) -> bool:
    return isinstance(json.loads(value) if isinstance(value, str) else value, Mapping)


def _endpoint(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and 0 <= int(port) <= 65535


def _durations(metavar: str, unit: str, examples: str, lowest: str, unit_s: float = 1.0) -> Kind:
    """Durations, from 0 or more than 0; a plain number counts `unit_s` seconds."""

    def accepts(value: float) -> bool:
        is_enough = value > 0 if lowest == "more than 0" else value >= 0
        return is_enough and value * unit_s <= _MAX_DURATION_S

    return Kind(
        metavar,
        f"a number of {unit}, or a duration such as {examples}, {lowest}",
        partial(parse_duration, unit_s=unit_s),
        accepts,
        partial(show_duration, unit_s=unit_s),
    )


TEXT = Kind("TEXT", "a text")
NAME = Kind("NAME", "a name")
FILE = Kind("FILE", "a path")
HOST = Kind("HOST", "an address")
URL = Kind("URL", "a URL")
JSON = Kind("JSON", "a JSON object", accepts=_is_object, is_object=True)
ENDPOINT = Kind("HOST:PORT", "an address and a port, such as 10.0.0.1:7000", accepts=_endpoint)
PORT = Kind("PORT", "between 0 and 65535", int, lambda value: 0 <= value <= 65535)
NUMBER = Kind("X", "a number", float)
COUNT = whole(1)
SIZE = Kind("SIZE", "a size such as 4M or 2GiB", parse_bytes, lambda size: size >= 1, show_bytes)
SECONDS = _durations("SECONDS", "seconds", "30s, 10m, 12h or 30d", "0 or more")
INTERVAL = _durations("SECONDS", "seconds", "30s or 10m", "more than 0")
MILLISECONDS = _durations("MS", "milliseconds", "250ms or 2s", "0 or more", 0.001)
POSITIVE_MILLISECONDS = _durations("MS", "milliseconds", "250ms or 2s", "more than 0", 0.001)
