"""Calls over HTTP with server-sent events: any OpenAI-compatible server.

Lives here: the pool of connections, and what of an exchange is a fault. Not known here: HTTP's
syntax (`http_connection`), the syntax of events (`event_stream`), what events must say
(`integrity`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Self

import orjson

from penstock.load.client.address import Address
from penstock.load.client.bodies import PATHS, Endpoint, body_of
from penstock.load.client.event_stream import EventStreamParser
from penstock.load.client.http_connection import HttpConnection, request_of
from penstock.load.client.integrity import StreamCheck, check_of, refusal_of
from penstock.load.client.records import Call, Fault, StreamRecord
from penstock.load.client.stall import StallTimer

# Servers close idle connections after 5 s (uvicorn, cpp-httplib); a request must not meet that.
_MAX_IDLE_S = 2.0
_MAX_REFUSAL_BYTES = 64 << 10


class SseTransport:
    """Posts calls to one endpoint of one server. Connections are kept for the next call.

    Args:
        max_connections: calls at once, others wait here; 0: no bound.
        stall_s: silence, comments aside, that is a fault.
    """

    def __init__(
        self,
        base_url: str,
        endpoint: Endpoint,
        *,
        api_key: str | None = None,
        max_connections: int = 0,
        stall_s: float = 60.0,
    ) -> None:
        self._address = Address.parse(base_url)
        self._endpoint = endpoint
        self._stall_s = stall_s
        self._path = self._address.prefix + PATHS[endpoint]
        self._headers = {"Host": self._address.netloc, "Accept": "text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._slots: contextlib.AbstractAsyncContextManager[None] = (
            asyncio.Semaphore(max_connections) if max_connections else contextlib.nullcontext()
        )
        self._idle: list[tuple[float, HttpConnection]] = []  # since when; the latest last

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for _, connection in self._idle:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # for sockets to close

    async def stream(self, call: Call, record: StreamRecord) -> None:
        """Send it and read to the end of the answer.

        Raises:
            ConfigError: the endpoint cannot be asked this.
        """
        body = orjson.dumps(body_of(self._endpoint, call))
        request = request_of(self._path, self._headers, body)
        async with self._slots:
            record.sent_s = time.perf_counter()
            check = check_of(self._endpoint, record)
            try:
                connection = await self._connect()
            except OSError as error:
                check.fail(Fault.UNREACHABLE, str(error) or repr(error), time.perf_counter())
                return
            await self._exchange(connection, request, check)

    async def _exchange(
        self, connection: HttpConnection, request: bytes, check: StreamCheck
    ) -> None:
        exchange = _Exchange(check)

        def stall() -> None:
            connection.abort()
            exchange.stalled(self._stall_s)

        timer = StallTimer(check, stall_s=self._stall_s, on_stall=stall)
        try:
            connection.post(request, exchange)
            await exchange.done
        finally:
            timer.cancel()
            check.settle()
            if connection.is_reusable:
                self._idle.append((time.perf_counter(), connection))
            else:
                connection.abort()

    async def _connect(self) -> HttpConnection:
        fresh_s = time.perf_counter() - _MAX_IDLE_S
        while self._idle:
            idle_since_s, connection = self._idle.pop()
            if connection.is_reusable and idle_since_s > fresh_s:
                return connection
            connection.abort()
        address = self._address
        async with asyncio.timeout(self._stall_s):
            _, connection = await asyncio.get_running_loop().create_connection(
                HttpConnection, address.host, address.port, ssl=address.is_tls or None
            )
        return connection


class _Exchange:
    """One answer: a stream of events, or a refusal."""

    def __init__(self, check: StreamCheck) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._check = check
        self._events = EventStreamParser()
        self._other = bytearray()  # the body where it is no stream of events
        self._is_stream = False

    def head(self, status: int, content_type: str, now_s: float) -> None:
        del now_s
        self._check.record.status = status
        self._is_stream = status == 200 and content_type.startswith("text/event-stream")

    def body(self, piece: bytes, now_s: float) -> None:
        if self._is_stream:
            for data in self._events.feed(piece):
                self._check.take(data, now_s)
        elif len(self._other) < _MAX_REFUSAL_BYTES:
            self._other += piece

    def end(self, now_s: float) -> None:
        status = self._check.record.status
        if status >= 400:
            self._check.fail(Fault.REFUSED, refusal_of(bytes(self._other)), now_s)
        elif status and not self._is_stream:
            detail = f"status {status} without events: {refusal_of(bytes(self._other))}"
            self._check.fail(Fault.MALFORMED, detail, now_s)
        self._finish(now_s)

    def malformed(self, detail: str, now_s: float) -> None:
        self._check.fail(Fault.MALFORMED, detail, now_s)
        self._finish(now_s)

    def stalled(self, stall_s: float) -> None:
        now_s = time.perf_counter()
        self._check.fail(Fault.STALLED, f"no event for {stall_s:g} s", now_s)
        self._finish(now_s)

    def _finish(self, now_s: float) -> None:
        self._check.close(now_s)
        if not self.done.done():
            self.done.set_result(None)
