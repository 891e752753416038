"""Which formats an output is written in: read off the model's chat template (`template_facts`) or
named by the user, and completed by how the prompt ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.engine.chat_formats.call_format import CallFormat, call_format_of, read_literal
from penstock.engine.chat_formats.formats import tool_format_of
from penstock.engine.chat_formats.parser import Scanner, Steps
from penstock.engine.chat_formats.reasoning import REASONING_FORMATS, ReasoningFormat
from penstock.engine.chat_formats.tool_format import skip_all

_HARMONY = "openai"


@dataclass(frozen=True, slots=True)
class OutputSyntax:
    """The formats of an output; empty names stand for none.

    Attributes:
        tools: a format of calls, or a key of `TOOL_FORMATS`.
        reasoning: a format of thoughts, or a key of `REASONING_FORMATS`.
        begins_in_reasoning: the prompt ended inside a thought.
        answer: what is around a message.
    """

    tools: CallFormat | str = ""
    reasoning: ReasoningFormat | str = ""
    begins_in_reasoning: bool = False
    answer: tuple[str, str] = ("", "")

    @property
    def thoughts(self) -> ReasoningFormat | None:
        if isinstance(self.reasoning, ReasoningFormat):
            return self.reasoning
        return REASONING_FORMATS[self.reasoning] if self.reasoning else None

    @property
    def first_characters(self) -> str:
        """In a message, nothing else begins without one of them."""
        openings = tool_format_of(self.tools).openings if self.tools else ()
        return "".join({text[0] for text in (*openings, self.answer[1]) if text})

    def as_fields(self) -> tuple[Any, ...]:
        """As plain values, for storage."""
        tools = self.tools if isinstance(self.tools, str) else asdict(self.tools)
        thoughts = self.reasoning if isinstance(self.reasoning, str) else asdict(self.reasoning)
        fields = (tools, thoughts, self.begins_in_reasoning)
        return (*fields, self.answer) if any(self.answer) else fields

    @classmethod
    def from_fields(cls, fields: Sequence[Any]) -> OutputSyntax:
        """The inverse of `as_fields`."""
        tools, thoughts, *others = fields
        return cls(
            tools if isinstance(tools, str) else call_format_of(tools),
            thoughts if isinstance(thoughts, str) else ReasoningFormat.from_fields(thoughts),
            bool(others[0]),
            tuple(others[1]) if len(others) > 1 else ("", ""),
        )

    def steps(self, scanner: Scanner, *, has_tools: bool) -> Steps[None]:
        """Reads an output."""
        thoughts = self.thoughts
        if thoughts is not None:
            yield from _thoughts(scanner, thoughts, is_open=self.begins_in_reasoning)
        begin, scanner.answer_end = self.answer
        if begin:
            yield from read_literal(scanner, begin)
        if self.tools and (has_tools or self.tools == _HARMONY):
            yield from tool_format_of(self.tools).steps(scanner)
        ends = [scanner.answer_end] if scanner.answer_end else []
        if (yield from scanner.read_until(ends, scanner.say)):
            yield from skip_all(scanner)


def _thoughts(scanner: Scanner, thoughts: ReasoningFormat, *, is_open: bool) -> Steps[None]:
    """Read the thought at the beginning of an output, if there is one."""
    scanner.is_thinking = is_open
    space = ""
    while True:
        bare = scanner.text.lstrip()
        space += scanner.text[: len(scanner.text) - len(bare)]
        scanner.text = bare
        if bare or scanner.is_over:
            break
        yield
    for marker in thoughts.begins:
        if (yield from scanner.starts_with(marker)):
            is_open = True
            break
    if not is_open and (yield from scanner.starts_with(thoughts.end)):
        yield from scanner.skip_space()  # some templates write so where there was no thought
        return
    if not is_open:
        scanner.say(space)
        return
    scanner.is_thinking = True
    yield from scanner.read_until([thoughts.end], scanner.think)
    scanner.is_thinking = False
    scanner.end_item()
    yield from scanner.skip_space()


def syntax_of(
    tools: CallFormat | str,
    reasoning: ReasoningFormat | str,
    prompt: str,
    answer: tuple[str, str] = ("", ""),
) -> OutputSyntax:
    """The syntax of the output that follows a prompt."""
    thoughts = (
        REASONING_FORMATS[reasoning] if isinstance(reasoning, str) and reasoning else reasoning
    )
    if not thoughts:
        is_harmony = reasoning == "openai_gptoss"
        return OutputSyntax(_HARMONY if is_harmony else tools, answer=answer)
    assert isinstance(thoughts, ReasoningFormat)
    tail = prompt.rstrip()
    if tail.endswith(thoughts.begins):
        return OutputSyntax(tools, reasoning, True, answer)
    if tail.endswith(thoughts.end):
        return OutputSyntax(tools, answer=answer)
    return OutputSyntax(tools, reasoning, thoughts.is_open, answer)


def texts_of(syntax: OutputSyntax) -> tuple[str, ...]:
    """The texts around thoughts, calls and messages. Special tokens may be among them."""
    thoughts = syntax.thoughts
    of_thoughts = () if thoughts is None else (*thoughts.begins, thoughts.end)
    of_calls = tool_format_of(syntax.tools).markers if syntax.tools else ()
    return (*of_thoughts, *of_calls, *filter(None, syntax.answer))
