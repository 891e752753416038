"""Calls over HTTP with server-sent events, to any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Self, cast

import httptools
import orjson

from penstock.load.client.integrity import StallTimer, StreamCheck, check_of, refusal_of
from penstock.load.client.records import (
    PATHS,
    Address,
    Call,
    Endpoint,
    Fault,
    StreamRecord,
    body_of,
)


class EventStreamParser:
    """Takes a stream in arbitrary pieces and returns the data of each complete event.

    It follows the WHATWG specification, but ignores event names and ids: in every dialect read
    here the data says what an event is.
    """

    __slots__ = ("_is_after_cr", "_rest")

    def __init__(self) -> None:
        self._rest = bytearray()  # of an event that is not whole yet; lines end with \n
        self._is_after_cr = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that this piece completes. An event cut off by the stream's end is dropped."""
        if b"\r" in piece or self._is_after_cr:
            piece = self._with_plain_ends(piece)
        rest = self._rest
        if not rest and piece.endswith(b"\n\n"):  # the usual case: whole events
            return _data_of(piece[:-2])
        begin = max(len(rest) - 1, 0)  # the last byte may be half of an event's end
        rest += piece
        end = rest.rfind(b"\n\n", begin)
        if end < 0:
            return []
        whole = bytes(rest[:end])
        del rest[: end + 2]
        return _data_of(whole)

    def _with_plain_ends(self, piece: bytes) -> bytes:
        """A line may end with \\r, \\n or both, and the two may come in different pieces."""
        if self._is_after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
            self._is_after_cr = False
        if piece:
            self._is_after_cr = piece.endswith(b"\r")
        return piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data_of(events: bytes) -> list[bytes]:
    found = []
    for event in events.split(b"\n\n"):
        if event.startswith(b"data: ") and b"\n" not in event:
            found.append(event[6:])
            continue
        lines = [line.partition(b":") for line in event.split(b"\n")]
        data = [value.removeprefix(b" ") for name, _, value in lines if name == b"data"]
        if data:
            found.append(b"\n".join(data))
    return found


class HttpConnection(asyncio.Protocol):
    """An HTTP/1.1 connection, for one POST at a time; `is_reusable` once its last response was
    read completely. The answer is a stream of events, or a refusal.

    No coroutine runs per read: the event loop calls the parser, and the parser calls the check.
    That matters on two cores that the client shares with the measured server.
    """

    def __init__(self) -> None:
        self.is_reusable = True
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._now_s = 0.0
        self._check: StreamCheck | None = None  # of the running answer
        self._done: asyncio.Future[None] | None = None

    def post(self, request: bytes, check: StreamCheck) -> asyncio.Future[None]:
        """Send a request, head and body; the future is done when its answer has ended."""
        assert self.is_reusable
        assert self._transport is not None, "not connected"
        self.is_reusable = False
        self._check, self._done = check, asyncio.get_running_loop().create_future()
        self._events, self._other = EventStreamParser(), bytearray()
        self._content_type, self._is_stream = "", False
        self._transport.write(request)
        return self._done

    def abort(self) -> None:
        """Close at once; no check is called again."""
        self.is_reusable = False
        self._check = None
        if self._transport is not None:
            self._transport.abort()

    def fail(self, fault: Fault, detail: str) -> None:
        """End the running answer with a fault, and the connection with it."""
        now_s = time.perf_counter()
        if self._check is not None:
            self._check.fail(fault, detail, now_s)
        self._end(now_s)
        self.abort()

    # -- called by the event loop -----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one by shape alone

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a bug of ours
        except httptools.HttpParserError as error:
            self.fail(Fault.MALFORMED, f"not HTTP: {error}")

    def connection_lost(self, _: Exception | None) -> None:
        self.is_reusable = False
        self._finish(time.perf_counter())

    # -- called by the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._check is None:  # nobody asked
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._content_type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._check is not None:
            status = self._check.record.status = self._parser.get_status_code()
            self._is_stream = status == 200 and self._content_type.startswith("text/event-stream")

    def on_body(self, piece: bytes) -> None:
        if self._check is None:
            return
        if self._is_stream:
            for data in self._events.feed(piece):
                self._check.take(data, self._now_s)
        elif len(self._other) < _MAX_REFUSAL_BYTES:
            self._other += piece

    def on_message_complete(self) -> None:
        if self._check is not None:
            self.is_reusable = self._parser.should_keep_alive()
        self._finish(self._now_s)

    # -- the end of an answer ---------------------------------------------------------------------

    def _finish(self, now_s: float) -> None:
        if self._check is None:
            return
        status = self._check.record.status
        if status >= 400:
            self._check.fail(Fault.REFUSED, refusal_of(bytes(self._other)), now_s)
        elif status and not self._is_stream:
            detail = f"status {status} without events: {refusal_of(bytes(self._other))}"
            self._check.fail(Fault.MALFORMED, detail, now_s)
        self._end(now_s)

    def _end(self, now_s: float) -> None:
        check, self._check = self._check, None
        if check is not None:
            check.close(now_s)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def request_of(path: str, headers: dict[str, str], body: bytes) -> bytes:
    """A POST of JSON, as bytes."""
    fields: dict[str, Any] = {
        **headers,
        "Content-Type": "application/json",
        "Content-Length": len(body),
    }
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


# Servers close idle connections after 5 s (uvicorn, cpp-httplib), which no request may hit.
_MAX_IDLE_S = 2.0
_MAX_REFUSAL_BYTES = 64 << 10


class SseTransport:
    """Posts calls to one endpoint of one server.

    Args:
        keeps_connections: for the next call; else each call has a connection of its own.
        stall_s: silence, apart from comments, that is a fault.
    """

    def __init__(
        self,
        base_url: str,
        endpoint: Endpoint,
        *,
        api_key: str | None = None,
        keeps_connections: bool = True,
        stall_s: float = 60.0,
    ) -> None:
        self._address = Address.parse(base_url)
        self._endpoint = endpoint
        self._stall_s = stall_s
        self._keeps_connections = keeps_connections
        self._path = self._address.prefix + PATHS[endpoint]
        self._headers = {"Host": self._address.netloc, "Accept": "text/event-stream"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._idle: list[tuple[float, HttpConnection]] = []  # since when; the latest last

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for _, connection in self._idle:
            connection.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # for sockets to close

    async def stream(self, call: Call, record: StreamRecord) -> None:
        """Send a call and read its whole answer. Raises ConfigError if the endpoint cannot take
        it."""
        body = orjson.dumps(body_of(self._endpoint, call))
        request = request_of(self._path, self._headers, body)
        record.sent_s = time.perf_counter()
        check = check_of(self._endpoint, record)
        try:
            connection = await self._connect()
        except OSError as error:
            check.fail(Fault.UNREACHABLE, str(error) or repr(error), time.perf_counter())
            return

        def stall() -> None:
            connection.fail(Fault.STALLED, f"no event for {self._stall_s:g} s")

        timer = StallTimer(check, stall_s=self._stall_s, on_stall=stall)
        try:
            await connection.post(request, check)
        finally:
            timer.cancel()
            check.settle()
            if connection.is_reusable and self._keeps_connections:
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
