"""Checks values given by users against the annotations of a class, with messages in its terms."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def misfits(kind: type[Any], values: Mapping[str, object]) -> list[tuple[str, str]]:
    """Fields of the class `kind` whose values have the wrong type, with a message for each.

    NumPy's numbers count as numbers, lists as tuples; a bool is not a number.
    """
    hints = get_type_hints(kind)
    return [
        (name, f"{name} must be {_in_words(hint)}, not {reprlib.repr(values[name])}")
        for name, hint in hints.items()
        if name in values and not _fits(values[name], hint)
    ]


def _fits(value: object, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_fits(each, arguments[0]) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(key, arguments[0]) and _fits(each, arguments[1]) for key, each in value.items()
        )
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return isinstance(value, hint)


def _in_words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_in_words, arguments))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        return f"a list of {_in_words(arguments[0])}"
    if origin is Mapping:
        return f"a mapping from {_in_words(arguments[0])} to {_in_words(arguments[1])}"
    return "None" if hint is type(None) else str(hint.__name__)
