"""Llama 3.2 and 4, ToolACE: the whole output is a Python list of calls with named literals,
`[f(a=1, b="x"), g()]`."""

from __future__ import annotations

import ast
import json

from penstock.engine.chat_formats.parser import Scanner, Steps, Tool
from penstock.engine.chat_formats.tool_format import (
    Frame,
    ToolFormat,
    escaped,
    python_arguments,
    python_written,
    skip_all,
)

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
_CONSTANTS = {"True": "true", "False": "false", "None": "null"} | {
    each: each for each in ("true", "false", "null")
}
_MAX_NAME_CHARS = 128


def _steps(scanner: Scanner) -> Steps[None]:
    yield from scanner.skip_space()
    begun = _BEGIN if (yield from scanner.starts_with(_BEGIN)) else ""
    yield from scanner.skip_space()
    if not (yield from scanner.starts_with("[")):
        scanner.say(begun)
        yield from scanner.read_until(["\0"], scanner.say)
        return
    begun += "["
    has_called = False
    while True:
        name = yield from _name(scanner)
        if name is None:
            if not has_called:
                scanner.say(begun)
                yield from scanner.read_until(["\0"], scanner.say)
            break
        has_called = True
        scanner.call(name)
        yield from _arguments(scanner, scanner.tools.get(name, Tool(name)))
        yield from scanner.skip_space()
        if not (yield from scanner.starts_with(",")):
            break
    yield from skip_all(scanner)


def _name(scanner: Scanner) -> Steps[str | None]:
    """Read a function's name and the bracket after it; None, and nothing read, if there is none."""
    yield from scanner.skip_space()
    while True:
        name, bracket, rest = scanner.text.partition("(")
        is_name = name in scanner.tools or all(part.isidentifier() for part in name.split("."))
        if bracket:
            if is_name:
                scanner.text = rest
            return name if is_name else None
        is_begun = any(tool.startswith(name) for tool in scanner.tools)
        may_grow = is_name or is_begun or not name or name.endswith(".")
        if scanner.is_over or not may_grow or len(name) > _MAX_NAME_CHARS:
            return None
        yield


def _arguments(scanner: Scanner, tool: Tool) -> Steps[None]:
    """Read `key=literal, …)` and write it as a JSON object."""
    separator = "{"
    while True:
        yield from scanner.skip_space()
        if (yield from scanner.peek()) in (")", ""):
            break
        key = yield from scanner.take_until("=")
        key = (key or "").strip()
        if not (key.isidentifier() or tool.schema_of(key)):
            break
        scanner.arguments(f"{separator}{json.dumps(key)}: ")
        separator = ", "
        yield from _literal(scanner)
        yield from scanner.skip_space()
        yield from scanner.starts_with(",")
    yield from scanner.starts_with(")")
    scanner.end_call("}" if separator == ", " else "{}")


def _literal(scanner: Scanner) -> Steps[None]:
    """Read a Python literal and write it as JSON, texts as they come."""
    depth = 0
    closings: list[str] = []
    while True:
        yield from scanner.skip_space()
        character = yield from scanner.peek()
        if not character or (not depth and character in ",)"):
            return
        if character in "'\"":
            yield from _text(scanner)
        elif character in "[({":
            depth += 1
            closings.append("}" if character == "{" else "]")
            scanner.arguments("{" if character == "{" else "[")
            scanner.text = scanner.text[1:]
        elif character in "])}":
            depth -= 1
            if depth < 0:
                return
            scanner.arguments(closings.pop())
            scanner.text = scanner.text[1:]
        elif character in ",:":
            rest = scanner.text[1:]
            scanner.text = rest
            yield from scanner.skip_space()
            if (yield from scanner.peek()) not in ("]", ")", "}"):
                scanner.arguments(f"{character} ")
        else:
            yield from _word(scanner)
        if not depth and character not in "[({":
            return


def _word(scanner: Scanner) -> Steps[None]:
    """Read a number or a constant."""
    while True:
        end = next((i for i, each in enumerate(scanner.text) if each in ",:)]} \n"), None)
        if end is not None or scanner.is_over:
            break
        yield
    word, scanner.text = scanner.text[:end], "" if end is None else scanner.text[end:]
    if scanner.is_cut and end is None:
        return
    if word in _CONSTANTS:
        scanner.arguments(_CONSTANTS[word])
        return
    try:
        scanner.arguments(json.dumps(ast.literal_eval(word)))
    except (ValueError, SyntaxError, TypeError):
        scanner.arguments(json.dumps(word, ensure_ascii=False))


def _text(scanner: Scanner) -> Steps[None]:
    """Read a Python string and write it as a JSON text."""
    quote = scanner.text[0]
    scanner.text = scanner.text[1:]
    scanner.arguments('"')
    while True:
        at = min(
            (i for i in (scanner.text.find(quote), scanner.text.find("\\")) if i >= 0),
            default=len(scanner.text),
        )
        scanner.arguments(escaped(scanner.text[:at]))
        scanner.text = scanner.text[at:]
        if scanner.text.startswith(quote):
            scanner.text = scanner.text[1:]
            break
        if scanner.text.startswith("\\"):
            needed = {"x": 4, "u": 6, "U": 10}.get(scanner.text[1:2], 2)
            if len(scanner.text) >= needed:
                scanner.arguments(escaped(_unescaped(scanner.text[:needed])))
                scanner.text = scanner.text[needed:]
                continue
        if scanner.is_over:
            scanner.text = ""
            break
        yield
    scanner.arguments("" if scanner.is_cut else '"')


def _unescaped(sequence: str) -> str:
    try:
        value = ast.literal_eval(f'"{sequence}"')
    except (ValueError, SyntaxError):
        return sequence
    return value if isinstance(value, str) else sequence


FORMAT = ToolFormat(
    steps=_steps,
    template_marks=("<|start_header_id|>", "func_name1(params_name1"),
    starts="[",
    frame=Frame(
        begin=lambda name: [f"{name}("],
        end=[")"],
        first=["["],
        between=[", "],
        last=["]"],
        arguments=python_arguments,
        written=python_written,
    ),
)
LLAMA_4 = ToolFormat(
    steps=_steps,
    markers=(_BEGIN, _END),
    template_marks=(_BEGIN,),
    openings=(_BEGIN,),
    starts="[",
    frame=Frame(
        begin=lambda name: [f"{name}("],
        end=[")"],
        first=[_BEGIN, "["],
        between=[", "],
        last=["]", _END],
        arguments=python_arguments,
        written=python_written,
    ),
)
