"""Grammars that make a model call tools as its format wants it, with arguments that match their
schemas; and other grammars, begun only after the thoughts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from penstock.engine.chat_formats.formats import TOOL_FORMATS
from penstock.engine.chat_formats.parser import Tool
from penstock.engine.chat_formats.syntax import OutputSyntax
from penstock.engine.chat_formats.tool_format import Frame, json_options
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs.forms import closed

_TEXT = "TEXT: /(?s:.*)/"


def call_grammar(
    syntax: OutputSyntax,
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool,
    tokens: Mapping[str, int],
    otherwise: StructuredOutputs | None = None,
) -> StructuredOutputs:
    """The grammar of an output with calls.

    Args:
        tools: those that may be called.
        required: there is a call, and no text. Otherwise there may be, and only the arguments of
            strict tools are constrained.
        parallel: there may be several calls.
        tokens: markers that are single tokens.
        otherwise: what an output without calls must match.
    """
    tool_format = TOOL_FORMATS[syntax.tools]
    frame, write, rules = tool_format.frame, _Writer(tokens), [_TEXT]
    for index, tool in enumerate(tools):
        is_free = not (required or tool.strict or otherwise is not None)
        arguments = _arguments(frame, tool, rules, is_free=is_free)
        opening, *begin = frame.begin(tool.name)
        rules.append(f"rest_{index}: {write(begin)} {arguments} {write(frame.end)}")
        rules.append(f"call_{index}: {write([opening])} rest_{index}")
    rules += [f"{name}: {_one_of(name, tools)}" for name in ("call", "rest")]
    more = f" ({write(frame.between)} call)*" if parallel else ""
    several = f"call{more} {write(frame.last)}"
    rules.append(f"calls: {write(frame.first)} {several}")
    if required:
        start = "calls"
    elif otherwise is not None:
        others, name = embedded(otherwise)
        rules += others
        start = f"calls | {name}"
    else:
        opening = [*frame.first, *frame.begin("")][0]
        if opening in tool_format.markers:
            is_token = opening in tokens
            rules.append(f"before{'' if is_token else '[lazy]'}: TEXT {write([opening])}")
            if frame.first:
                start = f"(before {write(frame.first[1:])} {several})? TEXT"
            else:
                start = f"(before rest){'*' if parallel else '?'} TEXT"
        else:  # an output that begins like a call is one
            rules.append("OTHER: /[^{\\[\\s](?s:.*)/")
            start = "calls | OTHER"
    return _after_thoughts(syntax, start, rules, write)


def _one_of(name: str, tools: Sequence[Tool]) -> str:
    return " | ".join(f"{name}_{index}" for index in range(len(tools)))


def after_thoughts(
    syntax: OutputSyntax, grammar: StructuredOutputs, tokens: Mapping[str, int]
) -> StructuredOutputs:
    """A grammar that begins where the thoughts end."""
    if syntax.thoughts is None:
        return grammar
    rules, name = embedded(grammar)
    return _after_thoughts(syntax, name, [_TEXT, *rules], _Writer(tokens))


def embedded(grammar: StructuredOutputs) -> tuple[list[str], str]:
    """A grammar's rules, for use within another one, and the name of its first rule."""
    if grammar.kind == "json_schema":
        return [f"answer: %json {grammar.text}"], "answer"
    if grammar.kind == "regex":
        pattern = grammar.text.replace("/", "\\/")
        return ["answer: ANSWER", f"ANSWER: /{pattern}/"], "answer"
    renamed = [
        "answer" + line.removeprefix("start") if line.startswith("start") else line
        for line in grammar.text.splitlines()
    ]
    return renamed, "answer"


def _after_thoughts(
    syntax: OutputSyntax, start: str, rules: Sequence[str], write: _Writer
) -> StructuredOutputs:
    thoughts = syntax.thoughts
    if thoughts is None:
        return StructuredOutputs("lark", "\n".join([f"start: {start}", *rules]))
    if thoughts.end in write.tokens:
        thought = f"thought: TEXT {write([thoughts.end])}"
    else:
        thought = f"thought[lazy]: TEXT {json.dumps(thoughts.end)}"
    space = 'SPACE: "\\n\\n" | "\\n" | ""'
    begin = "" if syntax.begins_in_reasoning else write([thoughts.begins[0]])
    whole = f"{begin} thought SPACE ({start})".strip()
    if not syntax.begins_in_reasoning:
        whole = f"{whole} | ({start})"
    return StructuredOutputs("lark", "\n".join([f"start: {whole}", thought, space, *rules]))


def _arguments(frame: Frame, tool: Tool, rules: list[str], *, is_free: bool) -> str:
    if frame.arguments is not None:
        return frame.arguments(tool, rules)
    schema = {} if is_free else dict(tool.parameters or {})
    whole = closed({"type": "object", **schema}, is_forced=False)
    return f"%json {json_options(whole, is_strict=tool.strict)}"


class _Writer:
    """Writes texts in Lark, markers that are single tokens as those."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens

    def __call__(self, parts: Sequence[str]) -> str:
        return " ".join(
            f"<[{self.tokens[part]}]>"
            if part in self.tokens
            else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )
