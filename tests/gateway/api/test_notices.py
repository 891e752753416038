"""Parked and back again: told to those who asked, in its place among the deltas."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from penstock.engine.protocol.messages import EngineStats
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
    assert "preempted" not in json.dumps(response)
    stored = (await served.http.get(f"/v1/responses/{response['id']}")).json()
    assert stored == response


async def test_chat_streams_say_nothing_of_it(served: Served) -> None:
    park(served)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    text = (await served.http.post("/v1/chat/completions", json=body)).text
    assert "penstock" not in text
    assert "preempted" not in text
    assert text.endswith("data: [DONE]\n\n")


PROGRESS = {"events": ["progress"]}
WAITING: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
}


def progress_of(event: dict[str, Any]) -> dict[str, Any] | None:
    if event.get("type") == "penstock.progress":
        return event
    found: dict[str, Any] | None = event.get("penstock", {}).get("progress")
    return found


@pytest.mark.parametrize("path", WAITING)
async def test_who_waits_is_told_again_and_again_for_what(served: Served, path: str) -> None:
    """Until the first token: the engine says nothing for longer than events are apart."""
    served.engine.may_speak.clear()
    body = WAITING[path] | {"stream": True, "penstock": PROGRESS, "max_tokens": 500}
    if path == "/v1/responses":
        del body["max_tokens"]
    told: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    async with served.http.stream("POST", path, json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            progress = progress_of(event)
            if progress is None:
                others.append(event)
                continue
            told.append(progress)
            assert event.get("choices", []) == []
            assert progress["stage"] == "queued"
            assert progress["estimated_ms"] >= 0
            assert not any(each.get("choices") or "delta" in each for each in others)
            if len(told) == 3:
                served.engine.may_speak.set()
    assert len(told) >= 3
    assert "".join(map(text_of, others)) == ANSWER


async def test_how_right_estimates_were_is_a_metric(serve: Serve) -> None:
    """Of the first request nothing is said: no rate was measured."""
    name = "penstock:time_to_first_token_estimate_ratio_count"
    counts = []
    async with serve() as served:
        for _ in range(2):
            served.engine.submitted.clear()
            served.engine.may_speak.clear()
            body = {"prompt": "hello", "max_tokens": 1}
            answer = asyncio.create_task(served.http.post("/v1/completions", json=body))
            await served.submitted()
            served.engine.stats = EngineStats(prefill_tokens_per_s=10.0)  # told with the token
            await asyncio.sleep(0.06)  # less would be the event loop's
            served.engine.may_speak.set()
            assert (await answer).status_code == 200
            lines = (await served.http.get("/metrics")).text.splitlines()
            counts += [line.rpartition(" ")[2] for line in lines if line.startswith(name)]
    assert counts == ["0.0", "1.0"]


def text_of(event: dict[str, Any]) -> str:
    for choice in event.get("choices", []):
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    return event["delta"] if event.get("type", "").endswith("text.delta") else ""


async def test_a_whole_answer_waits_in_silence(served: Served) -> None:
    body = WAITING["/v1/chat/completions"] | {"penstock": PROGRESS}
    answer = (await served.http.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == ANSWER
    (request,) = served.engine.submitted.values()
    assert not request.wants_queue_position


async def test_what_is_no_event_is_refused(served: Served) -> None:
    for path, body in WAITING.items():
        sent = body | {"penstock": {"events": ["prefill"]}}
        refused = await served.http.post(path, json=sent)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith("penstock.events")
