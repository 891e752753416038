"""The synthetic server over WebSocket, and streams that outlive their connection."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from penstock.load.synthetic.server import SyntheticServer, serve
from penstock.load.synthetic.settings import SyntheticSettings

from .synthetic_client import (
    CREATE,
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
        for lane, num_tokens in (("a", 5), ("a", 6), ("b", 7)):
            wishes = {**FAST, "ttft_ms": 100}
            create = {**CREATE, "stream_id": lane, "max_output_tokens": num_tokens}
            await socket.send(json.dumps({**create, "synthetic": wishes}))
        found = await messages(socket, 3)
    ends = [event["stream_id"] for event in found if event["type"] in TERMINAL]
    assert ends in (["a", "b", "a"], ["b", "a", "a"])
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
        for lane in range(17):
            await socket.send(json.dumps({**CREATE, "stream_id": str(lane)}))
        found = await messages(socket, 17)
    (error,) = [event for event in found if event["type"] == "error"]
    assert (error["status"], error["stream_id"]) == (429, "16")
    assert error["error"]["code"] == "websocket_stream_limit_reached"


@pytest.mark.parametrize("by", ["response_id", "stream_id", "http"])
async def test_cancel_ends_a_response_at_once(
    server: SyntheticServer, http: httpx.AsyncClient, by: str
) -> None:
    create = {**CREATE, "max_output_tokens": 90, "stream_id": "a"}
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
    assert 3 <= response["usage"]["output_tokens"] < 20
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


async def test_a_stream_survives_its_server() -> None:
    found: list[Any] = []

    async def read_and_kill() -> None:
        body = {"input": "x", "max_output_tokens": 100, "stream": True}
        async with http.stream("POST", "/v1/responses", json=body) as response:
            async for line in response.aiter_lines():
                found.extend([json.loads(line[6:])] if line.startswith("data: ") else [])
                if len(found) == 20:
                    server.kill()

    with serve(SyntheticSettings(itl_ms=5)) as server:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=10) as http:
            with pytest.raises(httpx.RemoteProtocolError):
                await read_and_kill()
            server.restart()
            after = found[-1]["sequence_number"]
            found += await resume(http, found[0]["response"]["id"], after=after)
    assert [event["sequence_number"] for event in found] == list(range(108))
    assert deltas(found) == text_of(100)
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == text_of(100)


async def test_nobody_is_counted_as_running_after_leaving(http: httpx.AsyncClient) -> None:
    async def num_running() -> int:
        text = (await http.get("/metrics")).text
        return int(text.partition("num_requests_running ")[2].split()[0])

    body = {"prompt": "x", "max_tokens": 90, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body):
        assert await num_running() == 1
    async with asyncio.timeout(5):
        while await num_running():  # noqa: ASYNC110  (it is another process)
            await asyncio.sleep(0.01)
