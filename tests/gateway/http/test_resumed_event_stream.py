"""Streams that are resumed or run in the background: on the wire as live ones are."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import re
import socket
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock.engine.config import ModelConfig
from penstock.gateway.api.responses.subscriber import Subscriber
from penstock.gateway.config import GatewayConfig
from penstock.gateway.http.event_stream import ResumedEventStream, Source, data, named
from penstock.gateway.http.http_protocol import StallTimer
from penstock.gateway.http.raw_writer import RawWriter

from .. import conftest
from ..api.keyed import CHAT, COMPLETIONS, post
from ..conftest import PATIENCE_S, Serve, Served, listen
from ..garbage import freed_without_collector

KINDS = (RequestResponseCycle, ResumedEventStream, Subscriber)
_PIECE_BYTES = 16 << 10
_BLOCK = re.compile(r": ping|event: [a-z._]+\ndata: .+")


def from_chunks(chunks: AsyncGenerator[bytes, None]) -> Source:
    """A source that is a generator of whole events; it is closed when the client leaves."""

    async def write_to(out: RawWriter) -> None:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if not out.write(chunk):
                    await out.drained()

    return write_to


def path_of(response_id: str, **params: object) -> str:
    query = "".join(f"&{name}={value}" for name, value in params.items())
    return f"/v1/responses/{response_id}?stream=true{query}"


async def begun(served: Served, **options: Any) -> str:
    """The id of a response that runs in the background."""
    body = {"input": "hello", "background": True, **options}
    created = (await served.http.post("/v1/responses", json=body)).json()
    return str(created["id"])


def test_the_encoding_is_that_of_sse_starlette() -> None:
    text = '{"delta":"é\\n\\r\u2028\x85 x"}'
    payload = text.encode()
    event = ServerSentEvent(text, event="response.completed", sep="\n")
    assert named("response.completed", payload) == event.encode()
    assert data(payload) == ServerSentEvent(text, sep="\n").encode()


async def test_a_resumed_stream_has_the_bytes_of_the_first(served: Served) -> None:
    body = {"input": "hello", "stream": True}
    first = await served.http.post("/v1/responses", json=body)
    background = await served.http.post("/v1/responses", json=body | {"background": True})
    for stream in (first, background):
        response_id = re.search(r"resp_\w+", stream.text)
        assert response_id is not None
        again = await served.http.get(path_of(response_id.group()))
        assert again.content == stream.content
        rest = await served.http.get(path_of(response_id.group(), starting_after=2))
        assert stream.text.endswith(rest.text)
        assert rest.text.startswith("event: response.")
        own = {"date", "x-request-id"}
        assert {name: value for name, value in again.headers.items() if name not in own} == {
            name: value for name, value in first.headers.items() if name not in own
        }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_answer_with_a_key_has_the_bytes_of_the_first(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried: list[object] = []

    def response(*args: Any, **options: Any) -> EventSourceResponse:
        carried.append(args)
        return EventSourceResponse(*args, **options)

    monkeypatch.setattr("penstock.gateway.http.event_stream.EventSourceResponse", response)
    first = await post(served.http, path, stream=True)
    assert carried == [], "its first reader has it live"
    again = await post(served.http, path, stream=True)
    assert len(carried) == 1
    assert again.content == first.content


async def test_a_comment_in_silence_only(serve: Serve) -> None:
    async with serve(ping_interval_s=0.3, step_s=0.01) as served:
        served.engine.may_speak.clear()
        response_id = await begun(served, ignore_eos=True, max_output_tokens=60)
        path = path_of(response_id, starting_after=4)
        async with served.http.stream("GET", path) as response:
            assert response.status_code == 200, "the head comes with the first silence"
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if text.count(": ping") >= 2:
                    served.engine.may_speak.set()
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    assert [block for block in blocks if not _BLOCK.fullmatch(block)] == []
    pings = [number for number, block in enumerate(blocks) if block == ": ping"]
    assert pings == list(range(len(pings))), "none between events"
    assert blocks[-1].startswith("event: response.incomplete\n")


async def test_who_leaves_a_resumed_stream_reads_it_no_more(serve: Serve) -> None:
    async with (
        serve(ping_interval_s=60.0, disconnect_grace_s=0.05) as served,
        freed_without_collector(*KINDS),
    ):
        served.engine.may_speak.clear()
        body = {"input": "hello", "stream": True}
        async with served.http.stream("POST", "/v1/responses", json=body) as first:
            match = re.search(r"resp_\w+", await anext(first.aiter_text()))
            assert match is not None
            async with served.http.stream("GET", path_of(match.group())) as again:
                await anext(again.aiter_text())
        await served.aborted()


async def test_one_that_has_ended_is_freed(served: Served) -> None:
    response_id = await begun(served)
    async with freed_without_collector(*KINDS):
        for _ in range(3):
            stream = await served.http.get(path_of(response_id))
            assert "event: response.completed" in stream.text


async def test_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little more written than the transport's buffer: the kernel has room for megabytes."""
    limits = dataclasses.replace(conftest._LIMITS, max_stall_s=0.3)
    monkeypatch.setattr(conftest, "_LIMITS", limits)
    num_pieces, is_closed = 0, asyncio.Event()

    async def pieces() -> AsyncGenerator[bytes, None]:
        nonlocal num_pieces
        try:
            while True:
                num_pieces += 1
                yield data(b"x" * _PIECE_BYTES)
        finally:
            is_closed.set()

    def stream(_: Request) -> ResumedEventStream:
        return ResumedEventStream(from_chunks(pieces()), ping_s=0.05, on_error=repr_of)

    async def ready() -> None: ...

    app = Starlette(routes=[Route("/", stream)])
    app.state.engine = SimpleNamespace(wait_ready=ready)
    config = GatewayConfig(engine_address="", model=ModelConfig(model=""))
    num_stalled = StallTimer.num_stalled
    async with listen(app, config) as port:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                await is_closed.wait()
    assert StallTimer.num_stalled == num_stalled + 1
    assert num_pieces * _PIECE_BYTES < 1 << 20


def repr_of(error: Exception) -> bytes:
    return repr(error).encode()
