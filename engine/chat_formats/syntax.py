"""Which formats an output is written in: found in the model's chat template, named by the user, and
completed by how the prompt ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.engine.chat_formats.formats import TOOL_FORMATS
from penstock.engine.chat_formats.parser import Scanner, Steps

_HARMONY = "openai"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """How a model marks thoughts.

    Attributes:
        begins: the markers of which one begins a thought.
        end: the marker after it.
        is_open: outputs begin inside a thought, whatever the prompt says.
    """

    begins: tuple[str, ...]
    end: str
    is_open: bool = False


_THINK = ReasoningFormat(begins=("<think>",), end="</think>")
_OPEN = ReasoningFormat(begins=("<think>",), end="</think>", is_open=True)
_GRANITE = ReasoningFormat(
    begins=("Here is my thought process:", "Here's my thought process:"),
    end="Here is my response:",
)
REASONING_FORMATS: Mapping[str, ReasoningFormat | None] = {
    "deepseek_r1": _OPEN,
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "granite": _GRANITE,
    "hunyuan_a13b": _THINK,
    "kimi_k2": _THINK,
    "mistral": ReasoningFormat(begins=("[THINK]",), end="[/THINK]"),
    "openai_gptoss": None,  # its tool format reads thoughts too
    "qwen3": _THINK,
}


@dataclass(frozen=True, slots=True)
class OutputSyntax:
    """The formats of an output; empty names stand for none.

    Attributes:
        tools: a key of `TOOL_FORMATS`.
        reasoning: a key of `REASONING_FORMATS`.
        begins_in_reasoning: the prompt ended inside a thought.
    """

    tools: str = ""
    reasoning: str = ""
    begins_in_reasoning: bool = False

    @property
    def thoughts(self) -> ReasoningFormat | None:
        return REASONING_FORMATS[self.reasoning] if self.reasoning else None

    @property
    def first_characters(self) -> str:
        """In a message, nothing else begins without one of them."""
        openings = TOOL_FORMATS[self.tools].openings if self.tools else ()
        return "".join({opening[0] for opening in openings})

    def steps(self, scanner: Scanner, *, has_tools: bool) -> Steps[None]:
        """Reads an output."""
        thoughts = self.thoughts
        if thoughts is not None:
            yield from _thoughts(scanner, thoughts, is_open=self.begins_in_reasoning)
        if self.tools and (has_tools or self.tools == _HARMONY):
            yield from TOOL_FORMATS[self.tools].steps(scanner)
        yield from scanner.read_until([], scanner.say)


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
    if not is_open:
        scanner.say(space)
        return
    scanner.is_thinking = True
    yield from scanner.read_until([thoughts.end], scanner.think)
    scanner.is_thinking = False
    scanner.end_item()
    yield from scanner.skip_space()


def formats_of(template: str | None) -> tuple[str, str]:
    """The formats of tool calls and of thoughts that a chat template shows."""
    source = template or ""
    marks_of_tools = {name: each.template_marks for name, each in TOOL_FORMATS.items()}
    return _first_of(marks_of_tools, source), _first_of(_REASONING_IN_TEMPLATES, source)


# Format → texts of which all are in the template; the first that fits counts.
_REASONING_IN_TEMPLATES = {
    "openai_gptoss": ("<|channel|>", "<|message|>"),
    "mistral": ("[THINK]",),
    "granite": ("Here is my thought process",),
    "qwen3": ("<think>",),
    "deepseek_r1": ("</think>",),
}


def _first_of(table: Mapping[str, tuple[str, ...]], source: str) -> str:
    fitting = (name for name, marks in table.items() if all(mark in source for mark in marks))
    return next(fitting, "")


def syntax_of(tools: str, reasoning: str, prompt: str) -> OutputSyntax:
    """The syntax of the output that follows a prompt.

    Args:
        tools, reasoning: names of formats.
    """
    thoughts = REASONING_FORMATS[reasoning] if reasoning else None
    if thoughts is None:
        is_harmony = reasoning == "openai_gptoss"
        return OutputSyntax(_HARMONY if is_harmony else tools)
    tail = prompt.rstrip()
    if tail.endswith(thoughts.begins):
        return OutputSyntax(tools, reasoning, True)
    if tail.endswith(thoughts.end):
        return OutputSyntax(tools)
    return OutputSyntax(tools, reasoning, thoughts.is_open)


def opens_thoughts(template: str | None) -> bool:
    """Whether a template itself begins the thoughts that it wants: then an output after a prompt
    without a begun thought has none."""
    _, _, ending = (template or "").rpartition("add_generation_prompt")
    while ending:
        _, found, ending = ending.partition("<think>")
        if found and not ending.replace("\\n", "").lstrip().startswith("</think>"):
            return True
    return False


def markers_of(syntax: OutputSyntax) -> tuple[str, ...]:
    """The texts that mark thoughts and calls. Some may be special tokens."""
    thoughts = syntax.thoughts
    of_thoughts = () if thoughts is None else (*thoughts.begins, thoughts.end)
    return (*of_thoughts, *(TOOL_FORMATS[syntax.tools].markers if syntax.tools else ()))
