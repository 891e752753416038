"""Tools and thoughts offline: `LLM.chat(tools=…)` with the demo model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.engine import LLM, InvalidRequestError, SamplingParams

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {parameter: {"type": "string"}}},
        },
    }
    for name, parameter in (("calculator", "expression"), ("clock", "city"), ("note", "text"))
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=200)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo") as llm:
        yield llm


def test_a_loop(llm: LLM) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "what is 12 plus 30?"}]
    thinks = {"enable_thinking": True}
    [answer] = llm.chat(messages, GREEDY, tools=TOOLS, chat_template_kwargs=thinks)
    thought, call = answer.outputs[0].items
    assert (thought.kind, call.kind, call.name) == ("reasoning", "function_call", "calculator")
    assert thought.text
    assert json.loads(call.text) == {"expression": "12 + 30"}
    assert answer.outputs[0].text == ""
    called = {
        "id": "1",
        "type": "function",
        "function": {"name": call.name, "arguments": call.text},
    }
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "1234"},
    ]
    [answer] = llm.chat(messages, GREEDY, tools=TOOLS)
    assert "1234" in answer.outputs[0].text
    assert [item.kind for item in answer.outputs[0].items] == ["message"]


def test_a_choice_is_enforced(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=300, n=4)
    hello = [{"role": "user", "content": "Hello!"}]
    for choice, names in (("clock", {"clock"}), ("required", {"calculator", "clock", "note"})):
        for output in llm.chat(hello, params, tools=TOOLS, tool_choice=choice)[0].outputs:
            assert output.items[0].kind == "function_call"
            assert output.items[0].name in names
    [answer] = llm.chat(hello, GREEDY, tools=TOOLS, tool_choice="none")
    assert answer.outputs[0].items == ()
    assert answer.outputs[0].text


PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_template_without_tools(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=300, n=4)
    call = {"name": "clock", "arguments": {"city": "Oslo"}}
    messages = [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]},
        {"role": "tool", "tool_call_id": "1", "content": "12:30"},
    ]
    for choice, names in (("clock", {"clock"}), ("required", {"calculator", "clock", "note"})):
        [answer] = llm.chat(messages, params, tools=TOOLS, tool_choice=choice, chat_template=PLAIN)
        assert all(f'"{name}"' in str(answer.prompt) for name in ("calculator", "clock", "note"))
        assert '{"name": "clock", "arguments": {"city": "Oslo"}}' in str(answer.prompt)
        for output in answer.outputs:
            assert {item.kind for item in output.items} == {"function_call"}
            assert {item.name for item in output.items} <= names
            assert choice != "clock" or len(output.items) == 1


def test_mistakes_are_named(llm: LLM) -> None:
    hello = [{"role": "user", "content": "Hello!"}]
    with pytest.raises(InvalidRequestError, match=r"tools\[0\]"):
        llm.chat(hello, tools=[{"type": "web_search"}])
    with pytest.raises(InvalidRequestError, match="tool_choice"):
        llm.chat(hello, tools=TOOLS, tool_choice="weather")
