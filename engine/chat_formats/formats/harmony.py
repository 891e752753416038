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


def _steps(scanner: Scanner) -> Steps[None]:
    while True:
        header: list[str] = []
        marker = yield from scanner.read_until([_MESSAGE, _CHANNEL, *_ENDS], header.append)
        if marker == _CHANNEL:
            before = "".join(header)
            header = [before, " "]
            marker = yield from scanner.read_until([_MESSAGE, *_ENDS], header.append)
        if not marker:
            if not any(part in "".join(header) for part in ("assistant", "functions.")):
                scanner.say("".join(header))
            return
        if marker in _ENDS:
            continue
        yield from _message(scanner, "".join(header))


def _message(scanner: Scanner, header: str) -> Steps[None]:
    words = header.replace(_CONSTRAIN, " ").replace(_START, " ").split()
    recipient = next((each[3:] for each in words if each.startswith("to=")), "")
    if recipient.startswith("functions."):
        scanner.call(recipient.removeprefix("functions."))
        yield from scanner.read_until([*_ENDS, _START], scanner.arguments)
        scanner.end_call()
    else:
        scanner.is_thinking = "analysis" in words
        write = scanner.think if scanner.is_thinking else scanner.say
        yield from scanner.read_until([*_ENDS, _START], write)
        scanner.is_thinking = False
    scanner.end_item()


FORMAT = ToolFormat(
    steps=_steps,
    markers=(_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS),
    first_characters="<",
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
    ),
)
