"""Tools reach the model whatever its chat template shows of them, and so do calls and results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine.chat_formats import (
    TOOL_FORMATS,
    ModelFacts,
    ModelFormats,
    OfferedTools,
    OutputParser,
    OutputSyntax,
    Tool,
    items_of,
    template_messages,
)
from penstock.engine.demo.vocabulary import CHAT_TEMPLATE
from penstock.engine.text import ChatTemplate

from ...gateway.conftest import TEMPLATE
from ...gateway.generation.test_prompt_ids import QWEN_STYLE
from .published_templates import TEMPLATES

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = (Tool("weather", "of a city", SCHEMA), Tool("now", "the time"))
OFFERED = OfferedTools(tools=TOOLS)
ALL = {**TEMPLATES, "demo": CHAT_TEMPLATE, "gateway": TEMPLATE, "dialogue": QWEN_STYLE}
ARGUMENTS = '{"city": "Bad \\"Ems\\"", "days": 3}'


def call(name: str, arguments: str = "{}", number: int = 1) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def result(text: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def assistant(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        **({"tool_calls": list(calls)} if calls else {}),
    }


HISTORY = [
    {"role": "user", "content": "How is the weather?"},
    assistant("Let me see.", call("weather", ARGUMENTS), call("now", number=2)),
    result("rain, 9 °C"),
    result("noon", 2),
    assistant("It rains at noon."),
    {"role": "user", "content": "And now?"},
    assistant("", call("now", number=3)),
    result("evening", 3),
]


def formats_of(source: str, *, tools: str | None = None) -> ModelFormats:
    found = ModelFacts.found_in(ChatTemplate(source, SPECIAL))
    return ModelFormats.of(found, {}, tools=tools)


def prompt(
    source: str, messages: list[dict[str, Any]], *, tools: Any = OFFERED.for_template
) -> str:
    formats = formats_of(source)
    facts = formats.facts_for(has_tools=bool(tools))
    shown, offered = formats.for_template(messages, tools)
    return ChatTemplate(source, SPECIAL).render(
        template_messages(shown, facts), kwargs={"tools": offered}
    )


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_tools_are_in_the_prompt(name: str, system: str) -> None:
    """Once, with what the caller says."""
    messages = [{"role": "user", "content": "How is it?"}]
    if system and name != "mistral-0.3":  # which shows tools, and no system message
        messages.insert(0, {"role": "system", "content": system})
    text = prompt(ALL[name], messages)
    assert text.count("weather") == 1
    assert all(each["content"] in text for each in messages)
    for tool in TOOLS:
        assert tool.name in text
    if name not in ("demo", "qwen2.5", "mistral-0.3"):
        assert json.dumps(SCHEMA) in text


@pytest.mark.parametrize("name", ALL)
def test_histories_are_in_the_prompt(name: str) -> None:
    for messages in (HISTORY, HISTORY[:4], HISTORY[:6]):
        for tools in (OFFERED.for_template, None):
            text = prompt(ALL[name], messages, tools=tools)
            said = ["How is the weather?", "rain, 9 °C", "noon", "Let me see."]
            if name == "mistral-0.3":  # drops text beside calls
                said.pop()
            places = [text.find(each) for each in said]
            assert -1 not in places, said[places.index(-1)]
            assert '"Bad \\"Ems\\""' in text


def test_what_a_template_shows_is_left_to_it() -> None:
    for name in ("demo", "qwen2.5", "mistral-0.3"):
        formats = formats_of(ALL[name])
        tools = OFFERED.for_template
        assert formats.for_template(HISTORY, tools) == (HISTORY, tools)
    plain = [{"role": "user", "content": "Hi"}]
    formats = formats_of(ALL["gemma-2"])
    assert formats.for_template(plain, None)[0] is plain


def test_the_text_is_that_of_qwen() -> None:
    """So that a model that was trained on it finds what it knows."""
    system = {"role": "system", "content": "Be brief."}
    qwen = prompt(ALL["qwen2.5"], [system, HISTORY[0]])
    ours = prompt(ALL["chatml"], [system, HISTORY[0]])
    assert ours == qwen


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_are_written_as_they_are_read(name: str) -> None:
    """In the format of `--tool-call-parser`: the model copies what it sees."""
    formats = formats_of(ALL["smollm2"], tools=name)
    calls = [("weather", json.loads(ARGUMENTS)), ("now", {})]
    messages = [HISTORY[0], assistant("", *(call(each, json.dumps(v)) for each, v in calls))]
    shown, tools = formats.for_template(messages, OFFERED.for_template)
    assert tools is None
    written = shown[2]["content"]
    parser = OutputParser(OutputSyntax(name), TOOLS)
    found = items_of([*parser.push(written), *parser.end()])
    assert [(each.name, json.loads(each.text)) for each in found] == calls
    parser = OutputParser(OutputSyntax(name), TOOLS)
    example = shown[0]["content"].rpartition(":\n")[2]
    example = example.replace('"name": <function-name>', '"name": "f"')
    example = example.replace("function-name", "f").replace("<args-json-object>", '{"a": 1}')
    [item] = items_of([*parser.push(example), *parser.end()])
    assert item.kind == "function_call"
    assert len(json.loads(item.text)) == 1


def test_tools_in_words_that_nobody_reads() -> None:
    """A template that shows tools, and calls in a format that is not known: what is asked for is
    what is read. Whoever names the format knows better."""
    source = (
        "{% if tools %}<TOOLS>{{ tools | tojson }}</TOOLS>{% endif %}{% for message in messages %}"
        "{{ message.content }}{% for call in message.tool_calls or [] %}<CALL>"
        "{{ call.function.arguments | length }} of {{ call.function.name }}</CALL>{% endfor %}"
        "{% endfor %}"
    )
    for named, mark in ((None, "<tool_call>"), ("hermes", "<TOOLS>")):
        formats = formats_of(source, tools=named)
        assert formats.tools == "hermes"
        shown, tools = formats.for_template(HISTORY, OFFERED.for_template)
        text = ChatTemplate(source, {}).render(
            template_messages(shown, formats.facts.with_tools), kwargs={"tools": tools}
        )
        assert mark in text
        assert "<CALL>" not in text  # nobody could read them


def test_broken_arguments_are_shown_as_they_are() -> None:
    for name in TOOL_FORMATS:
        formats = formats_of(ALL["chatml"], tools=name)
        history = [HISTORY[0], assistant("", call("weather", '{"city": '))]
        shown, _ = formats.for_template(history, None)
        assert '{"city": ' in shown[1]["content"]


@pytest.mark.parametrize("name", ["llama-2", "mistral-0.1", "gemma-2"])
def test_roles_alternate_where_they_must(name: str) -> None:
    """As these templates insist; two of them know no system message."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello!"},
        {"role": "user", "content": "How is the weather?"},
        assistant("I look."),
        assistant("Let me see.\n", call("weather", ARGUMENTS)),
        result("rain"),
        {"role": "system", "content": "It is late."},
        {"role": "user", "content": "And now?"},
    ]
    text = prompt(ALL[name], messages)
    written = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
    said = [
        "Be brief.", "Be kind.", "# Tools", "Hello!", "How is the weather?", "I look.",
        f"Let me see.\n{written}", "<tool_response>\nrain", "It is late.", "And now?",
    ]  # fmt: skip
    places = [text.find(each) for each in said]
    assert -1 not in places, said[places.index(-1)]
    assert places == sorted(places)
    pictures = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    shown, _ = formats_of(ALL[name]).for_template(
        [*messages[:2], {"role": "user", "content": pictures}], OFFERED.for_template
    )
    assert shown[-1]["content"][-2:] == pictures


def test_roles_alternate_where_results_are_the_users() -> None:
    text = prompt(
        ALL["gemma-2"], [*HISTORY[:4], {"role": "user", "content": "Thanks. And in Rome?"}]
    )
    turn = text.split("<start_of_turn>")[3]
    assert turn == (
        "user\n<tool_response>\nrain, 9 °C\n</tool_response>\n<tool_response>\nnoon\n"
        "</tool_response>\n\nThanks. And in Rome?<end_of_turn>\n"
    )
