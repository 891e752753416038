"""What a chat template shows of a model's formats, found by rendering planted conversations.

Two renderings that differ in one planted thing show what stands around it: where their texts agree
is the format, where they differ is what was planted. Nothing is known of any model; formats that a
template does not show, or that are no texts around a name and arguments, are known by the marks in
`NAMED`.

Templates are untrusted here: this runs in the process of `template_sandbox`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.engine.chat_formats.call_format import CallFormat, call_format_of
from penstock.engine.chat_formats.reasoning import ReasoningFormat
from penstock.engine.chat_formats.tool_format import (
    ARGUMENTS,
    ID,
    KEY,
    NAME,
    NUMBER,
    TYPE,
    VALUE,
)
from penstock.engine.errors import InvalidRequestError
from penstock.engine.text.chat_template import ChatTemplate

VERSION = 1  # of what is found, for those who keep it
MAX_CPU_S = 0.25
_NAMES = ("penstock_first", "penstock_second")
_IDS = ("pensto001", "pensto002")  # nine letters and digits, as Mistral's templates insist
_QUESTION, _TEXT, _THOUGHT = "penstock question", "penstock text", "penstock thought"
_RESULT, _SYSTEM = "penstock result", "penstock system"
_STRING, _INTEGER = "penstock value", 4711
_KEYS = ("alpha_key", "beta_key")
_VALUES = {_KEYS[0]: _STRING, _KEYS[1]: _INTEGER}
_TYPED: Mapping[str, Any] = {
    "string": "penstock value", "integer": 4711, "number": 0.5, "boolean": True, "null": None,
    "array": ["penstock value"], "object": {"penstock": 1},
}  # fmt: skip
TOOLS: Sequence[Mapping[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A sample.",
            "parameters": {
                "type": "object",
                "properties": {
                    _KEYS[0]: {"type": "string", "description": "A text."},
                    _KEYS[1]: {"type": "integer", "description": "A number."},
                },
                "required": [_KEYS[0]],
            },
        },
    }
    for name in _NAMES
]
_USER = {"role": "user", "content": _QUESTION}
# Words, markers and single signs: a text that two renderings share ends at such a part's end.
_PART = re.compile(r"<[^<>\s]*>|\[[A-Z_/]+\]|\w+|\s|.", re.DOTALL)
# Formats that renderings do not tell: name → texts of which all are in what a template writes.
NAMED: Mapping[str, tuple[str, ...]] = {
    "openai": ("<|channel|>", "<|message|>"),  # messages in channels, several in an output
    "granite": ("<|start_of_role|>", "<|tool_call|>"),  # told in the system message only
    "lfm2": ("<|im_start|>", "List of tools: "),  # not told at all
}
# Marks of thoughts in templates that never show any.
_UNSHOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("Here is my thought process:", "Here is my response:"),
)
_DUMPED = ("'role'", '"role"')  # by a template that writes messages as they are
_MAX_MARK_CHARS = 200
_MAX_CHARS = 1 << 16  # of a rendering; templates write some thousands
_MAX_TURN_CHARS = 1 << 13  # of an assistant's message
_SWITCHES: Sequence[tuple[str, Any, Any]] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("reasoning", True, False),
    ("reasoning_effort", "high", "none"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """What was found.

    Attributes:
        calls: how calls are written; a name where they are known by `NAMED`; empty: it shows none.
        thoughts: how thoughts are marked.
        opens_thoughts: the template begins the thoughts that it wants itself.
        answer: what is around a message, besides the end of the turn.
        switch: the variable that switches thoughts.
        arguments: what it wants the arguments of calls to be.
        ids: of calls: any, or nine letters and digits.
        joins_thoughts: it refuses a text beside thoughts and a call.
        shows_system, shows_tools, shows_calls, shows_results: it does. Calls, as far as their
            arguments can be read back.
        shows_parallel: it shows all calls of a message.
        shows_calls_beside_text: also of one with a text.
        alternates: it wants the roles of user and assistant to alternate.
    """

    calls: CallFormat | str = ""
    thoughts: ReasoningFormat | None = None
    opens_thoughts: bool = False
    answer: tuple[str, str] = ("", "")
    switch: str = ""
    arguments: str = "object"
    ids: str = "any"
    joins_thoughts: bool = False
    shows_system: bool = True
    shows_tools: bool = True
    shows_calls: bool = True
    shows_results: bool = True
    shows_parallel: bool = True
    shows_calls_beside_text: bool = True
    alternates: bool = False

    def as_fields(self) -> dict[str, Any]:
        """As plain values, for storage."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> TemplateFacts:
        """The inverse of `as_fields`."""
        calls, thoughts = fields["calls"], fields["thoughts"]
        return cls(
            **{
                **fields,
                "calls": calls if isinstance(calls, str) else call_format_of(calls),
                "thoughts": thoughts and ReasoningFormat.from_fields(thoughts),
                "answer": tuple(fields["answer"]),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's templates show.

    Attributes:
        plain, with_tools: those for conversations without tools and with them.
        named: all that have names.
    """

    plain: TemplateFacts = TemplateFacts()
    with_tools: TemplateFacts = TemplateFacts()
    named: Mapping[str, TemplateFacts] = field(default_factory=dict, hash=False)

    def as_fields(self) -> dict[str, Any]:
        """As plain values, for storage."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ModelFacts:
        """The inverse of `as_fields`."""
        return cls(
            plain=TemplateFacts.from_fields(fields["plain"]),
            with_tools=TemplateFacts.from_fields(fields["with_tools"]),
            named={name: TemplateFacts.from_fields(each) for name, each in fields["named"].items()},
        )

    @classmethod
    def found_in(cls, template: ChatTemplate) -> ModelFacts:
        """Those of a model's templates, within `MAX_CPU_S` of this thread's time."""
        end_s = time.thread_time() + MAX_CPU_S

        def found(name: str | None, *, has_tools: bool) -> TemplateFacts:
            source = template.source_for(name, has_tools=has_tools)
            return facts_of(template, source, has_tools=has_tools, end_s=end_s)

        return cls(
            plain=found(None, has_tools=False),
            with_tools=found(None, has_tools=True),
            named={name: found(name, has_tools=True) for name in template.named},
        )


def facts_of(
    template: ChatTemplate,
    source: str | None,
    *,
    has_tools: bool = True,
    end_s: float | None = None,
) -> TemplateFacts:
    """What a template shows, and how.

    Args:
        template: renders it.
        source: None: there is none.
        has_tools: tools are offered, if it shows them.
        end_s: this thread's time at which no more is rendered; None: after `MAX_CPU_S`.
    """
    if source is None:
        return TemplateFacts()
    end_s = time.thread_time() + MAX_CPU_S if end_s is None else end_s
    try:
        return _Discovery(template, source, has_tools=has_tools, end_s=end_s).facts()
    except (ValueError, IndexError, RecursionError):
        return TemplateFacts()  # no template, however strange, may keep its model from serving


class _Discovery:
    """Renders conversations, and compares.

    Args:
        has_tools, end_s: see `facts_of`.
    """

    def __init__(
        self, template: ChatTemplate, source: str, *, has_tools: bool, end_s: float
    ) -> None:
        self._template, self._source = template, source
        self._tools: Sequence[Mapping[str, Any]] | None = TOOLS if has_tools else None
        self._variables: dict[str, Any] = {}
        self._as_text = False
        self._ids = _IDS
        self._end_s = end_s

    # -- rendering ---------------------------------------------------------------------------

    def _render(
        self, *messages: Mapping[str, Any], prompts: bool = False, **variables: Any
    ) -> str | None:
        """None: the template refuses, or there is no time left."""
        left_s = self._end_s - time.thread_time()
        if left_s <= 0:
            return None
        try:
            text = self._template.render(
                messages,
                add_generation_prompt=prompts,
                template=self._source,
                kwargs={"tools": self._tools, **self._variables, **variables},
                max_cpu_s=left_s,
            )
        except InvalidRequestError:
            return None
        return text if len(text) <= _MAX_CHARS and "\0" not in text else None

    def _message(
        self,
        content: Any = "",
        *,
        calls: Sequence[Mapping[str, Any]] = (),
        thoughts: str = "",
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {
                        "name": name,
                        "arguments": json.dumps(each) if self._as_text else each,
                    },
                }
                for call_id, name, each in zip(self._ids, _NAMES, calls, strict=False)
            ]
        return message

    def _turn(self, content: Any = "", **options: Any) -> str | None:
        """What the template writes of an assistant's message after a question, its head included;
        None if it does not write it."""
        text = self._render(_USER, self._message(content, **options))
        if text is None or _QUESTION not in text:
            return None
        turn = text.rpartition(_QUESTION)[2]
        return turn if len(turn) <= _MAX_TURN_CHARS else None

    # -- finding -----------------------------------------------------------------------------

    def facts(self) -> TemplateFacts:
        wants_tools = self._tools is not None
        shown = self._render(_USER, prompts=True)
        shows_tools = wants_tools and _NAMES[1] in (shown or "")
        if not shows_tools:
            self._tools = None
            shown = self._render(_USER, prompts=True)
            if shown is None:  # it wants something else: then nothing can be found
                return TemplateFacts()
        assert shown is not None
        switch = self._switched(shown)
        prompt = self._render(_USER, prompts=True) or shown
        opened = prompt.rpartition(_QUESTION)[2]
        answer = self._turn(_TEXT) or opened + _TEXT
        if any(name in answer for name in _DUMPED):
            return TemplateFacts(shows_tools=shows_tools or not wants_tools)
        thoughts = self._thoughts(opened, answer) or self._unshown_thoughts(opened, prompt)
        system = self._render({"role": "system", "content": _SYSTEM}, _USER)
        facts = TemplateFacts(
            thoughts=thoughts,
            switch=switch,
            opens_thoughts=thoughts is not None and opened.rstrip().endswith(thoughts.begins),
            answer=_around(answer, opened, thoughts),
            alternates=self._turn(_TEXT) is not None and self._render(_USER, _USER) is None,
            shows_system=_SYSTEM in (system or ""),
            shows_tools=shows_tools or not wants_tools,
        )
        return self._with_calls(facts, opened, answer, shown)

    def _switched(self, prompt: str) -> str:
        """The variable that switches thoughts, which are on from then on."""
        for name, on, off in _SWITCHES:
            both = [self._render(_USER, prompts=True, **{name: value}) for value in (on, off)]
            if both[0] is not None and {*both} - {None, prompt}:
                self._variables = {name: on}
                return name
        return ""

    def _thoughts(self, opened: str, answer: str) -> ReasoningFormat | None:
        """How thoughts are marked, as far as the template shows earlier ones."""
        before_text = answer.partition(_TEXT)[0]
        parts = [
            {"type": "thinking", "thinking": _THOUGHT},
            {"type": "text", "text": _TEXT},
        ]
        called = self._turn("", calls=[_VALUES]) or ""
        for turn, until, plain in (
            (self._turn(_TEXT, thoughts=_THOUGHT), _TEXT, before_text),
            (self._turn("", thoughts=_THOUGHT, calls=[_VALUES]), _NAMES[0], called),
            (self._turn(parts), _TEXT, before_text),
        ):
            begun, found, rest = (turn or "").partition(_THOUGHT)
            rest, is_there, _ = rest.partition(until)
            if not (found and is_there) or re.search("['\"]type['\"]", begun):
                continue
            plain = plain.partition(until)[0]
            end = _without_end(rest, plain[len(_common_start(plain, opened)) :]) or rest
            begins, ends = _PART.findall(begun), _PART.findall(rest)
            if len(begins) > 2 and len(ends) > 2 and ends[1] == begins[-2] and ends[1].isalpha():
                # A mark of three tokens, such as `<|open|>think<|sep|>`.
                return ReasoningFormat(begins=("".join(begins[-3:]),), end="".join(ends[:3]))
            if end == rest and end.lstrip().startswith("<"):
                end = _PART.findall(end.lstrip())[0] if _plain_start(plain, rest) else end
            after_plain = begun[len(_common_start(begun, plain)) :].strip()
            after_prompt = begun[len(_common_start(begun, opened)) :].strip()
            longest = after_prompt if after_prompt.endswith(after_plain) else after_plain
            in_prompt = opened[len(_common_start(opened, begun)) :].strip()
            begin = longest or after_prompt or in_prompt or "".join(begins).split()[-1]
            begin = (
                _PART.findall(begin)[-1] if not (longest or after_prompt or in_prompt) else begin
            )
            if begin and end.strip() and len(begin) + len(end) < _MAX_MARK_CHARS:
                return ReasoningFormat(begins=(begin,), end=end.strip())
        return None

    def _unshown_thoughts(self, opened: str, prompt: str) -> ReasoningFormat | None:
        """Of a template that shows no earlier thoughts: those that it takes out of a text, those
        that a prompt begins, and those of which it tells the model."""
        following = {"role": "user", "content": "penstock next"}
        for begin, end in _UNSHOWN:
            text = f"{begin}\n{_THOUGHT}\n{end}\n\n{_TEXT}"
            turn = self._render(_USER, self._message(text), following) or ""
            is_dropped = _TEXT in turn and _THOUGHT not in turn
            is_told = end in prompt and begin in prompt
            if is_dropped or is_told or opened.rstrip().endswith((begin, end)):
                return ReasoningFormat(begins=(begin,), end=end)
        return None

    def _with_calls(
        self, facts: TemplateFacts, opened: str, answer: str, shown: str
    ) -> TemplateFacts:
        """With what is found of calls and their results."""
        for as_text in (False, True):
            self._as_text = as_text
            one = self._turn("", calls=[_VALUES])
            if one is None or _NAMES[0] not in one:
                continue
            calls = _named(one) or self._calls(one, opened, answer, facts)
            if isinstance(calls, str):  # its parser finds thoughts and messages too
                facts = replace(facts, thoughts=None, opens_thoughts=False, answer=("", ""))
            if calls:
                return self._with_history(
                    replace(facts, calls=calls, arguments="text" if as_text else "object")
                )
        return replace(
            facts,
            calls=_named(shown) if facts.shows_tools else "",
            shows_calls=False,
            shows_results=self._shows_results(),
        )

    def _with_history(self, facts: TemplateFacts) -> TemplateFacts:
        two = self._turn("", calls=[_VALUES, _VALUES]) or ""
        beside = self._turn(_TEXT, calls=[_VALUES], thoughts=_THOUGHT)
        with_text = self._turn(_TEXT, calls=[_VALUES]) or ""
        shows_results = self._shows_results()
        self._ids = ("call_of_penstock_1", "call_of_penstock_2")
        wants_short_ids = self._turn("", calls=[_VALUES]) is None
        return replace(
            facts,
            shows_parallel=all(name in two for name in _NAMES),
            joins_thoughts=beside is None,
            shows_calls_beside_text=_NAMES[0] in with_text,
            shows_results=shows_results,
            ids="short" if wants_short_ids else "any",
        )

    def _shows_results(self) -> bool:
        result = {"role": "tool", "tool_call_id": _IDS[0], "name": _NAMES[0], "content": _RESULT}
        whole = self._render(_USER, self._message("", calls=[_VALUES]), result)
        return _RESULT in (whole or "")

    # -- calls -------------------------------------------------------------------------------

    def _calls(self, one: str, opened: str, answer: str, facts: TemplateFacts) -> CallFormat | None:
        """The format of calls; None if it is none that can be read back."""
        style = self._arguments(one)
        if style is None:
            return None
        # The same number of holes in each call tells where the second one begins.
        texts = _HOLES.split(_holed(one, style))
        holes, before, after = texts[1::2], texts[0], texts[-1]
        if NAME not in holes or ARGUMENTS not in holes:
            return None
        two = self._turn("", calls=[_VALUES, _VALUES]) or ""
        both = _HOLES.split(_holed(two, style))
        before_text, _, end_of_turn = answer.partition(_TEXT)
        bare = before[len(_common_start(before, before_text)) :]
        bare = bare if bare.strip() else before[len(_common_start(before, opened)) :]
        bare = _without_thought(bare, facts.thoughts)
        between = last = first = ""
        within = texts[1:-1]
        if both[1::2] == [*holes, *holes]:
            apart, again = both[2 * len(holes)], both[2 * len(holes) + 1 : -1]
            end = _common_start(apart, after)
            apart, rest = apart[len(end) :], after[len(end) :]
            begin = _common_end(bare, apart)
            first, begin = bare[: len(bare) - len(begin)], _numbered(begin, apart)
            between = apart[: len(apart) - len(begin)]  # a number is one digit
            within = [_numbered(a, b) for a, b in zip(within, again, strict=True)]
            last = _last(_without_end(rest, end_of_turn), first)
        else:
            begin, end = bare, _without_end(after, end_of_turn)
        if facts.answer[0]:
            first = first[len(_common_start(first, end_of_turn)) :]
        if not first.strip():
            bare = begin.lstrip()
            first, begin, between = "", bare, between + begin[: len(begin) - len(bare)]
        return replace(
            style,
            call=f"{begin}{''.join(within)}{end}",
            first=first.lstrip(),
            between=between,
            last=last,
        )

    def _arguments(self, one: str) -> CallFormat | None:
        """How arguments are written, in a format of which the call is not known yet."""
        for begin, end in _json_spans(one):
            return CallFormat(call="", separator="\n" if "\n" in one[begin:end] else "")
        begun, found, rest = one.partition(_KEYS[0])
        sign, is_text, rest = rest.partition(_STRING)
        apart, is_second, rest = rest.partition(_KEYS[1])
        other_sign, is_number, rest = rest.partition(str(_INTEGER))
        _, is_called, begun = begun.rpartition(_NAMES[0])
        if not (found and is_text and is_second and is_number and is_called):
            return None
        quote = sign.removeprefix(other_sign) if sign.startswith(other_sign) else ""
        if quote and apart.startswith(quote):
            sign, apart = other_sign, apart.removeprefix(quote)
        else:
            quote = ""
        apart, rest = apart.replace(_KEYS[0], KEY, 1), rest.replace(_KEYS[1], KEY, 1)
        value_end = _common_start(apart, rest)
        apart = apart[len(value_end) :]
        key_begin = _common_end(begun, apart)
        separator = apart[: len(apart) - len(key_begin)]
        if separator.strip().startswith(","):
            if key_begin.strip():
                return None  # Python's repr of an object
            return CallFormat(
                call="",
                arguments="literals",
                argument=f"{KEY}{sign}{VALUE}",
                separator=separator,
                quote=quote or '"',
            )
        types: tuple[tuple[str, str], ...] = ()
        if sign != other_sign:
            start, until = _common_start(sign, other_sign), _common_end(sign, other_sign)
            if not (start and until):
                return None
            types = self._types(start, until)
            sign = f"{start}{TYPE}{until}"
        return CallFormat(
            call="",
            arguments="tags",
            argument=f"{key_begin}{KEY}{sign}{VALUE}{value_end}",
            separator=separator,
            quote="'" if self._writes_python() else "",
            types=types,
        )

    def _writes_python(self) -> bool:
        """Whether lists are written as Python's, and not as JSON."""
        return f"['{_STRING}']" in (self._turn("", calls=[{_KEYS[0]: [_STRING]}]) or "")

    def _types(self, start: str, end: str) -> tuple[tuple[str, str], ...]:
        """What a template writes for each JSON type, between two texts after an argument's name."""
        found = []
        for kind, value in _TYPED.items():
            turn = self._turn("", calls=[{_KEYS[0]: value}]) or ""
            rest = turn.partition(_KEYS[0] + start)[2]
            text, is_there, _ = rest.partition(end)
            if is_there:
                found.append((kind, text))
        return tuple(found)


_HOLES = re.compile(f"([{NAME}{ID}{ARGUMENTS}])")


def _holed(text: str, style: CallFormat) -> str:
    """A rendering with holes for ids, names and arguments."""
    if style.arguments == "json":
        spans = _json_spans(text)
    else:
        before, after = style.argument.split(VALUE)
        after = after.replace(KEY, _KEYS[1])
        if style.arguments == "literals":
            before, after = KEY, ""
        size = len(before.partition(KEY)[0])
        spans, at = [], 0
        while (begin := text.find(_KEYS[0], at)) >= 0:
            number_at = text.find(str(_INTEGER), begin)
            if number_at < 0:
                break
            at = number_at + len(str(_INTEGER)) + len(after)
            spans.append((begin - size, at))
    for begin, end in reversed(spans):
        text = text[:begin] + ARGUMENTS + text[end:]
    for known, hole in ((_NAMES, NAME), (_IDS, ID)):
        for each in known:
            text = text.replace(each, hole)
    return text


def _json_spans(text: str) -> list[tuple[int, int]]:
    """Where the planted arguments stand as JSON."""
    spans, at = list[tuple[int, int]](), 0
    while (at := text.find("{", at)) >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        if value == _VALUES:
            spans.append((at, end))
            at = end
        else:
            at += 1
    return spans


def _common_start(text: str, other: str) -> str:
    """The parts with which both texts begin."""
    size = 0
    for a, b in zip(_PART.findall(text), _PART.findall(other), strict=False):
        if a != b:
            break
        size += len(a)
    return text[:size]


def _common_end(text: str, other: str) -> str:
    """The parts with which both texts end; numbers may differ. As the first text has them."""
    size = 0
    ends = zip(reversed(_PART.findall(text)), reversed(_PART.findall(other)), strict=False)
    for a, b in ends:
        if a != b and not (a.isdigit() and b.isdigit()):
            break
        size += len(a)
    return text[len(text) - size :]


def _numbered(text: str, other: str) -> str:
    """The text with a hole where the other one, which ends with it, has another number."""
    parts = _PART.findall(text)
    others = _PART.findall(other)[-len(parts) :] if parts else []
    return "".join(
        a if a == b or not a.isdigit() else NUMBER for a, b in zip(parts, others, strict=False)
    )


def _without_end(text: str, other: str) -> str:
    """The text without the parts with which both end, white space aside."""
    text = text.rstrip()
    return text[: len(text) - len(_common_end(text, other.rstrip()))]


def _last(text: str, first: str) -> str:
    """What is behind all calls: as many markers as are before them. More belong to the turn."""
    num = sum(map(_is_marker, _PART.findall(first)))
    if not first.strip():
        return ""
    parts, kept = _PART.findall(text), list[str]()
    while parts and (num or not any(map(_is_marker, parts))):
        num -= _is_marker(parts[0])
        kept.append(parts.pop(0))
    return "".join(kept)


def _is_marker(part: str) -> bool:
    return len(part) > 2 and not part.isalnum()


def _plain_start(plain: str, rest: str) -> bool:
    """Whether all of a text stands in one without thoughts too, after an empty one."""
    return plain.endswith(rest)


def _without_thought(text: str, thoughts: ReasoningFormat | None) -> str:
    """The text without an empty thought before it."""
    if thoughts is None:
        return text
    begin = "|".join(map(re.escape, thoughts.begins))
    return re.sub(rf"^\s*({begin})?\s*{re.escape(thoughts.end)}\s*", "", text)


def _around(answer: str, opened: str, thoughts: ReasoningFormat | None) -> tuple[str, str]:
    """What is before and after an answer, where the model writes something before it."""
    before, _, after = answer.partition(_TEXT)
    begin = _without_thought(before[len(_common_start(before, opened)) :], thoughts).strip()
    if not begin or len(begin) > _MAX_MARK_CHARS or opened.rstrip().endswith(begin):
        return "", ""
    ends = [part for part in _PART.findall(after) if not part.isspace()]
    return begin, ends[0] if ends else ""


def _named(text: str) -> str:
    """The format that is known by its marks in a text."""
    fitting = (name for name, marks in NAMED.items() if all(mark in text for mark in marks))
    return next(fitting, "")
