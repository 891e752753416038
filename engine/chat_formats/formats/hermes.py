"""Hermes, Qwen2.5, Qwen3: `<tool_call>`, a line `{"name": "f", "arguments": {…}}`, `</tool_call>`,
several in a row. Text after a call is dropped, as vLLM does."""

from __future__ import annotations

from penstock.engine.chat_formats.parser import Scanner, Steps, Write
from penstock.engine.chat_formats.tool_format import ToolFormat, json_frame, read_object

_BEGIN, _END = "<tool_call>", "</tool_call>"


def _steps(scanner: Scanner) -> Steps[None]:
    write: Write = scanner.say
    while (yield from scanner.read_until([_BEGIN], write)):
        if (yield from read_object(scanner, begun=_BEGIN)):
            yield from scanner.read_until([_END], len)
            write = len


FORMAT = ToolFormat(
    steps=_steps,
    markers=(_BEGIN, _END),
    template_marks=(_BEGIN,),
    openings=(_BEGIN,),
    frame=json_frame(f"{_BEGIN}\n", f"\n{_END}", between=["\n"]),
)
