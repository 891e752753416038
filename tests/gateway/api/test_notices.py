"""Parked and back again: told to those who asked, in its place among the deltas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.engine.request import Notice

from ..conftest import ANSWER, Serve, Served
from ..sockets import send, until_end

BOTH = {"events": ["preempted", "resumed"]}


def park(served: Served) -> None:
    served.engine.notices = {3: Notice.PREEMPTED, 4: Notice.RESUMED}


def own(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["type"].startswith("penstock.")]


def check(events: list[dict[str, Any]], kinds: list[str]) -> None:
    """OpenAI's events are numbered as ever, and ours stand between them without a number."""
    response_id = events[0]["response"]["id"]
    told = own(events)
    assert [event["type"] for event in told] == [f"penstock.{kind}" for kind in kinds]
    for event in told:
        assert event["response_id"] == response_id
        assert set(event) <= {"type", "response_id", "stream_id"}
    others = [event for event in events if event not in told]
    assert [event["sequence_number"] for event in others] == list(range(len(others)))
    assert "".join(event.get("delta", "") for event in others) == ANSWER


async def events_over_sse(served: Served, **body: Any) -> list[dict[str, Any]]:
    response = await served.http.post("/v1/responses", json={"input": "x", "stream": True, **body})
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, payload = block.split("\n")
        events.append(json.loads(payload.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("step_s", [0.0, 0.005])
async def test_over_sse_in_order(serve: Serve, step_s: float) -> None:
    async with serve(step_s=step_s) as served:
        park(served)
        events = await events_over_sse(served, penstock=BOTH)
        check(events, ["preempted", "resumed"])
        first, second = (events.index(event) for event in own(events))
        before = "".join(event.get("delta", "") for event in events[:first])
        script = served.engine.script
        assert before == served.tokenizer.decode(script[:3])
        between = "".join(event.get("delta", "") for event in events[first:second])
        assert between == served.tokenizer.decode(script[3:4])


@pytest.mark.parametrize(
    ("asked", "kinds"),
    [({}, []), ({"events": []}, []), ({"events": ["resumed"]}, ["resumed"])],
)
async def test_others_see_nothing(served: Served, asked: dict[str, Any], kinds: list[str]) -> None:
    park(served)
    check(await events_over_sse(served, penstock=asked), kinds)
    check(await events_over_sse(served), [])


async def test_over_the_websocket_on_its_lane(served: Served) -> None:
    park(served)
    async with served.connect() as socket:
        await send(socket, type="response.create", input="x", stream_id="a", penstock=BOTH)
        events = await until_end(socket)
    check(events, ["preempted", "resumed"])
    assert {event["stream_id"] for event in events} == {"a"}


async def test_a_whole_answer_and_what_is_stored_have_none(served: Served) -> None:
    park(served)
    body = {"input": "x", "penstock": BOTH}
    response = (await served.http.post("/v1/responses", json=body)).json()
    assert response["output"][0]["content"][0]["text"] == ANSWER
    assert "penstock" not in json.dumps(response)
    stored = (await served.http.get(f"/v1/responses/{response['id']}")).json()
    assert stored == response


async def test_chat_streams_say_nothing_of_it(served: Served) -> None:
    park(served)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    text = (await served.http.post("/v1/chat/completions", json=body)).text
    assert "penstock" not in text
    assert "preempted" not in text
    assert text.endswith("data: [DONE]\n\n")
