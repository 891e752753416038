"""Grammars that make a model call tools as its format wants it, with arguments that match their
schemas; and other grammars, begun only after the thoughts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from penstock.engine.chat_formats.formats import tool_format_of
from penstock.engine.chat_formats.parser import Tool
from penstock.engine.chat_formats.syntax import OutputSyntax
from penstock.engine.chat_formats.tool_format import ID, NUMBER, Frame, json_options
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs.forms import closed
from penstock.engine.structured_outputs.lark import quoted

# Names of the rules made here, which those of a user's grammar must not have.
_OWN = re.compile(
    r"start|answer|ANSWER|ANY|TEXT|OTHER|SPACE|THOUGHT|before|thought|calls?|rest"
    r"|(?:call|rest|value|argument)_\d+"
)
# What is left as it is in a Lark grammar: texts, regular expressions, comments; and names.
_LARK_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<[^>\s]*>|%?[A-Za-z_][A-Za-z0-9_]*'
)
_SLASH = re.compile(r"\\.|/", re.DOTALL)
_ANY = "(?s:.*)"


def call_grammar(
    syntax: OutputSyntax,
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool,
    tokens: Mapping[str, int],
    otherwise: StructuredOutputs | None = None,
    is_lazy: bool = False,
) -> StructuredOutputs:
    """The grammar of an output with calls.

    Args:
        tools: those that may be called.
        required: there is a call, and no text. Otherwise there may be, and only the arguments of
            strict tools are constrained; where arguments are not JSON, the others by their names.
        parallel: there may be several calls.
        tokens: markers that are single tokens.
        otherwise: what an output without calls must match.
        is_lazy: it begins with the mark of the first call.
    """
    tool_format = tool_format_of(syntax.tools)
    frame, write, rules = tool_format.frame, _Writer(tokens), list[str]()
    for index, tool in enumerate(tools):
        is_free = not (required or tool.strict or otherwise is not None)
        arguments = _arguments(frame, tool, rules, write, is_free=is_free)
        opening, *begin = frame.begin(tool.name)
        rules.append(f"rest_{index}: {write(begin)} {arguments} {write(frame.end)}")
        other_way = ""
        if frame.otherwise is not None:
            other_way = f" | {write(frame.otherwise(tool.name))} {arguments} {write(frame.end)}"
        rules.append(f"call_{index}: {write([opening])} rest_{index}{other_way}")
    rules += [f"{name}: {_one_of(name, tools)}" for name in ("call", "rest")]
    more = f" ({write(frame.between)} call)*" if parallel else ""
    several = f"call{more} {write(frame.last)}"
    rules.append(f"calls: {write(frame.first)} {several}")
    opening = [*frame.first, *frame.begin("")][0]
    if is_lazy:
        rules.append(f"TEXT: {_without(tool_format.openings)}")
        mark = tokens.get(opening, opening)
        if not frame.first and parallel:
            rules.append(f"before{'' if opening in tokens else '[lazy]'}: TEXT {write([opening])}")
            several = f"{write([opening])} rest (before rest)*"
        lark = "\n".join([f"start: {write(frame.first)} {several} TEXT", *rules])
        thought = _thought_of(syntax)
        marks = () if thought is None else (thought[0][0], thought[1])
        return StructuredOutputs(
            "lark",
            lark,
            triggers=(mark,),
            thought=tuple(tokens.get(each, each) for each in marks),
            is_thinking=syntax.begins_in_reasoning,
        )
    if required:
        start = "calls"
    elif otherwise is not None:
        others, name = embedded(otherwise)
        rules += others
        start = f"calls | {write(frame.answer)} {name}"
    elif tool_format.starts or frame.answer:  # an output that begins like a call is one
        first = f"/[^{re.escape(tool_format.starts)}\\s]{_ANY}/ & " if tool_format.starts else ""
        rules.append(f"OTHER: {first}{_without(tool_format.openings)}")
        start = f"calls | {write(frame.answer)} OTHER"
    else:
        rules.append(f"TEXT: {_without(tool_format.openings)}")
        is_token = opening in tokens
        rules.append(f"before{'' if is_token else '[lazy]'}: TEXT {write([opening])}")
        if frame.first:
            start = f"(before {write(frame.first[1:])} {several})? TEXT"
        else:
            start = f"(before rest){'*' if parallel else '?'} TEXT"
    return _after_thoughts(syntax, start, rules, write)


def is_marked(syntax: OutputSyntax) -> bool:
    """Whether calls begin with a text of their own, and what is before it is free."""
    if not syntax.tools:
        return False
    tool_format = tool_format_of(syntax.tools)
    frame = tool_format.frame
    is_whole = bool(tool_format.starts or frame.answer or frame.otherwise)
    return bool(tool_format.openings) and not is_whole


def _without(openings: Sequence[str]) -> str:
    """Any text in which no call begins: also one that is spelled, where it is a token."""
    if not openings:
        return f"/{_ANY}/"
    spelled = "|".join(re.escape(opening).replace("/", "\\/") for opening in openings)
    return f"/{_ANY}/ & ~/{_ANY}({spelled}){_ANY}/"


def _one_of(name: str, tools: Sequence[Tool]) -> str:
    return " | ".join(f"{name}_{index}" for index in range(len(tools)))


def after_thoughts(
    syntax: OutputSyntax, grammar: StructuredOutputs, tokens: Mapping[str, int]
) -> StructuredOutputs:
    """A grammar that begins where the thoughts end, behind what a message begins with."""
    frame = tool_format_of(syntax.tools).frame if syntax.tools else None
    header = (frame.answer if frame is not None else ()) or syntax.answer[:1]
    if _thought_of(syntax) is None and not any(header):
        return grammar
    rules, name = embedded(grammar)
    write = _Writer(tokens)
    return _after_thoughts(syntax, f"{_spaced(write, header)} {name}", rules, write)


def embedded(grammar: StructuredOutputs) -> tuple[list[str], str]:
    """A grammar's rules, for use within another one, and the name of its first rule."""
    if grammar.kind == "json_schema":
        return [f"answer: %json {grammar.text}"], "answer"
    if grammar.kind == "regex":
        pattern = _SLASH.sub(
            lambda found: found[0].replace("/", "\\/", found[0] == "/"), grammar.text
        )
        return ["answer: ANSWER", f"ANSWER: /{pattern}/"], "answer"

    def renamed(found: re.Match[str]) -> str:
        name = found[0]
        if name == "start":
            return "answer"
        if not _OWN.fullmatch(name):
            return name
        return f"OF_USER_{name}" if name.isupper() else f"of_user_{name}"

    return [_LARK_TOKEN.sub(renamed, grammar.text)], "answer"


_Thought = tuple[Sequence[str], str, Sequence[str]]  # what begins it, its end, what follows


def _thought_of(syntax: OutputSyntax) -> _Thought | None:
    frame = tool_format_of(syntax.tools).frame if syntax.tools else None
    if frame is not None and frame.thought is not None:
        return frame.thought
    if syntax.thoughts is None:
        return None
    return syntax.thoughts.begins[:1], syntax.thoughts.end, ()


def _after_thoughts(
    syntax: OutputSyntax, start: str, rules: Sequence[str], write: _Writer
) -> StructuredOutputs:
    thought = _thought_of(syntax)
    if thought is None:
        return StructuredOutputs("lark", "\n".join([f"start: {start}", *rules]))
    begin, end, following = thought
    after = write(following) or "SPACE"
    own = [
        f"THOUGHT: {_without([end])}",
        f"thought{'' if end in write.tokens else '[lazy]'}: THOUGHT {write([end])}",
        'SPACE: "\\n\\n" | "\\n" | ""',
    ]
    if syntax.begins_in_reasoning:
        whole = f"thought {after} ({start})"
    else:
        whole = f"{_spaced(write, begin)} thought {after} ({start}) | ({start})"
    return StructuredOutputs("lark", "\n".join([f"start: {whole}", *own, *rules]))


def _spaced(write: _Writer, parts: Sequence[str]) -> str:
    """Texts before the first of which, if it is a word, a space may be: templates end before it."""
    space = '" "? ' if "".join(parts)[:1].isalnum() else ""
    return space + write(parts)


def _arguments(frame: Frame, tool: Tool, rules: list[str], write: _Writer, *, is_free: bool) -> str:
    if frame.arguments is not None:
        return frame.arguments(tool, rules, write)
    schema = {} if is_free else dict(tool.parameters or {})
    whole = closed({"type": "object", **schema}, is_forced=False)
    options = json_options(whole, is_strict=tool.strict, is_spaced=frame.is_spaced)
    return f"%json {options}"


class _Writer:
    """Writes texts in Lark, markers that are single tokens as those."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        known = "|".join(re.escape(each) for each in sorted(tokens, key=len, reverse=True))
        self._split = re.compile(f"({known}|{ID}|{NUMBER})" if known else f"({ID}|{NUMBER})")

    def __call__(self, parts: Sequence[str]) -> str:
        return " ".join(
            self._one(each) for part in parts for each in self._split.split(part) if each
        )

    def _one(self, text: str) -> str:
        if text in self.tokens:
            return f"<[{self.tokens[text]}]>"
        return {ID: "/[A-Za-z0-9_.:-]{1,64}/", NUMBER: "/[0-9]{1,3}/"}.get(text) or quoted(text)
