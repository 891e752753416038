"""gpt-oss: messages in channels. `analysis` is a thought, `commentary to=functions.f` a call,
`final` and other `commentary` text.

Source: OpenAI, "Harmony response format", 2025.
"""

from __future__ import annotations

from penstock.engine.chat_formats.parser import Scanner, Steps
from penstock.engine.chat_formats.tool_format import Frame, ToolFormat

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_IN_HEADER = ("<|", "to=", "assistant")


def _steps(scanner: Scanner) -> Steps[None]:
    is_first, is_header = True, (yield from _begins_header(scanner))
    while True:
        header: list[str] = []
        write = header.append if is_header else scanner.say
        markers = (
            [_MESSAGE, _CHANNEL, *_ENDS] if is_header else [_START, _MESSAGE, _CHANNEL, *_ENDS]
        )
        marker = yield from scanner.read_until(markers, write)
        if not marker:
            scanner.say("".join(header) if is_first else "")
            return
        is_first, is_header = False, True
        if marker == _CHANNEL:
            header.append(" ")
            marker = yield from scanner.read_until([_MESSAGE, *_ENDS], header.append)
        if marker == _MESSAGE:
            scanner.end_item()
            yield from _message(scanner, "".join(header))


def _begins_header(scanner: Scanner) -> Steps[bool]:
    """Whether the text to come is the rest of a header that the prompt began, not a message."""
    while True:
        text = scanner.text.lstrip()
        if text.startswith(_IN_HEADER):
            return True
        if scanner.is_over or (text and not any(each.startswith(text) for each in _IN_HEADER)):
            return False
        yield


def _message(scanner: Scanner, header: str) -> Steps[None]:
    words = header.replace(_CONSTRAIN, " ").replace(_START, " ").split()
    recipient = next((each[3:] for each in words if each.startswith("to=")), "")
    if recipient.startswith("functions.") and scanner.tools:
        scanner.call(recipient.removeprefix("functions."))
        yield from scanner.read_until([*_ENDS, _START], scanner.arguments)
        scanner.end_call()
    else:
        scanner.is_thinking = "analysis" in words and not recipient
        write = scanner.think if scanner.is_thinking else scanner.say
        yield from scanner.read_until([*_ENDS, _START], write)
        scanner.is_thinking = False
    scanner.end_item()


FORMAT = ToolFormat(
    steps=_steps,
    markers=(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS),
    openings=(_START, _CHANNEL, _MESSAGE, *_ENDS),
    frame=Frame(
        begin=lambda name: [
            _CHANNEL,
            f"commentary to=functions.{name} ",
            _CONSTRAIN,
            "json",
            _MESSAGE,
        ],
        end=[],
        between=["<|call|>", _START, "assistant"],
        thought=([_CHANNEL, "analysis", _MESSAGE], "<|end|>", [_START, "assistant"]),
        answer=[_CHANNEL, "final", _MESSAGE],
        otherwise=lambda name: [f" to=functions.{name}", _CHANNEL, "commentary json", _MESSAGE],
    ),
)
