"""`truncation: "auto"` of responses: the oldest items are dropped until the prompt fits."""

from __future__ import annotations

import re
from typing import Any

from penstock.gateway.api.responses.truncation import droppable, room_for_output, without

from ..conftest import Serve, Served
from .bad_requests import RESPONSES
from .test_tools import PARSERS, TOOLS

CONTEXT = 256  # tokens
CONTEXT_WITH_TOOLS = 1600  # their definitions are in the prompt


def said(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def turns(number: int) -> list[dict[str, Any]]:
    both = [
        (said("user", f"q{n:02} {'x' * 20}"), said("assistant", f"a{n:02}")) for n in range(number)
    ]
    return [message for pair in both for message in pair]


def calls(number: int) -> list[dict[str, Any]]:
    """As many steps of an agent: a thought, two calls, their outputs."""
    items: list[dict[str, Any]] = []
    for n in range(number):
        items.append({"type": "reasoning", "summary": [], "content": [{"text": f"t{n:02}"}]})
        for half in "ab":
            name = {"call_id": f"c{n:02}{half}"}
            items.append({"type": "function_call", "name": "weather", "arguments": "{}", **name})
        for half in "ab":
            out = f"o{n:02}{half} {'x' * 10}"
            items.append(
                {"type": "function_call_output", "call_id": f"c{n:02}{half}", "output": out}
            )
    return items


async def post(served: Served, **body: Any) -> Any:
    return await served.http.post(RESPONSES, json=body)


async def test_a_long_conversation_loses_its_oldest_turns(serve: Serve) -> None:
    conversation = [said("system", "Be brief."), *turns(20), said("user", "last")]
    async with serve(info={"max_model_len": CONTEXT}) as served:
        plain = await post(served, input=conversation)
        assert plain.json()["error"]["code"] == "context_length_exceeded"
        asked: dict[str, Any] = {
            "input": conversation,
            "truncation": "auto",
            "instructions": "Rhyme.",
            "max_output_tokens": 8,
        }
        answer = await post(served, **asked)
        assert answer.status_code == 200, answer.text
        assert answer.json()["truncation"] == "auto"
        prompt = served.prompt_of()
        assert prompt.startswith("<system>Rhyme.\n<system>Be brief.\n<user>q")
        assert prompt.endswith("<user>last\n<assistant>")
        kept = [int(number) for number in re.findall(r"<user>q(\d+)", prompt)]
        assert kept == list(range(kept[0], 20))  # no more is dropped than must be
        one_more = len(served.tokenizer.encode(f"<user>q00 {'x' * 20}\n<assistant>a00\n"))
        [request] = served.engine.submitted.values()
        num_tokens = len(request.prompt_token_ids)
        assert num_tokens + 8 <= CONTEXT < num_tokens + one_more + 8
        before = {"comparison_response_id": answer.json()["id"]}
        again = (await post(served, prompt_cache_options=before, **asked)).json()
        assert again["penstock"]["cache"]["dropped"] == {"truncation": 2 * kept[0]}


async def test_what_fits_is_kept_whole(serve: Serve) -> None:
    conversation = [*turns(3), said("user", "last")]
    async with serve(info={"max_model_len": CONTEXT}) as served:
        await post(served, input=conversation)
        await post(served, input=conversation, truncation="auto")
        whole, same = served.engine.submitted.values()
        assert whole.prompt_token_ids == same.prompt_token_ids


async def test_what_cannot_fit_is_refused(serve: Serve) -> None:
    async with serve(info={"max_model_len": CONTEXT}) as served:
        for texts in (["x" * 400], ["x" * 400, "y" * 4000]):
            conversation = [said("user", text) for text in texts]
            answer = await post(served, input=conversation, truncation="auto")
            assert answer.json()["error"]["code"] == "context_length_exceeded"
        answer = await post(served, input="x", truncation="sometimes")
        assert answer.json()["error"]["param"] == "truncation"


async def test_a_stored_conversation_keeps_what_was_dropped(serve: Serve) -> None:
    async with serve(info={"max_model_len": CONTEXT}) as served:
        previous = None
        for number in range(8):
            answer = await post(
                served,
                input=f"q{number:02} {'x' * 40}",
                previous_response_id=previous,
                truncation="auto",
            )
            assert answer.status_code == 200, answer.text
            previous = answer.json()["id"]
        assert "q00" not in served.prompt_of()
        items = await served.http.get(f"{RESPONSES}/{previous}/input_items?limit=100&order=asc")
        assert items.json()["data"][0]["content"][0]["text"].startswith("q00")


async def test_no_call_goes_without_its_outputs(serve: Serve) -> None:
    conversation = [said("user", "go"), *calls(12)]
    async with serve(info={"max_model_len": CONTEXT_WITH_TOOLS}, **PARSERS) as served:
        answer = await post(served, input=conversation, tools=TOOLS, truncation="auto")
        assert answer.status_code == 200, answer.text
        prompt = served.prompt_of()
        assert "<user>go\n" in prompt
        outputs = re.findall(r"<tool>(o\d\d[ab])", prompt)
        assert outputs[-2:] == ["o11a", "o11b"]
        assert len(outputs) == prompt.count('"arguments": {}')
        assert 2 <= len(outputs) < 24


def test_groups() -> None:
    items = [
        {"type": "message", "role": "system"},
        {"type": "message", "role": "assistant"},  # 1
        {"type": "message", "role": "user"},  # 2
        {"type": "function_call", "call_id": "a"},
        {"type": "message", "role": "developer"},
        {"type": "function_call_output", "call_id": "a"},
        {"type": "message", "role": "user"},  # 6
        {"type": "reasoning"},
        {"type": "function_call", "call_id": "b"},
        {"type": "function_call", "call_id": "c"},
        {"type": "function_call_output", "call_id": "b"},
        {"type": "message", "role": "assistant"},  # 11
        {"type": "function_call_output", "call_id": "c"},
        {"type": "reasoning"},  # 13
        {"type": "function_call", "call_id": "d"},
        {"type": "function_call_output", "call_id": "d"},
    ]
    items = [{**item, "id": str(index)} for index, item in enumerate(items)]
    groups = droppable(items)
    assert groups == [[1], [2, 3, 5], [7, 8, 9, 10], [11, 12]]
    kept = without(items, groups[:3])
    assert [items.index(item) for item in kept] == [0, 4, 6, 11, 13, 14, 15]
    assert without(items, []) == items
    assert droppable(items[:1]) == []


def test_room_for_the_output() -> None:
    assert room_for_output(None, 800) == 100
    assert room_for_output(20, 800) == 20
    assert room_for_output(500, 800) == 100
    assert room_for_output(0, 800) == room_for_output(None, 4) == 1
