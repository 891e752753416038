"""Granite 3: `<|tool_call|>[{"name": "f", "arguments": {…}}, …]`, or `<tool_call>` before it."""

from __future__ import annotations

from penstock.engine.chat_formats.parser import Scanner, Steps
from penstock.engine.chat_formats.tool_format import ToolFormat, json_frame, read_object, skip_all

_MARKERS = ("<|tool_call|>", "<tool_call>")


def read_list(scanner: Scanner, *, begun: str) -> Steps[bool]:
    """Read a JSON list of calls; whether there was one."""
    yield from scanner.skip_space()
    if not (yield from scanner.starts_with("[")):
        return (yield from read_object(scanner, begun=begun))
    begun += "["
    while (yield from read_object(scanner, begun=begun)):
        yield from scanner.skip_space()
        if not (yield from scanner.starts_with(",")):
            return True
        begun = ""
    return False


def _steps(scanner: Scanner) -> Steps[None]:
    while marker := (yield from scanner.read_until(_MARKERS, scanner.say)):
        if (yield from read_list(scanner, begun=marker)):
            yield from skip_all(scanner)
            return


FORMAT = ToolFormat(
    steps=_steps,
    markers=_MARKERS,
    openings=_MARKERS,
    frame=json_frame(first=[_MARKERS[0], "["], between=[", "], last=["]"]),
)
