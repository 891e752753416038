"""Qwen3-Coder: XML with a tag per parameter, typed by the tool's schema.

<tool_call>
<function=f>
<parameter=key>
value
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
from functools import partial

from penstock.engine.chat_formats.parser import Scanner, Steps, Tool, Write
from penstock.engine.chat_formats.tool_format import (
    Frame,
    ToolFormat,
    kinds_of,
    xml_arguments,
    xml_value,
    xml_written,
)

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def _steps(scanner: Scanner) -> Steps[None]:
    write: Write = scanner.say
    while marker := (yield from scanner.read_until([_BEGIN, _FUNCTION], write)):
        if marker == _BEGIN:
            yield from scanner.skip_space()
            if not (yield from scanner.starts_with(_FUNCTION)):
                scanner.say_unless_cut(_BEGIN)
                continue
        name = yield from scanner.take_until(">")
        if name is None:
            scanner.say_unless_cut(_FUNCTION)
            continue
        scanner.call(name.strip())
        yield from _parameters(scanner, scanner.tools.get(name.strip(), Tool(name)))
        write = len  # what comes between calls is dropped


def _parameters(scanner: Scanner, tool: Tool) -> Steps[None]:
    separator = "{"
    ends = [_PARAMETER, _FUNCTION_END, _END]
    while (yield from scanner.read_until(ends, len)) == _PARAMETER:
        key = yield from scanner.take_until(">")
        if key is None:
            break
        key = key.strip()
        scanner.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from scanner.starts_with("\n")
        yield from xml_value(
            scanner,
            kinds_of(tool, key),
            ends=[f"\n{_PARAMETER_END}", _PARAMETER_END, f"\n{_FUNCTION_END}", _FUNCTION_END],
        )
    scanner.end_call("}" if separator == ", " else "{}")


def _begin(key: str) -> str:
    return f"{_PARAMETER}{key}>\n"


_VALUE_END = f"\n{_PARAMETER_END}\n"
FORMAT = ToolFormat(
    steps=_steps,
    markers=(_BEGIN, _END),
    template_marks=(_BEGIN, _FUNCTION),
    openings=(_BEGIN, _FUNCTION),
    frame=Frame(
        begin=lambda name: [_BEGIN, f"\n{_FUNCTION}{name}>\n"],
        end=[f"{_FUNCTION_END}\n", _END],
        between=["\n"],
        arguments=partial(xml_arguments, begin=_begin, end=_VALUE_END),
        written=partial(xml_written, begin=_begin, end=_VALUE_END),
    ),
)
