"""What an output may contain, and its items: from the text of an output to messages, thoughts and
calls of the tools that were offered, under the names that the caller gave them.

`OutputFormat` is what this depends on, apart from the text; it is stored with a response, so that
another process finds the same items.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.engine.chat_formats.parser import OutputParser, Piece, Tool
from penstock.engine.chat_formats.syntax import OutputSyntax

CUSTOM_INPUT = "input"  # the one argument of a custom tool, as the model sees it
NAMESPACE_END = "\0"  # between a namespace and a name, for callers: no tool's name has it
_BEFORE_INPUT = f'{{"{CUSTOM_INPUT}":"'  # white space aside
_INPUT = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """How thoughts and tool calls are found in an output.

    Attributes:
        tools: as the model sees them.
        custom: names of the tools whose calls are free text: the model's one argument `input`.
        aliases: the caller's names of tools, where the model sees other ones.
        max_calls: the output ends before a further call; None: no limit.
    """

    syntax: OutputSyntax
    tools: tuple[Tool, ...] = ()
    custom: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    max_calls: int | None = None

    def as_fields(self) -> dict[str, Any]:
        """The format as plain values, for storage."""
        return {
            "syntax": self.syntax.as_fields(),
            "tools": [(tool.name, tool.parameters) for tool in self.tools],
            "custom": sorted(self.custom),
            "aliases": dict(self.aliases),
            "max_calls": self.max_calls,
        }

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> OutputFormat:
        """The inverse of `as_fields`, but for what does not matter to reading an output."""
        return cls(
            syntax=OutputSyntax.from_fields(fields["syntax"]),
            tools=tuple(Tool(name=name, parameters=each) for name, each in fields["tools"]),
            custom=frozenset(fields["custom"]),
            aliases=fields["aliases"],
            max_calls=fields["max_calls"],
        )


class OutputReader:
    """Finds the items of one output. Pieces have the kinds of the API: "message", "reasoning",
    "function_call" and "custom_tool_call".

    Attributes:
        is_over: a call came that is one too many; it and all that follows is dropped.
    """

    __slots__ = ("_format", "_input", "_num_calls", "_parser", "is_over")

    def __init__(self, output_format: OutputFormat) -> None:
        self._format = output_format
        self._parser = OutputParser(output_format.syntax, output_format.tools)
        self._num_calls = 0
        self._input: _InputReader | None = None  # of the custom call that is being read
        self.is_over = False

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._parser.is_reasoning

    @property
    def has_called(self) -> bool:
        """Whether a call has come."""
        return self._num_calls > 0

    def push(self, text: str) -> list[Piece]:
        """The parts of items that this text completes."""
        pieces = self._parser.push(text)
        if len(pieces) == 1 and pieces[0].kind == "message":
            return pieces  # as nearly always
        return self._named(pieces)

    @property
    def is_calling(self) -> bool:
        """Whether the text so far ends inside a call."""
        return self._parser.is_calling and not self.is_over

    def end(self, *, is_cut: bool) -> list[Piece]:
        """What was held back.

        Args:
            is_cut: the output did not end by itself.
        """
        return self._named(self._parser.end(is_cut=is_cut))

    def _named(self, pieces: list[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            if self.is_over:
                break
            if piece.kind != "function_call":
                found.append(piece)
                continue
            if piece.begins:
                self._num_calls += 1
                max_calls = self._format.max_calls
                if max_calls is not None and self._num_calls > max_calls:
                    self.is_over = True
                    break
                self._input = _InputReader() if piece.name in self._format.custom else None
            found += self._of_call(piece)
        return found

    def _of_call(self, piece: Piece) -> list[Piece]:
        name = self._format.aliases.get(piece.name, piece.name)
        if self._input is None:
            if name == piece.name:
                return [piece]
            return [Piece(piece.kind, piece.text, piece.begins, name)]
        text = self._input.push(piece.text)
        if not (text or piece.begins):
            return []
        return [Piece("custom_tool_call", text, piece.begins, name)]


class _InputReader:
    """Reads the string in `{"input": "…"}` while it is written. Arguments of any other form are
    passed on as they are."""

    __slots__ = ("_held", "_is_other", "_is_over", "_is_within")

    def __init__(self) -> None:
        self._held = ""  # an escape sequence, or the beginning of the object, that is not whole
        self._is_within = False
        self._is_other = False
        self._is_over = False

    def push(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if self._is_over:
            return ""
        if self._is_other:
            return text
        if not self._is_within:
            begun = _INPUT.match(text)
            if begun is None:
                self._is_other = not _BEFORE_INPUT.startswith("".join(text.split()))
                self._held = "" if self._is_other else text
                return text if self._is_other else ""
            self._is_within = True
            text = text[begun.end() :]
        end = _end_of_text(text)
        self._is_over = text[end : end + 1] == '"'
        self._held = "" if self._is_over else text[end:]
        return _unescaped(text[:end])


def _end_of_text(text: str) -> int:
    """Where the string ends, or what can be decoded of it."""
    position = 0
    while position < len(text):
        character = text[position]
        if character == '"':
            return position
        if character != "\\":
            position += 1
            continue
        length = 6 if text.startswith("\\u", position) else 2
        if text[position : position + 4].lower().startswith(("\\ud8", "\\ud9", "\\uda", "\\udb")):
            length = 12 if text[position + 6 : position + 7] in ("\\", "") else 6
        if position + length > len(text):
            return position
        position += length
    return position


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    try:
        decoded: str = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class OutputItem(msgspec.Struct, frozen=True, gc=False):
    """A whole item; the name is that of a call's tool."""

    kind: str
    text: str
    name: str = ""


def items_of(pieces: Sequence[Piece]) -> list[OutputItem]:
    """The items that these pieces make."""
    items: list[tuple[str, list[str], str]] = []
    for piece in pieces:
        if piece.begins or not items or items[-1][0] != piece.kind:
            items.append((piece.kind, [], piece.name))
        items[-1][1].append(piece.text)
    return [OutputItem(kind, "".join(texts), name) for kind, texts, name in items]


def pieces_after(shown: Sequence[Piece], pieces: Sequence[Piece]) -> list[Piece]:
    """What of these pieces is left after others that are their beginning, cut anywhere.

    Raises:
        ValueError: they are not their beginning.
    """
    known, whole = items_of(shown), items_of(pieces)
    rest: list[Piece] = []
    for index, item in enumerate(whole):
        if index >= len(known):
            rest.append(Piece(item.kind, item.text, True, item.name))
            continue
        begun = known[index]
        is_last = index == len(known) - 1
        is_beginning = item.text.startswith(begun.text) if is_last else item.text == begun.text
        if (item.kind, item.name) != (begun.kind, begun.name) or not is_beginning:
            raise ValueError(f"item {index} differs")
        if len(item.text) > len(begun.text):
            rest.append(Piece(item.kind, item.text[len(begun.text) :]))
    if len(known) > len(whole):
        raise ValueError("an item is missing")
    return rest
