"""Whether values are what the fields of a dataclass say: for what comes from a user's own code.

A wrong type is found before anything runs, not where the value is first used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def misfits(kind: type[Any], values: Mapping[str, object]) -> list[tuple[str, str]]:
    """Fields of the dataclass `kind` whose values are of another type, and what it should be.

    Numpy's numbers count as numbers, lists as tuples; a bool is no number.
    """
    hints = get_type_hints(kind)
    return [
        (field.name, _in_words(hints[field.name]))
        for field in fields(kind)
        if field.name in values and not _fits(values[field.name], hints[field.name])
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
