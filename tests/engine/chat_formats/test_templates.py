"""What is found of chat templates, and what they want of earlier calls."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.chat_formats import (
    ModelFacts,
    ModelFormats,
    OutputFormat,
    OutputSyntax,
    ReasoningFormat,
    TemplateFacts,
    template_messages,
    with_known_effort,
)
from penstock.engine.chat_formats.template_facts import MAX_CPU_S, facts_of
from penstock.engine.text.chat_template import ChatTemplate

from .published_templates import TEMPLATES

THINK = ReasoningFormat(begins=("<think>",), end="</think>")
# A template of thoughts that a variable switches; {} is how its prompts end where they are on.
THINKING = (
    "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% if enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% else %}@{% endif %}{%- endif -%}"
)


def facts_in(source: str) -> TemplateFacts:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return facts_of(ChatTemplate(source, special), source)


@pytest.mark.parametrize(
    ("end", "prompt", "syntax"),
    [
        ("", "…assistant\n", OutputSyntax("hermes", THINK)),
        ("", "…assistant\n<think>\n\n</think>\n\n", OutputSyntax("hermes")),
        ("<think>\n", "…assistant\n<think>\n", OutputSyntax("hermes", THINK, True)),
        ("<think>\n", "…assistant\n", OutputSyntax("hermes")),
    ],
)
def test_the_end_of_the_prompt_tells_the_rest(end: str, prompt: str, syntax: OutputSyntax) -> None:
    template = ChatTemplate(THINKING.replace("@", end), {})
    formats = ModelFormats.of(ModelFacts.found_in(template), {})
    assert formats.facts.plain.thoughts == THINK
    assert formats.facts.plain.switch == "enable_thinking"
    assert formats.syntax_after(prompt, has_tools=True) == syntax


def test_a_model_of_deepseek_r1_always_thinks() -> None:
    formats = ModelFormats(reasoning="deepseek_r1")
    syntax = formats.syntax_after("…<｜Assistant｜>", has_tools=False)
    assert syntax == OutputSyntax("", "deepseek_r1", True)


def test_what_was_found_can_be_kept() -> None:
    for source in TEMPLATES.values():
        special = {"bos_token": "<s>", "eos_token": "</s>"}
        found = ModelFacts.found_in(ChatTemplate(source, special))
        assert ModelFacts.from_fields(found.as_fields()) == found


def test_a_stored_response_is_read_in_the_format_that_was_found() -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    for source in TEMPLATES.values():
        formats = ModelFormats.of(ModelFacts.found_in(ChatTemplate(source, special)), {})
        syntax = OutputSyntax(formats.tools, THINK, True, ("<answer>", "</answer>"))
        kept = json.loads(json.dumps(OutputFormat(syntax=syntax).as_fields()))
        assert OutputFormat.from_fields(kept).syntax == syntax
    old = {"syntax": ["hermes", "qwen3", False], "tools": [], "custom": [], "aliases": {}}
    read = OutputFormat.from_fields({**old, "max_calls": None})
    assert read.syntax == OutputSyntax("hermes", "qwen3")


def _history(call_id: str = "call_1", *names: str) -> list[dict[str, Any]]:
    calls = [
        {
            "id": call_id + name[1:],
            "type": "function",
            "function": {"name": name[:1], "arguments": "{}"},
        }
        for name in names or ("f",)
    ]
    if not names:
        calls[0]["function"]["arguments"] = '{"a": 1}'  # type: ignore[index]
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": each["id"], "content": "y"} for each in calls),
    ]


@pytest.mark.parametrize(("kind", "arguments"), [("object", {"a": 1}), ("text", '{"a": 1}')])
def test_arguments(kind: str, arguments: Any) -> None:
    messages = template_messages(_history(), TemplateFacts(arguments=kind))
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]


def test_arguments_are_objects_unless_a_template_wants_text() -> None:
    calls = (
        "{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<c>{{ c.function.name }}"
    )
    for end, kind in (
        ("|{{ c.function.arguments | tojson }}</c>{% endfor %}{% endfor %}", "object"),
        ("|{{ c.function.arguments }}</c>{% endfor %}{% endfor %}", "text"),
        ("|{{ '' + c.function.arguments }}</c>{% endfor %}{% endfor %}", "text"),
    ):
        assert facts_in("{{ tools | tojson }}" + calls + end).arguments == kind


def test_ids() -> None:
    facts = facts_in(TEMPLATES["mistral-0.3"])
    _, called, result = template_messages(_history(), facts)
    short = called["tool_calls"][0]["id"]
    assert (len(short), short.isalnum(), result["tool_call_id"]) == (9, True, short)
    _, called, result = template_messages(_history("abcdefghi"), facts)
    assert called["tool_calls"][0]["id"] == result["tool_call_id"] == "abcdefghi"


def test_calls_of_a_message_are_apart_where_a_template_shows_one() -> None:
    told = _history("call", "f1", "g2")
    shown = template_messages(told, TemplateFacts(shows_parallel=False))
    assert [each["role"] for each in shown] == ["user", "assistant", "tool", "assistant", "tool"]
    assert [each["tool_call_id"] for each in shown if each["role"] == "tool"] == ["call1", "call2"]
    assert len(template_messages(told, TemplateFacts())) == 4


def test_a_text_beside_thoughts_is_a_thought_where_a_template_refuses_both() -> None:
    user, called, result = _history()
    message = {**called, "content": "Let me see.", "reasoning_content": "A tool."}
    facts = TemplateFacts(joins_thoughts=True)
    [_, shown, _] = template_messages([user, message, result], facts)
    assert (shown["content"], shown["reasoning_content"]) == ("", "A tool.\n\nLet me see.")
    [_, shown, _] = template_messages([user, message, result], replace(facts, joins_thoughts=False))
    assert (shown["content"], shown["reasoning_content"]) == ("Let me see.", "A tool.")


@pytest.mark.parametrize(
    ("effort", "shown"), [("none", "low"), ("low", "low"), ("max", "high"), (["x"], ["x"])]
)
def test_efforts(effort: Any, shown: Any) -> None:
    variables = {"reasoning_effort": effort, "enable_thinking": True}
    assert with_known_effort(variables, "hermes") == variables
    known = with_known_effort(variables, "openai")
    assert known == {**variables, "reasoning_effort": shown}


def test_messages_without_calls_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert template_messages(messages, TemplateFacts(ids="short")) is messages


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) %}{{ messages }}{{ tools }}{% endfor %}",
        "{{ messages | tojson }}{{ tools | tojson }}{{ range(99) | random }}",
        "{{ raise_exception('no') }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% for m in messages %}{{ m }}{{ tools }}{% endfor %}" * 20,
        "",
    ],
)
def test_hostile_templates_are_bounded(source: str) -> None:
    """Their conversations may be refused; the search ends."""
    begun_s = time.thread_time()
    facts_in(source)
    assert time.thread_time() - begun_s < 4 * MAX_CPU_S
