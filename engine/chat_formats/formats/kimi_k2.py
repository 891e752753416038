"""Kimi K2: `<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{…}<|tool_call_end|>`
within a section."""

from __future__ import annotations

from penstock.engine.chat_formats.parser import Scanner, Steps
from penstock.engine.chat_formats.tool_format import Frame, ToolFormat, skip_all

_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"


def _steps(scanner: Scanner) -> Steps[None]:
    if not (yield from scanner.read_until([_SECTION], scanner.say)):
        return
    while (yield from scanner.read_until([_CALL, _SECTION_END], len)) == _CALL:
        written: list[str] = []
        if not (yield from scanner.read_until([_ARGUMENTS], written.append)):
            return
        scanner.call(_name("".join(written)))
        yield from scanner.read_json(scanner.arguments)
        scanner.end_call()
        yield from scanner.read_until([_CALL_END], len)
    yield from skip_all(scanner)


def _name(call_id: str) -> str:
    """The function in `functions.f:0`."""
    name, colon, number = call_id.strip().rpartition(":")
    bare = name if colon and number.strip().isdigit() else call_id.strip()
    return bare.removeprefix("functions.").strip()


FORMAT = ToolFormat(
    steps=_steps,
    markers=(_SECTION, _SECTION_END, _CALL, _CALL_END, _ARGUMENTS),
    template_marks=(_SECTION,),
    openings=(_SECTION,),
    frame=Frame(
        begin=lambda name: [_CALL, f"functions.{name}:0", _ARGUMENTS],
        end=[_CALL_END],
        first=[_SECTION],
        last=[_SECTION_END],
    ),
)
