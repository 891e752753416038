"""What the synthetic server does wrong when told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest
import websockets

from ..support.synthetic.server import SyntheticServer, serve
from ..support.synthetic.settings import SyntheticSettings
from .synthetic_client import (
    CREATE,
    FAST,
    connect,
    deltas,
    events_of,
    lines,
    messages,
    text_of,
)


async def test_numbers_tell_of_lost_and_repeated_events(http: httpx.AsyncClient) -> None:
    numbers = {}
    for fault in ("lose:2", "gap:2", "repeat:2"):
        events = await events_of(http, 5, fault=fault)
        numbers[fault] = [event["sequence_number"] for event in events]
        seen = deltas(events)
        assert seen == (" t0 t1 t2 t2 t3 t4" if fault == "repeat:2" else " t0 t1 t3 t4")
        assert events[-1]["response"]["usage"]["output_tokens"] == 5
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == text_of(5)
    assert numbers["lose:2"] == list(range(12))
    assert numbers["gap:2"] == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12]
    assert numbers["repeat:2"] == [0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11, 12]


async def test_a_lost_chunk_shows_in_the_last_count_alone(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    wishes = {**FAST, "fault": "lose:2"}
    body = {"prompt": "x", "max_tokens": 4, "stream_options": options, "synthetic": wishes}
    *chunks, usage, _ = await lines(http, "/v1/completions", body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " t0 t1 t3"
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert usage["usage"]["completion_tokens"] == 4


async def test_streams_end_too_early_or_twice(http: httpx.AsyncClient) -> None:
    for num_tokens, fault in ((2, "cut:2"), (5, "cut:9")):  # at the latest before the end
        events = await events_of(http, 5, fault=fault)
        assert deltas(events) == text_of(num_tokens)
        assert events[-1]["type"] == "response.output_text.delta"
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    cut = await lines(http, "/v1/chat/completions", {**chat, "synthetic": {"fault": "cut:2"}})
    assert "[DONE]" not in cut
    failed = await lines(http, "/v1/chat/completions", {**chat, "synthetic": {"fault": "error:2"}})
    assert failed[-1] == "[DONE]"
    assert failed[-2]["error"]["type"] == "server_error"
    failed = await events_of(http, 5, fault="error:2")
    assert [event["type"] for event in failed[-2:]] == [
        "response.output_text.delta",
        "response.failed",
    ]
    assert failed[-1]["sequence_number"] == 6
    twice = await events_of(http, 5, fault="double_end")
    assert twice[-1] == twice[-2]
    assert twice[-1]["type"] == "response.incomplete"
    assert isinstance((await events_of(http, 5, fault="malformed:2"))[-1], str)


async def test_a_reset_is_one(http: httpx.AsyncClient, server: SyntheticServer) -> None:
    with pytest.raises(httpx.ReadError) as caught:
        await events_of(http, 5, fault="reset:2")
    cause: BaseException | None = caught.value
    while cause is not None and not isinstance(cause, ConnectionResetError):
        cause = cause.__cause__ or cause.__context__
    assert isinstance(cause, ConnectionResetError)
    async with connect(server) as socket:
        await socket.send(json.dumps({**CREATE, "synthetic": {**FAST, "fault": "reset:2"}}))
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await messages(socket)
        assert closed.value.rcvd is None  # no close frame


async def test_a_stalled_stream_is_silent_and_can_be_cancelled(http: httpx.AsyncClient) -> None:
    body = {
        "input": "x",
        "max_output_tokens": 9000,  # cancelled long before all of them would have come
        "stream": True,
        "synthetic": {"fault": "stall:2"},
    }
    async with http.stream("POST", "/v1/responses", json=body) as response:
        found, source = [], response.aiter_lines()
        while len(found) < 6:
            line = await anext(source)
            found += [json.loads(line[6:])] if line.startswith("data: ") else []
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await anext(aiter_after(source))
        response_id = found[0]["response"]["id"]
        cancelled = (await http.post(f"/v1/responses/{response_id}/cancel")).json()
        assert cancelled["status"] == "cancelled"


async def aiter_after(source: AsyncIterator[str]) -> AsyncIterator[str]:
    """The lines that are more than the blank between events."""
    async for line in source:
        if line:
            yield line


async def test_a_share_of_requests_is_refused_and_a_share_of_streams_faulty() -> None:
    settings = SyntheticSettings(
        ttft_ms=1, itl_ms=0, refuse_share=0.3, refuse_status=429, fault="cut:1", fault_share=0.5
    )
    with serve(settings) as server:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as http:
            body = {"prompt": "x", "max_tokens": 2, "stream": True}
            answers = [await http.post("/v1/completions", json=body) for _ in range(60)]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 8 < len(refused) < 30
    assert refused[0].json()["error"]["type"] == "rate_limit_error"
    assert refused[0].headers["retry-after"] == "1"
    whole = [answer for answer in answers if answer.text.endswith("[DONE]\n\n")]
    assert len(refused) + len(whole) < 52
    assert len(whole) > 8
