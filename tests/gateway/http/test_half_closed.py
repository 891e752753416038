"""A client that closes its side after its request gets its answer; one that leaves is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from penstock.gateway.http.half_closed import Hangups
from penstock.gateway.http.http_protocol import HttpLimits, limited_protocol

from ..conftest import PATIENCE_S, Served, serving, until

pytestmark = pytest.mark.skipif(not hasattr(select, "epoll"), reason="needs epoll")

_LIMITS = HttpLimits(max_connections=100, header_timeout_s=60.0, body_timeout_s=60.0)
_GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class App:
    """Answers when it is told to, in chunks; knows who left before.

    Args:
        first: sent at once.
    """

    def __init__(self, first: bytes | None = None) -> None:
        self.num_waiting = self.num_left = 0
        self.opened = asyncio.Event()
        self._first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._first is not None:
            await self._start(send)
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
        self.num_waiting += 1
        opened, left = asyncio.create_task(self.opened.wait()), asyncio.create_task(_gone(receive))
        await asyncio.wait({opened, left}, return_when=asyncio.FIRST_COMPLETED)
        self.num_left += left.done()
        opened.cancel()
        left.cancel()
        if self._first is None:
            await self._start(send)
        await send({"type": "http.response.body", "body": b"last"})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@contextlib.asynccontextmanager
async def serving_app(app: App, **settings: Any) -> AsyncIterator[int]:
    config = uvicorn.Config(
        app, http=limited_protocol(_LIMITS), lifespan="off", log_config=None, **settings
    )
    async with serving(config) as (_, port):
        yield port


@contextlib.asynccontextmanager
async def connected(port: int, sent: bytes) -> AsyncIterator[Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield reader, writer
    finally:
        writer.close()


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    def run(work: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(work)
        assert not Hangups._of_loops

    return run


Run = Callable[[Coroutine[Any, Any, None]], None]


def test_the_answer_comes_after_the_end_of_the_requests(run: Run) -> None:
    async def work() -> None:
        app = App()
        async with serving_app(app) as port, connected(port, _GET) as (reader, writer):
            await until(lambda: app.num_waiting == 1)
            writer.write_eof()
            assert await reader.readexactly(len(_CONTINUE)) == _CONTINUE
            app.opened.set()
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"connection: close\r\n" in head
            assert await reader.read() == b"4\r\nlast\r\n0\r\n\r\n"
            assert app.num_left == 0

    run(work())


def test_a_quick_answer_begins_with_its_status(run: Run) -> None:
    async def work() -> None:
        app = App()
        app.opened.set()
        async with serving_app(app) as port, connected(port, _GET) as (reader, writer):
            writer.write_eof()
            assert (await reader.read()).startswith(b"HTTP/1.1 200 OK\r\n")

    run(work())


def test_an_answer_that_has_begun_goes_on(run: Run) -> None:
    async def work() -> None:
        app = App(b"first")
        async with serving_app(app) as port, connected(port, _GET) as (reader, writer):
            await reader.readuntil(b"first\r\n")
            writer.write_eof()
            assert await reader.readexactly(1) == b"0"  # of the next chunk's size
            app.opened.set()
            assert await reader.read() == b"4\r\nlast\r\n0\r\n\r\n"

    run(work())


def test_requests_that_were_sent_ahead_are_all_answered(run: Run) -> None:
    async def work() -> None:
        app = App()
        async with serving_app(app) as port, connected(port, _GET * 3) as (reader, writer):
            writer.write_eof()
            await until(lambda: app.num_waiting == 1)
            app.opened.set()
            answers = await reader.read()
            assert answers.count(b"200 OK") == answers.count(b"last") == 3

    run(work())


@pytest.mark.parametrize("first", [None, b"first"], ids=["before the answer", "within it"])
def test_a_client_that_leaves_is_noticed(run: Run, first: bytes | None) -> None:
    async def work() -> None:
        app = App(first)
        async with serving_app(app) as port:
            async with connected(port, _GET) as (reader, _):
                if first is not None:
                    await reader.readuntil(b"first\r\n")
                await until(lambda: app.num_waiting == 1)
            await until(lambda: app.num_left == 1)

    run(work())


def test_a_client_that_leaves_after_it_closed_its_side_is_noticed(run: Run) -> None:
    async def work() -> None:
        app = App(b"first")
        async with serving_app(app) as port:
            async with connected(port, _GET) as (reader, writer):
                await reader.readuntil(b"first\r\n")
                writer.write_eof()
                await reader.readexactly(1)
                linger = (
                    b"\1\0\0\0\0\0\0\0"  # its end is an RST, as that of a process that is killed
                )
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            await until(lambda: app.num_left == 1)

    run(work())


async def test_half_a_request_is_not_answered() -> None:
    app = App()
    async with serving_app(app) as port, connected(port, _GET[:-2]) as (reader, writer):
        writer.write_eof()
        assert await reader.read() == b""
        assert app.num_waiting == 0


async def test_http_1_0_ends_with_its_input() -> None:
    """It has no 100 Continue, and a proxy that speaks it closes the connection when its client
    leaves."""
    app = App()
    async with serving_app(app) as port:
        async with connected(port, b"GET / HTTP/1.0\r\n\r\n") as (reader, writer):
            await until(lambda: app.num_waiting == 1)
            writer.write_eof()
            assert await reader.read() == b""
        await until(lambda: app.num_left == 1)


async def test_a_stream_of_tokens_is_whole(served: Served) -> None:
    body = b'{"prompt": "x", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
    async with connected(served.port, head % len(body) + body) as (reader, writer):
        writer.write_eof()
        answer = await reader.read()
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert not served.engine.aborted
