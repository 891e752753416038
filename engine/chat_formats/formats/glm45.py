"""GLM-4.5: `<tool_call>f`, then `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>` for
each argument, typed by the tool's schema, then `</tool_call>`."""

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
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


def _steps(scanner: Scanner) -> Steps[None]:
    write: Write = scanner.say
    while (yield from scanner.read_until([_BEGIN], write)):
        said: list[str] = []
        marker = yield from scanner.read_until([_KEY, _END, "\n"], said.append)
        name = "".join(said).strip()
        if not marker or not name:
            scanner.say_unless_cut(_BEGIN + "".join(said) + marker)
            continue
        scanner.call(name)
        if marker == "\n":
            marker = yield from scanner.read_until([_KEY, _END], len)
        yield from _arguments(scanner, scanner.tools.get(name, Tool(name)), marker)
        write = len  # what comes between calls is dropped


def _arguments(scanner: Scanner, tool: Tool, marker: str) -> Steps[None]:
    separator = "{"
    while marker == _KEY:
        key = yield from scanner.take_until(_KEY_END)
        if key is None or not (yield from scanner.read_until([_VALUE], len)):
            break
        key = key.strip()
        scanner.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        yield from xml_value(scanner, kinds_of(tool, key), ends=[_VALUE_END])
        marker = yield from scanner.read_until([_KEY, _END], len)
    scanner.end_call("}" if separator == ", " else "{}")


def _begin(key: str) -> str:
    return f"{_KEY}{key}{_KEY_END}\n{_VALUE}"


FORMAT = ToolFormat(
    steps=_steps,
    markers=(_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END),
    template_marks=(_BEGIN, _KEY),
    openings=(_BEGIN,),
    frame=Frame(
        begin=lambda name: [_BEGIN, f"{name}\n"],
        end=[_END],
        between=["\n"],
        arguments=partial(xml_arguments, begin=_begin, end=f"{_VALUE_END}\n"),
        written=partial(xml_written, begin=_begin, end=f"{_VALUE_END}\n"),
    ),
)
