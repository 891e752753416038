"""A loop of calls in a chat template: three turns with each kind of argument, read back as the
model would write them, and accepted by the grammar.

`faults_of` says what is wrong with a template; "" as the name of a formats' value is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.chat_formats import (
    ModelFormats,
    OfferedTools,
    OutputItem,
    OutputParser,
    Tool,
    items_of,
    template_messages,
    tool_format_of,
)
from penstock.engine.chat_formats.template_facts import (
    ModelFacts,
    TemplateFacts,
    _common_start,
    _without_end,
)
from penstock.engine.errors import InvalidRequestError
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.text.chat_template import ChatTemplate
from penstock.engine.text.tokenizer import Tokenizer

_TYPES = ("string", "integer", "number", "boolean", "array", "object")
FILE = Tool(
    "write_file",
    "Writes a file.",
    {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "A path."},
            **{
                f"{kind}_value": {
                    "type": kind,
                    "description": f"A {kind}.",
                    **({"additionalProperties": {}} if kind == "object" else {}),
                }
                for kind in _TYPES
            },
        },
        "required": ["path"],
    },
)
CLOCK = Tool("get_time", "The time.", {"type": "object", "properties": {}})
TOOLS = (FILE, CLOCK)
QUESTION, TEXT, THOUGHT, ANSWER = "What now?", "Let me see.", "I need a tool.", "All is done."
Call = tuple[str, Mapping[str, Any]]
CALLS: Sequence[Call] = (
    ("write_file", {"path": "a.txt", "string_value": 'It\'s "quoted": {x} [y] < 5 & more > 3'}),
    ("write_file", {"path": "b.txt", "string_value": "line 1\n\tline 2\nüñ 日本 😀 \\n"}),
    (
        "write_file",
        {"path": "c.txt", "integer_value": -7, "number_value": 0.5, "boolean_value": True},
    ),
    (
        "write_file",
        {"path": "d.txt", "array_value": ["x", 1], "object_value": {"k": ["v"], "n": 2}},
    ),
    ("write_file", {"path": "e.txt"}),
    ("get_time", {}),
)


@dataclass(frozen=True)
class Loop:
    """A template, and what was found of it."""

    template: ChatTemplate
    formats: ModelFormats = field(init=False)

    def __post_init__(self) -> None:
        found = ModelFacts.found_in(self.template)
        object.__setattr__(self, "formats", ModelFormats.of(found, {}))

    @property
    def facts(self) -> TemplateFacts:
        return self.formats.facts.with_tools

    @property
    def opening(self) -> str:
        """What begins a call."""
        return (*tool_format_of(self.formats.tools).openings, "")[0]

    def render(self, messages: Sequence[Mapping[str, Any]], *, prompts: bool = True) -> str:
        offered = OfferedTools(tools=TOOLS)
        shown, tools = self.formats.for_template(messages, offered.for_template)
        return self.template.render(
            template_messages(shown, self.facts),
            add_generation_prompt=prompts,
            kwargs={
                "tools": tools,
                **({self.facts.switch: _ON[self.facts.switch]} if self.facts.switch else {}),
            },
        )


_ON = {"enable_thinking": True, "thinking": True, "reasoning": True, "reasoning_effort": "high"}


def message(
    content: str = "", calls: Sequence[Call] = (), thoughts: str = "", first_id: int = 0
) -> dict[str, Any]:
    """An assistant's message in the API's form."""
    made: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        made["reasoning_content"] = thoughts
    if calls:
        made["tool_calls"] = [
            {
                "id": f"call{first_id + number:05}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(each, ensure_ascii=False)},
            }
            for number, (name, each) in enumerate(calls)
        ]
    return made


def conversation() -> list[dict[str, Any]]:
    """Three turns."""

    def result(number: int, name: str) -> dict[str, Any]:
        call_id = f"call{number:05}"
        return {"role": "tool", "tool_call_id": call_id, "name": name, "content": f"<r{number}>"}

    user = {"role": "user", "content": QUESTION}
    return [
        user,
        message(TEXT, CALLS[:1], THOUGHT),
        result(0, CALLS[0][0]),
        message("", CALLS[1:3], first_id=1),
        result(1, CALLS[1][0]),
        result(2, CALLS[2][0]),
        message(ANSWER),
        user,
        message("", CALLS[5:], first_id=3),
        result(3, CALLS[5][0]),
        message(ANSWER),
        user,
    ]


def faults_of(
    source: str, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> tuple[Loop, list[str]]:
    """What was found of a template, and what is wrong with it."""
    loop = Loop(ChatTemplate(source, {"bos_token": "<BOS>", "eos_token": "<EOS>"}))
    return loop, list(_faults(loop, compiler, tokenizer))


def _faults(loop: Loop, compiler: GrammarCompiler, tokenizer: Tokenizer) -> Iterator[str]:
    try:
        system = [{"role": "system", "content": "Be brief."}] if loop.facts.shows_system else []
        whole = loop.render([*system, *conversation()])
    except InvalidRequestError as error:
        yield f"the loop does not render: {error}"
        return
    for text in ("write_file", "get_time", "a.txt", "<r0>", "<r1>", "<r2>", "<r3>"):
        if text not in whole:
            yield f"the loop does not show {text!r}"
    for call in CALLS:
        yield from _read_back(loop, message("", [call]), [call], compiler, tokenizer)
    if loop.facts.shows_parallel:
        yield from _read_back(loop, message("", CALLS[:2]), CALLS[:2], compiler, tokenizer)
    if loop.facts.shows_calls_beside_text:
        for thoughts in ("", THOUGHT):
            told = message(TEXT, CALLS[4:5], thoughts)
            yield from _read_back(loop, told, CALLS[4:5], None, tokenizer)
    yield from _read_back(loop, message("", CALLS[4:5], THOUGHT), CALLS[4:5], None, tokenizer)
    yield from _read_back(loop, message(ANSWER), [], None, tokenizer)
    yield from _read_back(loop, message(ANSWER, thoughts=THOUGHT), [], None, tokenizer)


def _read_back(
    loop: Loop,
    told: Mapping[str, Any],
    calls: Sequence[Call],
    compiler: GrammarCompiler | None,
    tokenizer: Tokenizer,
) -> Iterator[str]:
    user = {"role": "user", "content": QUESTION}
    prompt = loop.render([user])
    try:
        whole = loop.render([user, told], prompts=False)
        end = loop.render([user, message(ANSWER)], prompts=False).rpartition(ANSWER)[2]
    except InvalidRequestError as error:
        yield f"{told} does not render: {error}"
        return
    begun = _common(prompt, whole)
    text = whole[len(begun) :]
    tail = prompt.rpartition("<")[2]
    if begun != prompt and tail and text.startswith(f"<{tail}"):
        begun, text = prompt, text[len(tail) + 1 :]  # what comes before it differs
    thoughts = loop.facts.thoughts
    if thoughts is not None and text.lstrip().startswith(thoughts.end):
        begun = prompt  # which begins a thought that is empty
    if thoughts is not None and prompt.rstrip().endswith(thoughts.begins):
        before = text.partition(thoughts.end)[0]
        if THOUGHT in before and not any(each in before for each in thoughts.begins):
            begun = prompt  # earlier thoughts are not marked as those that it begins
    if not calls:
        text = text.rpartition(ANSWER)[0] + ANSWER + ("" if loop.facts.answer[0] == "" else end)
    syntax = loop.formats.syntax_after(begun, has_tools=True)
    if calls:
        text = _without_end(text, end)
    said = [("reasoning", told.get("reasoning_content", "")), ("message", told["content"])]
    if loop.facts.joins_thoughts and calls:  # a text beside a call is a thought, too
        said = [("reasoning", "\n\n".join(each for _, each in said if each))]
    expected = [
        OutputItem(kind, each)
        for kind, each in said
        if each and each in (text.partition(calls[0][0])[0] if calls else text)
    ]
    expected += [OutputItem("function_call", _json(each), name) for name, each in calls]

    def read(*parts: str) -> list[OutputItem]:
        parser = OutputParser(syntax, TOOLS)
        pieces = [piece for part in parts for piece in parser.push(part)]
        items = items_of([*pieces, *parser.end()])
        return [
            OutputItem(item.kind, _json(item.text) if item.name else item.text.strip(), item.name)
            for item in items
            if item.text.strip()
        ]

    whole_items = read(text)
    if sorted(whole_items, key=str) != sorted(expected, key=str):
        yield f"{text!r} is read as {whole_items}, not {expected}"
        return
    for cut in range(1, len(text)):
        if read(text[:cut], text[cut:]) != whole_items:
            yield f"{text[:cut]!r} + {text[cut:]!r} is read otherwise"
            return
    if read(*text) != whole_items:
        yield f"{text!r} is read otherwise, character by character"
    if compiler is not None:
        if thoughts is not None:
            marks = "|".join(map(re.escape, thoughts.begins))
            empty = rf"^\s*({marks})?\s*{re.escape(thoughts.end)}"
            text, begun = re.sub(empty, "", text), f"{begun}{thoughts.begins[0]}{thoughts.end}"
        for around in loop.facts.answer:
            text = text.lstrip().removeprefix(around)
        if loop.facts.answer[0]:
            text = text[max(text.find(loop.opening), 0) :]
        yield from _not_accepted(loop, begun, text.lstrip(), calls, compiler, tokenizer)


def _not_accepted(
    loop: Loop,
    prompt: str,
    text: str,
    calls: Sequence[Call],
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
) -> Iterator[str]:
    offered = OfferedTools(tools=TOOLS, choice="required")
    output_format = offered.output_format(loop.formats, prompt)
    assert output_format is not None
    grammar = offered.grammar(output_format, loop.formats, None)
    assert grammar is not None
    matcher = compiler.matcher(grammar)

    def taken(text: str) -> int:
        token_ids = [each for part in text for each in tokenizer.encode(part)]
        num_taken = matcher.validate_tokens(token_ids)
        return len(tokenizer.decode(token_ids[:num_taken]).encode().decode(errors="ignore"))

    name, values = calls[0]
    del values
    must = max(text.rfind(calls[-1][0]), *(text.rfind(str(v)) for v in calls[-1][1].values()), 0)
    if max(taken(text), taken(f" {text}")) < must:
        yield f"the grammar takes {text[: taken(text)]!r} of {text!r}"
    wrong = text.replace(name, "another_name")
    if taken(wrong) >= wrong.find("another_name") + len("another_name"):
        yield f"the grammar takes another name in {wrong!r}"


def _json(value: Any) -> str:
    """Arguments in one form."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _common(prompt: str, whole: str) -> str:
    """The part of a prompt that the model's answer continues here."""
    if whole.startswith(prompt):
        return prompt
    at = prompt.rfind(QUESTION)
    begin = whole.rfind(QUESTION)
    return whole[:begin] + _common_start(whole[begin:], prompt[at:])


def written(loop: Loop, told: Mapping[str, Any]) -> str:
    """What a model would write for a message, without the end of its turn."""
    user = {"role": "user", "content": QUESTION}
    whole = loop.render([user, told], prompts=False)
    end = loop.render([user, message(ANSWER)], prompts=False).rpartition(ANSWER)[2]
    prompt = loop.render([user])
    text = whole[len(_common(prompt, whole)) :]
    if prompt.rstrip().endswith("</think>"):
        text = text.rpartition("</think>")[2]
    around = loop.facts.answer[1]
    return _without_end(text, end) + (around if around and not told.get("tool_calls") else "")
