"""`starting_after`: where a resumed stream begins, over HTTP and WebSocket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ..conftest import Serve, Served, until

RESPONSES = "/v1/responses"
RULE = "starting_after must be an event's sequence number, or -1 for all events"


async def _numbers(served: Served, response_id: str, after: object) -> list[int]:
    """Of a resumed stream's events."""
    events = await _events_by_sse(served, response_id, after)
    return [event["sequence_number"] for event in events]


async def _resumed(served: Served, response_id: str, after: object) -> dict[str, Any]:
    """The first answer to `penstock.resume`."""
    message = {"type": "penstock.resume", "response_id": response_id, "starting_after": after}
    async with served.connect() as socket:
        await socket.send(json.dumps({**message, "stream_id": "a"}))
        answer: dict[str, Any] = json.loads(await socket.recv())
        assert answer["stream_id"] == "a"
        await socket.send('{"type": "penstock.ping"}')  # the socket goes on
        async for text in socket:
            if json.loads(text)["type"] == "penstock.pong":
                return answer
    raise AssertionError("unreachable")


async def test_what_is_no_number_of_the_response_is_refused(served: Served) -> None:
    response = (await served.http.post(RESPONSES, json={"input": "x"})).json()
    all_numbers = await _numbers(served, response["id"], -1)
    last = all_numbers[-1]
    assert all_numbers == list(range(last + 1))
    assert await _numbers(served, response["id"], last - 1) == [last]
    assert await _numbers(served, response["id"], last) == []  # it has everything

    beyond = "starting_after is {}, but this response ended with event {}"
    for after in (last + 1, last + 1000, (1 << 63) - 1):
        expected = beyond.format(after, last)
        await _check_refused(served, response["id"], after, expected)
    for after in (-2, -(10**18), 1 << 63, 10**19):
        await _check_refused(served, response["id"], after, RULE)
    for text in ("", "x", "1.0", "1e3", "1_0", " 1", "+1", "٣", "nan", "9" * 5000, "1\n", "null"):
        await _check_refused(served, response["id"], text, RULE)
    for value in ("1", 1.5, True, [1], {}):
        assert (await _resumed(served, response["id"], value))["error"]["message"] == RULE


async def _check_refused(served: Served, response_id: str, after: object, message: str) -> None:
    query = {"stream": "true", "starting_after": str(after)}
    answer = await served.http.get(f"{RESPONSES}/{response_id}", params=query)
    error = {
        "message": message, "type": "invalid_request_error", "param": "starting_after",
        "code": "invalid_value",
    }  # fmt: skip
    assert (answer.status_code, answer.json()) == (400, {"error": error}), after
    event = await _resumed(served, response_id, after)
    assert (event["type"], event["status"]) == ("error", 400)
    assert event["error"] == error


@pytest.mark.parametrize("wire", ["sse", "websocket"])
async def test_a_running_response_is_waited_for(serve: Serve, wire: str) -> None:
    """Its events may be known to a reader before they are known here."""
    async with serve() as served:
        served.engine.may_speak.clear()
        body = {"input": "x", "background": True}
        response = (await served.http.post(RESPONSES, json=body)).json()
        await served.submitted()
        read = _events_by_sse if wire == "sse" else _events_by_socket
        reading = [asyncio.create_task(read(served, response["id"], after)) for after in (9, 5000)]
        log = await served.app.state.log_store.find("default", response["id"])
        await until(lambda: len(log.readers) == 2)
        served.engine.may_speak.set()
        near, far = await asyncio.gather(*reading)
        assert near[0]["sequence_number"] == 10
        assert near[-1]["type"] == "response.completed"
        [event] = far
        error = event["error"] if wire == "websocket" else event
        assert event["type"] == "error"
        assert error["param"] == "starting_after"
        last = near[-1]["sequence_number"]
        assert error["message"] == (
            f"starting_after is 5000, but this response ended with event {last}"
        )


async def _events_by_sse(served: Served, response_id: str, after: int) -> list[Any]:
    query = {"stream": "true", "starting_after": str(after)}
    answer = await served.http.get(f"{RESPONSES}/{response_id}", params=query)
    if answer.status_code == 400:  # nothing was sent yet, not even a keep-alive
        return [{**answer.json()["error"], "type": "error"}]
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


async def _events_by_socket(served: Served, response_id: str, after: int) -> list[Any]:
    message = {"type": "penstock.resume", "response_id": response_id, "starting_after": after}
    async with served.connect() as socket:
        await socket.send(json.dumps(message))
        assert json.loads(await socket.recv())["recovered"]
        events: list[Any] = []
        while not events or events[-1]["type"] not in ("error", "response.completed"):
            events.append(json.loads(await socket.recv()))
        return events


async def test_a_deleted_response_cannot_be_resumed(serve: Serve) -> None:
    """Not even while it still ends: it is stopped, and nothing of it stays."""
    async with serve() as served:
        served.engine.may_speak.clear()
        body = {"input": "x", "background": True}
        response_id = (await served.http.post(RESPONSES, json=body)).json()["id"]
        await served.submitted()
        reading = asyncio.create_task(_events_by_sse(served, response_id, -1))
        logs = served.app.state.log_store
        log = await logs.find("default", response_id)
        await until(lambda: bool(log.readers))
        deleted = await served.http.delete(f"{RESPONSES}/{response_id}")
        assert deleted.json() == {"id": response_id, "object": "response", "deleted": True}
        await _check_gone(served, response_id)
        await served.aborted()
        served.engine.may_speak.set()
        assert (await reading)[-1]["type"] == "response.incomplete"  # it sees the end
        await _check_gone(served, response_id)
        await until(lambda: not (logs._running or logs.num_bytes))


async def _check_gone(served: Served, response_id: str) -> None:
    path = f"{RESPONSES}/{response_id}"
    for query, code in (("", "response_not_found"), ("?stream=true", "response_expired"),
                        ("?stream=true&starting_after=1", "response_expired")):  # fmt: skip
        answer = await served.http.get(path + query)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
    for method, place in (("POST", f"{path}/cancel"), ("DELETE", path)):
        assert (await served.http.request(method, place)).status_code == 404
    assert (await _resumed(served, response_id, 1))["recovered"] is False
