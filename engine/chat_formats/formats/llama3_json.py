"""Llama 3: the whole output is `{"name": "f", "parameters": {…}}`, at times after `<|python_tag|>`,
several joined by `;`."""

from __future__ import annotations

from penstock.engine.chat_formats.parser import Scanner, Steps
from penstock.engine.chat_formats.tool_format import ToolFormat, json_frame, read_object, skip_all

_BEGIN = "<|python_tag|>"


def _steps(scanner: Scanner) -> Steps[None]:
    begun = ""
    yield from scanner.skip_space()
    if (yield from scanner.peek()) != "{":
        if not (yield from scanner.read_until([_BEGIN], scanner.say)):
            return
        begun = _BEGIN
        yield from scanner.skip_space()
    while (yield from read_object(scanner, begun=begun)):
        yield from scanner.skip_space()
        if not (yield from scanner.starts_with(";")):
            yield from skip_all(scanner)
            return
        begun = ";"
        yield from scanner.skip_space()
        if (yield from scanner.peek()) != "{":
            yield from skip_all(scanner)
            return
    yield from scanner.read_until(["\0"], scanner.say)


FORMAT = ToolFormat(
    steps=_steps,
    markers=(_BEGIN,),
    openings=(_BEGIN,),
    starts="{",
    frame=json_frame(key="parameters", between=["; "]),
)
