"""uvicorn's HTTP protocol with an end to its patience: slow headers and bodies, large headers and
trailers, requests sent ahead of their answers, readers that do not keep up, connections beyond the
limit, and upgrades that are no WebSocket handshake.

uvicorn 0.54 knows one timer, for a kept-alive connection without a request. Here a connection
that is due to complete a header or a body has a time for it, and is then answered 408 (closed
without a word where it sent nothing). What has no time left, or no place, is refused in the shape
of OpenAI's errors; a header can be refused only through the application, so that WebSocket
handshakes get the same answer: the failure goes with the scope, and `RefuseConnections`, around
the application, sends it.

No timer ends a connection before what has arrived on it was read: a process that stood still
(SIGSTOP, a suspended laptop, a machine with too much to do) finds its timers due when it goes on,
and uvloop runs those before it looks at its sockets. To close a connection then would reset it
under a request that came in time.

What is overridden of uvicorn beside asyncio's and httptools' callbacks: `_start_asgi_task`,
`_should_upgrade`, `handle_websocket_upgrade`, `on_response_complete`, and `flow`.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, ClassVar, cast

import httptools
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from penstock.gateway.errors import Failure, refusal
from penstock.gateway.http.raw_writer import offer_raw_writer

MAX_REFUSED_CONNECTIONS = 64  # beyond the limit, open at once, to be answered 503
_LOG = logging.getLogger(__name__)
_STATE_KEY = "penstock.refused"
_MAX_PIPELINE = 8  # requests that wait for the answers before theirs; then nothing is read
_PIECE_BYTES = 2048  # parsed at a time: a read of 256 KiB can hold 14,000 requests
_WEBSOCKET_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")
_CHUNK_FRAMING_BYTES = 16  # of every chunk that are free: its size and line ends
MAX_STALL_S = 10.0
_TURN_S = 0.001  # a turn of the event loop at least


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a connection may take; the fields of `GatewayConfig` of the same names."""

    max_connections: int
    header_timeout_s: float
    body_timeout_s: float
    keep_alive_s: float = 75.0
    max_refused_connections: int = MAX_REFUSED_CONNECTIONS
    max_header_bytes: int = 64 << 10
    max_stall_s: float = MAX_STALL_S


class _Due(Enum):
    """What the client owes us."""

    NOTHING = auto()
    HEADER = auto()
    BODY = auto()


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    limits: ClassVar[HttpLimits]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = self.limits.keep_alive_s  # type: ignore[assignment]
        self._due = _Due.HEADER
        self._timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._num_body_bytes = 0
        self._num_framing_bytes = 0  # of a body: chunk extensions and trailers
        self._unparsed = b""  # while the pipeline is full
        self._running: RequestResponseCycle | None = None  # uvicorn's `cycle` is the latest parsed
        self._stall = StallTimer(self.loop)

    # -- the connection ---------------------------------------------------------------------

    def refuse_connection(self) -> None:
        """It is beyond the limit: its first request is answered 503."""
        self._refuse_by_application(_too_many_connections())

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _PipelineFlow(transport, self.pipeline)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stall.stop()
        # Those that wait are never run, and would hold this connection as it holds them; the one
        # that runs is to hear that its client is gone.
        self.pipeline.clear()
        self._unparsed = b""
        if self._running is not None:
            self.cycle = self._running
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._stall.start(self.limits.max_stall_s, self._on_stall)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stall.stop()
        super().resume_writing()

    def _on_stall(self) -> None:
        """Cut it off: a stream that ends without its terminal event is resumed."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if len(data) <= _PIECE_BYTES and not self.pipeline:  # the usual case
            self._parse_piece(data)
            self._start_timer()
        else:
            self._parse(self._unparsed + data)

    def handle_websocket_upgrade(self) -> None:
        self._expect_next(_Due.NOTHING)  # from here on WebSocket pings tell whether it lives
        if self._is_answering():
            failure: Failure | None = refusal(
                400, code="invalid_upgrade", message="an upgrade needs a connection of its own"
            )
        else:
            failure = handshake_failure(self.parser.get_method(), self.headers)
        if failure is not None:
            self._refuse(failure)
            return
        super().handle_websocket_upgrade()
        # They hold each other, and nobody will say that this one is lost.
        self.parser = None  # type: ignore[assignment]

    # -- the parser -------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        """Piece by piece, until the pipeline is full: the rest then waits, and no more is read."""
        self._unparsed = b""
        view = memoryview(data)
        while view and self.parser is not None and not self.transport.is_closing():
            if len(self.pipeline) >= _MAX_PIPELINE:
                self._unparsed = bytes(view)
                self.flow.pause_reading()
                break
            size = _PIECE_BYTES
            if self._due is _Due.BODY and len(view) > size:
                size = max(size, self._num_body_bytes_due())
            self._parse_piece(view[:size])
            view = view[size:]
        self._start_timer()

    def _parse_piece(self, piece: memoryview | bytes) -> None:
        if self._due is _Due.NOTHING and not self._is_answering():
            self._due, self._num_header_bytes = _Due.HEADER, 0
        if self._due is _Due.HEADER:
            self._num_header_bytes += len(piece)
        elif self._due is _Due.BODY:
            self._num_framing_bytes += len(piece)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            self._on_upgrade(bytes(piece[upgrade.args[0] :]))
            return
        except httptools.HttpParserError:
            self.send_400_response("the request is not valid HTTP")
            return
        limits = self.limits
        self._num_framing_bytes = max(0, self._num_framing_bytes)
        if self._due is _Due.HEADER and self._num_header_bytes > limits.max_header_bytes:
            self._refuse(_header_too_large(limits.max_header_bytes))
        elif self._due is _Due.BODY and self._num_framing_bytes > limits.max_header_bytes:
            self._refuse(_framing_too_large(limits.max_header_bytes))

    def _num_body_bytes_due(self) -> int:
        """0 or less if the header does not say: the body is chunked."""
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        return int(length) - self._num_body_bytes

    def _on_upgrade(self, rest: bytes) -> None:
        """The parser reads no body after a header that asks for an upgrade, whatever it upgrades
        to. One that is not to a WebSocket we ignore (RFC 9110 §7.8)."""
        method = self.parser.get_method()
        if self._should_upgrade():
            self.handle_websocket_upgrade()
        elif method == b"CONNECT":
            self._refuse(refusal(405, code="method_not_allowed", message="this is no proxy"))
        else:
            version = self.parser.get_http_version().encode()
            head = [b"%b %b HTTP/%b\r\n" % (method, self.url, version)]
            head += (b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
            self._expect_next(_Due.NOTHING)
            self._parse_piece(b"".join([*head, b"\r\n", rest]))

    def _should_upgrade(self) -> bool:
        """HTTP/1.0 knows no upgrade (RFC 9110 §7.8)."""
        return super()._should_upgrade() and self.parser.get_http_version() == "1.1"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._due is not _Due.HEADER:
            self._due, self._num_header_bytes = _Due.HEADER, 1  # of it at least

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._due is _Due.HEADER:  # else it is a trailer, which is for nobody here
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._expect_next(_Due.BODY)
        self._num_framing_bytes = self._num_body_bytes = 0
        if self.parser.should_upgrade() and not self._should_upgrade():
            return  # it is parsed again
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self.limits.max_header_bytes:
            self._refuse_by_application(_header_too_large(self.limits.max_header_bytes))
            self.scope["state"] = self.app_state.copy()
        offer_raw_writer(cast("Scope", self.scope), _Chunks(self.transport, self.flow))
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._num_framing_bytes -= _CHUNK_FRAMING_BYTES

    def on_body(self, body: bytes) -> None:
        self._num_framing_bytes -= len(body)
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._expect_next(_Due.NOTHING)
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._unparsed:
            self._parse(self._unparsed)
        self._start_timer()  # of a request that had to wait for this response

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    # -- time -------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        """Have one running while something is due, unless we do not read for a while ourselves."""
        if self._due is _Due.NOTHING or self._timer is not None or self.transport.is_closing():
            return
        limits = self.limits
        is_header = self._due is _Due.HEADER
        if self.pipeline or (is_header and self._is_answering()):
            return
        timeout_s = limits.header_timeout_s if is_header else limits.body_timeout_s
        self._timer = self.loop.call_later(timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expect_next(self, due: _Due) -> None:
        self._stop_timer()
        self._due = due

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = after_reading(self.loop, super().timeout_keep_alive_handler)

    def _on_timeout(self) -> None:
        self._timer = after_reading(self.loop, self._give_up)

    def _give_up(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._due is _Due.HEADER and self._num_header_bytes == 0:
            self.transport.close()
        else:
            part = self._due.name.lower()
            self._refuse(
                refusal(408, code="request_timeout", message=f"the request's {part} took too long")
            )

    # -- refusing ---------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        self._refuse(refusal(400, code="invalid_http", message=msg))

    def _refuse(self, failure: Failure) -> None:
        """Answer, unless this request has its answer or another is getting one, and close."""
        if self._may_answer() and not self.transport.is_closing():
            self.transport.write(last_answer(failure, self.server_state.default_headers))
        self._expect_next(_Due.NOTHING)
        self.transport.close()

    def _may_answer(self) -> bool:
        cycle = self.cycle
        if cycle is None or not cycle.response_started:
            return not self.pipeline
        return cycle.response_complete and self._due is not _Due.BODY

    def _refuse_by_application(self, failure: Failure) -> None:
        self.app_state = {**self.app_state, _STATE_KEY: failure}


def last_answer(failure: Failure, headers: list[tuple[bytes, bytes]]) -> bytes:
    """What is written to a connection that is then closed. There is no access line of it: no
    request has come as far as the application."""
    _LOG.info("refused a connection: %d %s, %s", failure.status, failure.code, failure.message)
    response = failure.response()
    lines = [b"%s: %s\r\n" % field for field in (*headers, *response.raw_headers)]
    head = [STATUS_LINE[failure.status], *lines, b"connection: close\r\n\r\n"]
    return b"".join([*head, bytes(response.body)])


class _PipelineFlow(FlowControl):
    """Reads no more while the pipeline is full, although uvicorn does whenever the application
    waits for a body or for its client to leave."""

    def __init__(self, transport: asyncio.Transport, pipeline: deque[Any]) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if len(self._pipeline) < _MAX_PIPELINE:
            super().resume_reading()


class _Chunks:
    """The `RawWriter` of a response without a length: the chunked coding (RFC 9112 §7.1)."""

    __slots__ = ("_flow", "_transport")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    def write(self, payload: bytes) -> bool:
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(payload), payload))
        return not self._flow.write_paused

    async def drained(self) -> None:
        await self._flow.drain()


class RefuseConnections:
    """ASGI middleware that answers what the protocol refused; outermost."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure = scope["state"].get(_STATE_KEY) if "state" in scope else None
        if failure is None:
            await self._app(scope, receive, send)
        else:
            closing = replace(failure, headers={**failure.headers, "Connection": "close"})
            await closing.response()(scope, receive, send)


def limited_protocol(limits: HttpLimits) -> type[LimitedHttpProtocol]:
    """The protocol for `uvicorn.Config(http=…)`."""
    return type("LimitedHttpProtocol", (LimitedHttpProtocol,), {"limits": limits})


def handshake_failure(method: bytes, headers: list[tuple[bytes, bytes]]) -> Failure | None:
    """Why this is no handshake for a WebSocket (RFC 6455 §4.2.1), if so."""
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    has_body = b"transfer-encoding" in values or any(
        value.strip(b"0") for value in values.get(b"content-length", ())
    )
    if method != b"GET" or has_body:
        return refusal(
            400, code="invalid_upgrade", message="a WebSocket begins with a GET without a body"
        )
    if values.get(b"sec-websocket-version") != [b"13"]:
        failure = refusal(426, code="invalid_upgrade", message="Sec-WebSocket-Version must be 13")
        return replace(failure, headers={"Sec-WebSocket-Version": "13", "Upgrade": "websocket"})
    keys = values.get(b"sec-websocket-key", [])
    if len(keys) != 1 or not _WEBSOCKET_KEY.fullmatch(keys[0]):
        return refusal(
            400, code="invalid_upgrade", message="Sec-WebSocket-Key must be 16 bytes in base64"
        )
    return None


def _too_many_connections() -> Failure:
    return refusal(
        503, code="too_many_connections", message="the server has as many connections as it takes"
    )


def _framing_too_large(max_bytes: int) -> Failure:
    message = f"trailers and chunk extensions are larger than {max_bytes} bytes"
    return refusal(431, code="header_too_large", message=message)


def _header_too_large(max_bytes: int) -> Failure:
    return refusal(
        431, code="header_too_large", message=f"the header is larger than {max_bytes} bytes"
    )


def after_reading(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object
) -> asyncio.TimerHandle:
    """Call `callback` in the loop's next turn: it polls its sockets before it runs a timer."""
    return loop.call_later(_TURN_S, callback, *args)


class StallTimer:
    """Runs while a transport's buffer is full: a reader that does not keep up is let go, so that it
    comes back and resumes.

    What it has not read stays in its response's log; on its connection there is never more than the
    transport's buffer (64 KiB). If that does not drain for a while, the connection ends.

    Attributes:
        num_stalled: connections of this process that were let go.
    """

    __slots__ = ("_loop", "_timer")
    num_stalled: ClassVar[int] = 0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def start(self, max_stall_s: float, on_stall: Callable[[], None]) -> None:
        """The buffer is full: it has so long to drain.

        What is to be done then is kept only while the timer runs: a connection and its timer must
        not hold each other once it has ended.
        """
        if self._timer is None:
            self._timer = self._loop.call_later(max_stall_s, self._expire, on_stall)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, on_stall: Callable[[], None]) -> None:
        self._timer = after_reading(self._loop, _let_go, on_stall)


def _let_go(on_stall: Callable[[], None]) -> None:
    StallTimer.num_stalled += 1
    on_stall()
