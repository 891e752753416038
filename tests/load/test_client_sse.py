"""The SSE transport against a server that sends exact bytes: good streams, and its connections."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from penstock.load.client import sse
from penstock.load.client.records import Endpoint, Fault
from penstock.load.client.sse import SseTransport

from .scripted_server import (
    CALL,
    DONE,
    FOREVER,
    Script,
    chat,
    chunk,
    connected,
    cut,
    framed,
    gated,
    head,
    record_from,
    record_of,
    response_stream,
    scripted,
    usage,
    whole,
)

_CHUNKS: list[Endpoint] = ["chat", "completions"]


@pytest.fixture(autouse=True)
def _connections_do_not_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long this machine stands still between two calls."""
    monkeypatch.setattr(sse, "_MAX_IDLE_S", 3600.0)


# -- good streams ---------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", _CHUNKS)
async def test_chunks_fill_a_record(endpoint: Endpoint) -> None:
    before_s = time.perf_counter()
    record = await record_from(whole(*chat(endpoint=endpoint)), endpoint)
    assert (record.faults, record.detail, record.status) == ([], "", 200)
    assert (record.text, record.finish_reason, record.response_id) == (
        "one two",
        "length",
        "cmpl-1",
    )
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (9, 5, 3)
    assert record.event_tokens == [1, 1, 1]
    times_s = [before_s, record.sent_s, *record.event_times_s, record.ended_s, time.perf_counter()]
    assert times_s == sorted(times_s)
    assert len(record.event_times_s) == 3


async def test_responses_fill_a_record() -> None:
    record = await record_from(whole(*response_stream("on", "", "e t", "wo")), "responses")
    assert (record.faults, record.detail, record.status) == ([], "", 200)
    assert (record.text, record.finish_reason) == ("one two", "max_output_tokens")
    assert record.response_id == "resp_1"
    assert (record.prompt_tokens, record.cached_tokens, record.output_tokens) == (9, 5, 3)
    assert len(record.event_times_s) == 3
    assert record.event_tokens == []


async def test_times_are_those_of_arrival() -> None:
    gates, script = gated(*chat()[:3], b"".join(chat()[3:]))
    record = record_of(expected_tokens=3)
    async with connected(script) as (_, transport):
        streaming = asyncio.create_task(transport.stream(CALL, record))
        for number, gate in enumerate(gates[:3], start=1):
            sent_s = time.perf_counter()
            gate.set()
            while len(record.event_times_s) < number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert sent_s < record.event_times_s[-1] < time.perf_counter()
        sent_s = time.perf_counter()
        gates[3].set()  # the finish chunk, usage, and [DONE]
        await streaming
    assert record.faults == []
    assert record.ended_s > sent_s


@pytest.mark.parametrize("endpoint", ["chat", "responses"])
async def test_a_stream_may_be_cut_anywhere(endpoint: Endpoint) -> None:
    events = [chunk("½ …", count=1), chunk("🙂", count=3), chunk(finish="stop", count=3), usage(3)]
    stream = b"".join([*events, DONE])
    if endpoint == "responses":
        stream = b"".join(response_stream("½ …", "🙂"))
    stream = b": ping\r\n\r\n" + stream.replace(b"\n\n", b"\r\n\r\n")
    scripts: list[Script] = [whole(stream[:at], stream[at:]) for at in range(1, len(stream))]
    scripts.append(whole(*(stream[at : at + 1] for at in range(len(stream)))))
    # In one write, so that what the client reads is cut where the chunks are.
    joined = [[b"".join(step for step in script if isinstance(step, bytes))] for script in scripts]
    async with connected(*joined, endpoint=endpoint) as (server, transport):
        for _ in joined:
            record = record_of(expected_tokens=3)
            await transport.stream(CALL, record)
            assert (record.faults, record.text) == ([], "½ …🙂"), record.detail
        assert server.num_connections == 1


# -- connections ----------------------------------------------------------------------------------


async def test_walking_away_closes_the_connection() -> None:
    record = record_of()
    async with connected([head(), framed(chat()[0]), FOREVER]) as (server, transport):
        task = asyncio.create_task(transport.stream(CALL, record))
        while not record.event_times_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.wait_for(server.hung_up.wait(), 60)
    assert task.cancelled()
    assert (record.faults, record.text) == ([], "on")


async def test_connections_are_kept_but_not_after_a_fault() -> None:
    good = whole(*chat())
    async with connected(good, good, cut(*chat()[:2]), good) as (server, transport):
        records = [record_of() for _ in range(5)]
        for record in records:
            await transport.stream(CALL, record)
    assert [record.faults for record in records] == [[], [], [Fault.CUT], [], []]
    assert server.num_connections == 2


async def test_the_request_says_who_asks_and_where() -> None:
    async with scripted(whole(*chat())) as server:
        base_url = f"{server.base_url}/below/v1/"
        async with SseTransport(base_url, "chat", api_key="secret") as transport:
            await transport.stream(CALL, record_of())
    assert server.heads[0].startswith("POST /below/v1/chat/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer secret\r\n" in server.heads[0]
    assert f"Host: {server.base_url.removeprefix('http://')}\r\n" in server.heads[0]
    assert server.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
