"""The tools of `penstock chat --tools`: a calculator, a clock and a note keeper, run here."""

from __future__ import annotations

import ast
import datetime
import operator
from collections.abc import Callable, Mapping

from .tools import Tool

_OPERATORS: Mapping[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_MAX_CHARS = 200


def local_tools() -> list[Tool]:
    """The tools, and their memory."""
    notes: list[str] = []

    def clock(city: str = "") -> str:
        """Tells the time on this computer, wherever the city is."""
        del city
        return datetime.datetime.now().astimezone().strftime("%H:%M")

    def note(text: str) -> str:
        """Keeps a note until the end of the chat."""
        notes.append(text)
        return f"saved as note {len(notes)}"

    return [Tool.of(function) for function in (calculator, clock, note)]


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Raises:
        ValueError: it is something else.
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"more than {_MAX_CHARS} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"not an arithmetic expression: {expression!r}") from error
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if is_whole else value)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left, kind, right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_value(left), _value(right))
        case ast.UnaryOp(kind, operand) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_value(operand))
    raise ValueError("only numbers, + - * / // % and brackets are allowed")
