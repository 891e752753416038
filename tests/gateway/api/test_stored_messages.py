"""Messages as they come back from a client's store: with fields of its own, and in other shapes."""

from __future__ import annotations

from typing import Any

import pytest

from ..conftest import Serve, Served
from .bad_requests import CHAT, RESPONSES
from .test_tools import CHAT_TOOLS, PARSERS, USER, says, written

STORED = {
    "id": 17,
    "type": "human",
    "status": "done",
    "created_at": 1700000000,
    "parts": [{"type": "text", "text": "hello"}],
    "attachments": [{"name": "a.txt"}],
    "usage": {"total_tokens": 5},
    "reasoning": "Hm.",
    "reasoning_content": "Hm.",
    "reasoning_details": [{"type": "reasoning.text"}],
    "phase": 3,
    "mood": "good",
}


async def prompt_of(served: Served, *messages: dict[str, Any]) -> str:
    answer = await served.http.post(CHAT, json={"messages": messages})
    assert answer.status_code == 200, answer.text
    return served.prompt_of()


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
async def test_fields_of_others_are_ignored(served: Served, role: str) -> None:
    said = {"role": role, "content": "hello"}
    assert await prompt_of(served, {**STORED, **said}) == await prompt_of(served, said)


async def test_an_item_with_fields_of_others(served: Served) -> None:
    item = {"role": "user", "content": "hello", "created_at": 1, "mood": "good", "usage": {}}
    answer = await served.http.post(RESPONSES, json={"input": [item]})
    assert answer.status_code == 200
    assert served.prompt_of() == "<user>hello\n<assistant>"


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (["a", "b"], "a\nb"),
        ([{"text": "a"}, {"type": "text", "text": "b", "state": "done", "id": 1}], "a\nb"),
        ([{"type": None, "text": "a", "cache_control": {"type": "ephemeral"}}], "a"),
    ],
)
async def test_parts_in_other_shapes(served: Served, content: Any, seen: str) -> None:
    said = {"role": "user", "content": content}
    assert await prompt_of(served, said) == f"<user>{seen}\n<assistant>"
    answer = await served.http.post(RESPONSES, json={"input": [said]})
    assert answer.status_code == 200
    assert served.prompt_of() == f"<user>{seen}\n<assistant>"


async def test_no_parts_are_an_empty_text(served: Served) -> None:
    said: list[dict[str, Any]] = [{"role": "system", "content": []}, *USER]
    assert await prompt_of(served, *said) == "<system>\n<user>hello\n<assistant>"
    assert (await served.http.post(RESPONSES, json={"input": said})).status_code == 200
    assert served.prompt_of() == "<system>\n<user>hello\n<assistant>"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": {"content": "Hm.", "duration": 3}},
        {"reasoning": [{"type": "text", "text": "H"}, {"thinking": "m."}, {"type": "x"}, [["no"]]]},
        {"reasoning_content": ["H", "m."]},
        {"reasoning": {"duration": 3}, "reasoning_content": "Hm."},
    ],
)
async def test_thoughts_in_an_object(serve: Serve, fields: dict[str, Any]) -> None:
    template = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    async with serve(trust_request_chat_template=True) as served:
        said = [*USER, {"role": "assistant", "content": "Yes.", **fields}]
        body = {"messages": said, "chat_template": template}
        assert (await served.http.post(CHAT, json=body)).status_code == 200
        assert served.prompt_of() == "[|hello][Hm.|Yes.]"
        body["messages"] = [*USER, {"role": "assistant", "content": "Yes.", "reasoning": 5}]
        error = (await served.http.post(CHAT, json=body)).json()["error"]
        assert error["param"] == "messages[1].reasoning"


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_calls": [{"id": "", "function": {"name": "weather", "arguments": "{}"}}]},
        {"tool_calls": [{"name": "weather", "args": {}, "id": "", "type": "tool_call"}]},
        {"function_call": {"name": "weather", "arguments": "{}"}},
        {"function_call": {"name": "x"}, "tool_calls": [{"function": {"name": "weather"}}]},
    ],
)
async def test_calls_in_other_shapes(serve: Serve, fields: dict[str, Any]) -> None:
    template = "{% for m in messages %}{{ m.tool_calls | map(attribute='function') "
    template += "| map(attribute='name') | join }}:{{ m.content }} {% endfor %}"
    async with serve(trust_request_chat_template=True) as served:
        called = {"role": "assistant", "content": None, **fields}
        result = {"role": "tool", "tool_call_id": "", "content": "sun"}
        body = {"messages": [*USER, called, result], "chat_template": template}
        answer = await served.http.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        assert served.prompt_of() == ":hello weather: :sun "


async def test_the_template_decides_which_roles_there_are(serve: Serve) -> None:
    raising = "{% if messages[0].role == 'boss' %}{{ raise_exception('no bosses') }}{% endif %}x"
    async with serve(trust_request_chat_template=True) as served:
        said = {"role": "boss", "content": "hello"}
        assert await prompt_of(served, said) == "<boss>hello\n<assistant>"
        body = {"messages": [said], "chat_template": raising}
        answer = await served.http.post(CHAT, json=body)
        assert answer.status_code == 400
        assert "no bosses" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "choice",
    [
        CHAT_TOOLS[0],
        {"type": "function", "name": "weather"},
        {"type": "tool", "name": "weather"},
        {"type": "function", "function": {"name": "weather"}, "index": 0},
    ],
)
async def test_a_choice_that_names_a_tool_in_another_shape(serve: Serve, choice: Any) -> None:
    async with serve(**PARSERS) as served:
        says(served, written("weather", "{}"))
        body = {"messages": USER, "tools": CHAT_TOOLS, "tool_choice": choice}
        answer = await served.http.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        flat = [{"type": "function", **CHAT_TOOLS[0]["function"]}]
        body = {"input": "hello", "tools": flat, "tool_choice": choice}
        answer = await served.http.post(RESPONSES, json=body)
        assert answer.status_code == 200, answer.text
        for request in served.engine.submitted.values():
            assert request.sampling_params.structured_outputs is not None


@pytest.mark.parametrize("choice", ["any", {"type": "any"}, "required", {"type": "required"}])
async def test_any_tool(serve: Serve, choice: Any) -> None:
    async with serve(**PARSERS) as served:
        says(served, written("weather", "{}"))
        tools = [{**CHAT_TOOLS[0], "id": 1}]
        tools[0]["function"] = {**tools[0]["function"], "returns": {"type": "string"}, "title": "W"}
        body = {"messages": USER, "tools": tools, "tool_choice": choice}
        answer = await served.http.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        [request] = served.engine.submitted.values()
        assert request.sampling_params.structured_outputs is not None
        flat = {"type": "function", "name": "weather", "returns": {}, "title": "W"}
        body = {"input": "hello", "tools": [flat], "tool_choice": choice}
        assert (await served.http.post(RESPONSES, json=body)).status_code == 200
