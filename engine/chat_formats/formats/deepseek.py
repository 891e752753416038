"""DeepSeek V3 and R1, and V3.1, which writes the arguments without a code block."""

from __future__ import annotations

from penstock.engine.chat_formats.parser import Scanner, Steps
from penstock.engine.chat_formats.tool_format import Frame, ToolFormat, skip_all

_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_CODE = "```json"
_MARKERS = (_CALLS, _CALLS_END, _CALL, _CALL_END, _SEPARATOR)


def _steps(scanner: Scanner) -> Steps[None]:
    """Both versions: what tells them apart is the code block."""
    if not (yield from scanner.read_until([_CALLS, _CALL], scanner.say)):
        return
    while True:
        yield from scanner.skip_space()
        yield from scanner.starts_with(_CALL)
        before: list[str] = []
        found = yield from scanner.read_until([_SEPARATOR, _CALLS_END], before.append)
        if found != _SEPARATOR:
            break
        yield from scanner.skip_space()
        name = "".join(before).strip()
        if (yield from scanner.peek()) != "{":
            code = yield from scanner.take_until(_CODE)
            if code is None and scanner.is_cut:
                scanner.text = ""
                return
            name = name if code is None else code.strip()
        scanner.call(name)
        yield from scanner.read_json(scanner.arguments)
        scanner.end_call()
        if (yield from scanner.read_until([_CALL, _CALLS_END], len)) != _CALL:
            break
        scanner.text = _CALL + scanner.text
    yield from skip_all(scanner)


V3 = ToolFormat(
    steps=_steps,
    markers=_MARKERS,
    template_marks=(_CALLS, _CODE),
    openings=(_CALLS, _CALL),
    frame=Frame(
        begin=lambda name: [_CALL, "function", _SEPARATOR, f"{name}\n{_CODE}\n"],
        end=["\n```", _CALL_END],
        first=[_CALLS],
        between=["\n"],
        last=[_CALLS_END],
    ),
)
V31 = ToolFormat(
    steps=_steps,
    markers=_MARKERS,
    template_marks=(_CALLS,),
    openings=(_CALLS, _CALL),
    frame=Frame(
        begin=lambda name: [_CALL, name, _SEPARATOR],
        end=[_CALL_END],
        first=[_CALLS],
        last=[_CALLS_END],
    ),
)
