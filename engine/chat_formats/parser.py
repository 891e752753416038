"""The state machine that finds messages, thoughts and tool calls in the text of an output.

A format is a generator (`Steps`) that reads from a `Scanner` and gets more text whenever it yields.
What it finds depends on the text alone, not on how the text arrives in parts. Held back are at
most the beginning of a marker, white space before a call, a call until its name is known, and a
value that is not written as JSON, unless it is a text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from penstock.engine.chat_formats.syntax import OutputSyntax

_T = TypeVar("_T")
Steps = Generator[None, None, _T]  # yields when it needs more text
Write = Callable[[str], Any]
_MAX_SHORT_CHARS = 256  # of a name
_NOT_IN_JSON = "<\uff5c"  # a marker begins with one of them


class Piece(msgspec.Struct, gc=False):
    """Part of an output.

    Attributes:
        kind: of its item: "message", "reasoning" or "function_call".
        text: of the message or thought, or JSON text of a call's arguments.
        begins: it begins a new item.
        name: of the function, where a call begins.
    """

    kind: str
    text: str
    begins: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that is offered.

    Attributes:
        parameters: a JSON Schema.
        strict: arguments that do not match it are not generated.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def schema_of(self, parameter: str) -> Mapping[str, Any]:
        """The schema of one parameter; empty if unknown."""
        properties = (self.parameters or {}).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}


class Scanner:
    """The text of an output that is still to be read, and the pieces found so far.

    Attributes:
        text: not read yet.
        is_over: no more text will come.
        is_cut: the output was cut off there: it did not end by itself.
        is_calling: the newest call is not whole yet.
        tools: by name.
        is_thinking: the text read last is within a thought.
        is_saying: the text to come is a message's, as long as no marker begins.
        answer_end: what ends a message, where something does.
    """

    __slots__ = (
        "_begun",
        "_kind",
        "_space",
        "answer_end",
        "is_calling",
        "is_cut",
        "is_over",
        "is_saying",
        "is_thinking",
        "pieces",
        "text",
        "tools",
    )

    def __init__(self, tools: Sequence[Tool]) -> None:
        self.text = ""
        self.is_over = False
        self.is_cut = False
        self.is_calling = False
        self.is_thinking = False
        self.is_saying = False
        self.pieces: list[Piece] = []
        self.tools = {tool.name: tool for tool in tools}
        self.answer_end = ""
        self._kind = ""  # of the newest item
        self._begun = False  # the newest call has arguments
        self._space = ""  # at the beginning of a message that may turn out to be empty

    # -- what is found -----------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Text of a message."""
        if self._kind == "message":
            self._add(text)
            return
        text = self._space + text
        self._space = "" if text and not text.isspace() else text
        if not self._space:
            self._begin(Piece("message", text, True))

    def think(self, text: str) -> None:
        """Text of a thought. White space around thoughts is not part of them."""
        if self._kind != "reasoning":
            text = text.lstrip()
            if not text:
                return
        text = self._space + text
        kept = text.rstrip()
        if self._kind == "reasoning":
            self._add(kept)
        else:
            self._begin(Piece("reasoning", kept, True))
        self._space = text[len(kept) :]

    def call(self, name: str) -> None:
        """A call begins."""
        self._begin(Piece("function_call", "", True, name))
        self._begun = False
        self.is_calling = True

    def arguments(self, text: str) -> None:
        """JSON text of the newest call's arguments."""
        self._begun = self._begun or bool(text)
        self._add(text)

    def end_call(self, closing: str = "") -> None:
        """The newest call is whole, unless the output was cut off within it. Without arguments it
        has an empty object.

        Args:
            closing: the end of its arguments, where the format has none.
        """
        if self.is_cut:
            return
        self.arguments(closing)
        if not self._begun:
            self.arguments("{}")
        self.is_calling = False

    def say_unless_cut(self, text: str) -> None:
        """Say text that begins like a call and turned out to be none; it may be one that was cut
        off before its name."""
        if self.is_cut:
            self.text = ""
        else:
            self.say(text)

    def end_item(self) -> None:
        """The next text begins a new item."""
        self._kind = self._space = ""

    def _begin(self, piece: Piece) -> None:
        if not piece.text and piece.kind != "function_call":
            return
        self.pieces.append(piece)
        self._kind, self._space = piece.kind, ""

    def _add(self, text: str) -> None:
        if not text:
            return
        if self.pieces:
            self.pieces[-1].text += text
        else:
            self.pieces.append(Piece(self._kind, text))

    # -- reading -----------------------------------------------------------------------------

    def read_until(self, markers: Sequence[str], write: Write) -> Steps[str]:
        """Write the text before the first of some markers and return that marker; "" at the end,
        where there is none."""
        while True:
            found = [(at, marker) for marker in markers if (at := self.text.find(marker)) >= 0]
            if found:
                at, marker = min(found, key=lambda each: each[0])
                if self.is_over or not any(
                    _is_begun_before(self.text, other, at) for other in markers
                ):
                    text, self.text = self.text[:at], self.text[at + len(marker) :]
                    write(text)
                    return marker
            num_held = 0
            is_half = self.is_cut and write not in (self.say, self.think)  # a marker, probably
            if is_half or not self.is_over:
                num_held = max((_overlap(self.text, marker) for marker in markers), default=0)
                if found:
                    num_held = max(num_held, len(self.text) - found[0][0])
            end = len(self.text) - num_held
            text, self.text = self.text[:end], self.text[end:]
            write(text)
            if self.is_over:
                self.text = ""
                return ""
            self.is_saying = self._kind == "message" and not self.text and write == self.say
            yield
            self.is_saying = False

    def starts_with(self, marker: str) -> Steps[bool]:
        """Read a marker, if it comes next."""
        while len(self.text) < len(marker) and marker.startswith(self.text) and not self.is_over:
            yield
        if not self.text.startswith(marker):
            return False
        self.text = self.text[len(marker) :]
        return True

    def skip_space(self) -> Steps[None]:
        """Read white space."""
        while True:
            self.text = self.text.lstrip()
            if self.text or self.is_over:
                return
            yield

    def peek(self) -> Steps[str]:
        """The next character, not read; "" at the end."""
        while not self.text and not self.is_over:
            yield
        return self.text[:1]

    def take_until(self, marker: str) -> Steps[str | None]:
        """Read a short text and the marker after it; None, and nothing read, if none comes."""
        end = _MAX_SHORT_CHARS + len(marker)
        while True:
            at = self.text.find(marker, 0, end)
            if at >= 0:
                text, self.text = self.text[:at], self.text[at + len(marker) :]
                return text
            if self.is_over or len(self.text) >= end:
                return None
            yield

    def read_json(self, write: Write) -> Steps[None]:
        """Write a JSON value as it is written. It ends too where it cannot be JSON any more."""
        yield from self.skip_space()
        depth, in_text, is_escaped = 0, False, False
        while True:
            end = None
            for index, character in enumerate(self.text):
                if in_text:
                    if is_escaped:
                        is_escaped = False
                    elif character == "\\":
                        is_escaped = True
                    elif character == '"':
                        in_text = False
                        end = None if depth else index + 1
                elif character == '"':
                    in_text = True
                elif character in "{[":
                    depth += 1
                elif character in "}]":
                    depth -= 1
                    end = index + (depth >= 0) if depth <= 0 else None
                elif character in _NOT_IN_JSON or (
                    not depth and (character in ",;" or character.isspace())
                ):
                    end = index
                if end is not None:
                    break
            written = self.text if end is None else self.text[:end]
            self.text = self.text[len(written) :]
            write(written)
            if end is not None or self.is_over:
                return
            yield

    def take_text(self) -> Steps[str | None]:
        """Read a JSON text, whole; None if none comes."""
        parts: list[str] = []
        if (yield from self.peek()) != '"':
            return None
        yield from self.read_json(parts.append)
        try:
            value = json.loads("".join(parts))
        except ValueError:
            return None
        return value if isinstance(value, str) else None


def _is_begun_before(text: str, marker: str, at: int) -> bool:
    """Whether a marker that is not whole yet begins before a position."""
    num = _overlap(text, marker)
    return num > 0 and len(text) - num < at


def _overlap(text: str, marker: str) -> int:
    """Length of the longest tail of a text with which a marker begins, but not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class OutputParser:
    """Finds the items of one output.

    Args:
        tools: those that may be called; without any, calls are text.
    """

    __slots__ = ("_first", "_scanner", "_steps")

    def __init__(self, syntax: OutputSyntax, tools: Sequence[Tool]) -> None:
        self._scanner = Scanner(tools)
        self._steps: Steps[None] | None = syntax.steps(self._scanner, has_tools=bool(tools))
        self._first = syntax.first_characters
        self._advance()

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._scanner.is_thinking

    def push(self, text: str) -> list[Piece]:
        """The pieces that the next text completes."""
        scanner = self._scanner
        if scanner.is_saying:
            for character in self._first:
                if character in text:
                    break
            else:
                return [Piece("message", text)] if text else []
        scanner.text += text
        return self._advance()

    @property
    def is_calling(self) -> bool:
        """Whether the text so far ends inside a call whose name is known."""
        return self._scanner.is_calling

    def end(self, *, is_cut: bool = False) -> list[Piece]:
        """What was held back.

        Args:
            is_cut: the output did not end by itself, so that a call in it may not be whole.
        """
        self._scanner.is_over, self._scanner.is_cut = True, is_cut
        return self._advance()

    def _advance(self) -> list[Piece]:
        scanner = self._scanner
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None
        if self._steps is None:
            scanner.text = ""  # nothing follows that belongs to the output
        pieces, scanner.pieces = scanner.pieces, []
        return pieces
