"""Llama 3.2 and 4, ToolACE: the whole output is a Python list of calls with named literals,
`[f(a=1, b="x"), g()]`."""

from __future__ import annotations

from penstock.engine.chat_formats.literals import (
    literal_arguments,
    literal_grammar,
    literals_written,
)
from penstock.engine.chat_formats.parser import Scanner, Steps, Tool
from penstock.engine.chat_formats.tool_format import (
    Frame,
    ToolFormat,
    skip_all,
)

_BEGIN, _END = "<|python_start|>", "<|python_end|>"
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
        yield from literal_arguments(scanner, scanner.tools.get(name, Tool(name)))
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


FORMAT = ToolFormat(
    steps=_steps,
    starts="[",
    frame=Frame(
        begin=lambda name: [f"{name}("],
        end=[")"],
        first=["["],
        between=[", "],
        last=["]"],
        arguments=literal_grammar,
        written=literals_written,
    ),
)
LLAMA_4 = ToolFormat(
    steps=_steps,
    markers=(_BEGIN, _END),
    openings=(_BEGIN,),
    starts="[",
    frame=Frame(
        begin=lambda name: [f"{name}("],
        end=[")"],
        first=[_BEGIN, "["],
        between=[", "],
        last=["]", _END],
        arguments=literal_grammar,
        written=literals_written,
    ),
)
