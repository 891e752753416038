"""Mistral: `[TOOL_CALLS][{"name": "f", "arguments": {…}}, …]`, from version 11 on
`[TOOL_CALLS]f[ARGS]{…}` or `[TOOL_CALLS]f{…}` for each call."""

from __future__ import annotations

from penstock.engine.chat_formats.formats.granite import read_list
from penstock.engine.chat_formats.parser import Scanner, Steps
from penstock.engine.chat_formats.tool_format import ToolFormat, json_frame, skip_all

_BEGIN, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _steps(scanner: Scanner) -> Steps[None]:
    if not (yield from scanner.read_until([_BEGIN], scanner.say)):
        return
    yield from scanner.skip_space()
    if (yield from scanner.peek()) in ("[", "{"):
        yield from read_list(scanner, begun=_BEGIN)
        yield from skip_all(scanner)
        return
    while True:
        name: list[str] = []
        end = yield from scanner.read_until([_ARGUMENTS, _ID, "{"], name.append)
        if end == _ID:
            end = yield from scanner.read_until([_ARGUMENTS, "{"], len)
        if not end:
            scanner.say_unless_cut(_BEGIN + "".join(name))
            return
        if end == "{":
            scanner.text = "{" + scanner.text
        scanner.call("".join(name).strip())
        yield from scanner.read_json(scanner.arguments)
        scanner.end_call()
        if not (yield from scanner.read_until([_BEGIN], len)):
            return


FORMAT = ToolFormat(
    steps=_steps,
    markers=(_BEGIN, _ARGUMENTS, _ID),
    openings=(_BEGIN,),
    frame=json_frame(first=[_BEGIN, "["], between=[", "], last=["]"]),
)
