"""The synthetic server over WebSocket, and streams that outlive their connection."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from ..support.synthetic.server import SyntheticServer, serve
from ..support.synthetic.settings import SyntheticSettings
from .synthetic_client import (
    CREATE,
    ENDLESS,
    FAST,
    TERMINAL,
    connect,
    deltas,
    events_of,
    messages,
    resume,
    text_of,
)


async def test_lanes_run_side_by_side_and_each_in_order(server: SyntheticServer) -> None:
    async with connect(server) as socket:
        slow = {**FAST, "ttft_ms": 100}
        for lane, num_tokens, wishes in (("b", 9, ENDLESS), ("a", 5, slow), ("a", 6, slow)):
            create = {**CREATE, "stream_id": lane, "max_output_tokens": num_tokens}
            await socket.send(json.dumps({**create, "synthetic": wishes}))
        found = await messages(socket, 2)  # both of a, while b goes on
        await socket.send(json.dumps({"type": "penstock.cancel", "stream_id": "b"}))
        found += await messages(socket)
    ends = [event["stream_id"] for event in found if event["type"] in TERMINAL]
    assert ends == ["a", "a", "b"]
    of_a = [event for event in found if event["stream_id"] == "a"]
    assert [event["sequence_number"] for event in of_a] == [*range(13), *range(14)]
    assert deltas(of_a) == text_of(5) + text_of(6)


async def test_a_socket_says_what_is_wrong_and_stays(server: SyntheticServer) -> None:
    bad = ["{", "[]", '{"type": "x"}', '{"type": "response.create"}', '{"stream_id": 7}',
           '{"type": "penstock.cancel", "response_id": "x"}',
           '{"type": "penstock.resume", "response_id": "x", "starting_after": "y"}']  # fmt: skip
    async with connect(server) as socket:
        for message in bad:
            await socket.send(message)
            (error,) = await messages(socket)
            assert error["type"] == "error"
            assert 400 <= error["status"] < 500
        await socket.send(json.dumps(CREATE))
        assert deltas(await messages(socket)) == text_of(5)


async def test_a_connection_has_a_limit(server: SyntheticServer) -> None:
    async with connect(server) as socket:
        create = {**CREATE, "max_output_tokens": 90, "synthetic": ENDLESS}
        for lane in range(17):
            await socket.send(json.dumps({**create, "stream_id": str(lane)}))
        error = (await messages(socket))[-1]
        assert (error["type"], error["status"], error["stream_id"]) == ("error", 429, "16")
        assert error["error"]["code"] == "websocket_stream_limit_reached"
        for lane in range(16):
            await socket.send(json.dumps({"type": "penstock.cancel", "stream_id": str(lane)}))
        found = await messages(socket, 16)  # at once, not when their next tokens would be due
    assert {event["response"]["status"] for event in found if event["type"] in TERMINAL} == {
        "cancelled"
    }


@pytest.mark.parametrize("by", ["response_id", "stream_id", "http"])
async def test_cancel_ends_a_response_at_once(
    server: SyntheticServer, http: httpx.AsyncClient, by: str
) -> None:
    create = {**CREATE, "max_output_tokens": 9000, "stream_id": "a"}
    create["synthetic"] = {"ttft_ms": 5, "itl_ms": 100}
    async with connect(server) as socket:
        await socket.send(json.dumps(create))
        found = [json.loads(await socket.recv()) for _ in range(7)]
        response_id = found[0]["response"]["id"]
        if by == "http":
            await http.post(f"/v1/responses/{response_id}/cancel")
        else:
            name = {"response_id": response_id, "stream_id": "a"}[by]
            await socket.send(json.dumps({"type": "penstock.cancel", by: name}))
        found += await messages(socket)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    response = found[-1]["response"]
    assert response["status"] == "cancelled"
    assert 3 <= response["usage"]["output_tokens"] < 9000
    assert deltas(found) == text_of(response["usage"]["output_tokens"])
    # It stays so for whoever comes later.
    resumed = await resume(http, response_id, after=5)
    assert resumed == [_without_lane(event) for event in found[6:]]


def _without_lane(event: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name != "stream_id"}


@pytest.mark.parametrize("after", [-1, 0, 2, 3, 4, 30, 43, 44, 46, 47, 99])
async def test_a_replay_is_the_rest_wherever_it_begins(http: httpx.AsyncClient, after: int) -> None:
    events = await events_of(http, 40)
    resumed = await resume(http, events[0]["response"]["id"], after=after)
    assert resumed == [event for event in events if event["sequence_number"] > after]


async def test_a_resumed_stream_goes_on_in_time(server: SyntheticServer) -> None:
    create = {**CREATE, "max_output_tokens": 40, "synthetic": {"ttft_ms": 10, "itl_ms": 10}}
    async with connect(server) as socket:
        began_s = time.monotonic()
        await socket.send(json.dumps(create))
        found = [json.loads(await socket.recv()) for _ in range(10)]
    async with connect(server) as socket:
        resume = {"type": "penstock.resume", "response_id": found[0]["response"]["id"]}
        await socket.send(json.dumps({**resume, "starting_after": 9, "stream_id": "r"}))
        answer, *rest = await messages(socket)
        assert time.monotonic() - began_s >= 0.4
        assert (answer["recovered"], answer["stream_id"]) == (True, "r")
        assert [e["sequence_number"] for e in found + rest] == list(range(48))
        assert deltas(found + rest) == text_of(40)
        await socket.send(json.dumps({**resume, "response_id": "resp_gone"}))
        assert json.loads(await socket.recv())["recovered"] is False


@pytest.mark.exhaustive
@pytest.mark.process_kills
async def test_a_stream_survives_its_server() -> None:
    """It is far from its end when the server is killed, and cancelled when it has gone on."""
    found: list[Any] = []

    async def read(response: httpx.Response, act: Callable[[], Awaitable[Any]]) -> None:
        """All of a stream; act at its twentieth event."""
        num_before = len(found)
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:]))
                if len(found) == num_before + 20:
                    await act()

    with serve(SyntheticSettings(itl_ms=10)) as server:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as http:
            body = {"input": "x", "max_output_tokens": 8000, "stream": True}
            async with http.stream("POST", "/v1/responses", json=body) as response:
                with pytest.raises(httpx.RemoteProtocolError):
                    await read(response, lambda: asyncio.to_thread(server.kill))
            server.restart()
            path, after = f"/v1/responses/{found[0]['response']['id']}", len(found) - 1
            rest = http.stream("GET", path, params={"stream": "true", "starting_after": after})
            async with rest as response:
                await read(response, lambda: http.post(f"{path}/cancel"))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    answer = found[-1]["response"]
    num_tokens = answer["usage"]["output_tokens"]
    assert (answer["status"], num_tokens) == ("cancelled", len(found) - 8)
    assert deltas(found) == answer["output"][0]["content"][0]["text"] == text_of(num_tokens)


async def test_nobody_is_counted_as_running_after_leaving(http: httpx.AsyncClient) -> None:
    async def num_running() -> int:
        text = (await http.get("/metrics")).text
        return int(text.partition("num_requests_running ")[2].split()[0])

    async def nobody_runs() -> None:
        async with asyncio.timeout(60):
            while await num_running():  # noqa: ASYNC110  (it is another process)
                await asyncio.sleep(0.01)

    await nobody_runs()  # whoever left in a test before
    body = {"prompt": "x", "max_tokens": 9000, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body):
        assert await num_running() == 1
    await nobody_runs()
