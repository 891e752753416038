"""uvicorn's HTTP protocol with limits: for slow headers and bodies, large headers and trailers,
pipelined requests, slow readers, too many connections, and invalid upgrades.

uvicorn 0.54 has one timer, for a kept-alive connection without a request. Here a connection also
has a time limit for each header and body, after which it is answered 408 (or closed without an
answer if it sent nothing). Refusals are in OpenAI's error format. A header can be refused only
through the application, so that WebSocket handshakes get the same answer: the failure is put into
the scope, and `RefuseConnections`, around the application, sends it.

No timer ends a connection before the data that has arrived on it is read. When a process was
stopped (SIGSTOP, a suspended laptop, an overloaded machine), its timers are due when it resumes,
and uvloop runs them before it polls its sockets. Closing a connection then would reset it although
its request arrived in time.

The package's docstring lists the parts of uvicorn that are overridden.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple, cast

import httptools
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from penstock.gateway.errors import Failure, refusal
from penstock.gateway.http.half_closed import (
    PROBE_AFTER_S,
    Hangups,
    can_outlive_input,
    send_nothing,
)
from penstock.gateway.http.raw_writer import offer_raw_writer
from penstock.gateway.wake_ups import WRITES

MAX_REFUSED_CONNECTIONS = 64  # beyond the limit, open at the same time, answered 503
_LOG = logging.getLogger(__name__)
_STATE_KEY = "penstock.refused"
_MAX_PIPELINE = 8  # waiting requests, beyond which nothing is read
_PIECE_BYTES = 2048  # parsed at a time: a read of 256 KiB can hold 14,000 requests
_WEBSOCKET_KEY = re.compile(rb"[A-Za-z0-9+/]{22}==")
_CHUNK_FRAMING_BYTES = 16  # not counted for each chunk: its size and line ends
MAX_STALL_S = 10.0
_TURN_S = 0.001  # at least one iteration of the event loop


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of connections; see the fields of the same names in `GatewayConfig`."""

    max_connections: int
    header_timeout_s: float
    body_timeout_s: float
    keep_alive_s: float = 75.0
    max_refused_connections: int = MAX_REFUSED_CONNECTIONS
    max_header_bytes: int = 64 << 10
    max_stall_s: float = MAX_STALL_S


class _Due(Enum):
    """What the client has to send next."""

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
        self._num_framing_bytes = 0  # chunk extensions and trailers of a body
        self._unparsed = b""  # while the pipeline is full
        self._running: RequestResponseCycle | None = None  # uvicorn's `cycle` is the latest parsed
        self._stall = StallTimer(self.loop)
        self._is_last = False  # the connection closes after its next answer
        self._forget_hangup: Callable[[], None] | None = None  # the client has closed its side

    # -- the connection ---------------------------------------------------------------------

    def refuse_connection(self) -> None:
        """The connection exceeds the limit: its first request is answered 503."""
        self._refuse_by_application(_too_many_connections())

    def close_after_answer(self) -> None:
        """The server is shutting down: this connection's next answer, or the current one, is its
        last."""
        self._is_last = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def close_if_idle(self) -> None:
        """Close the connection unless it has a request."""
        has_request = self._num_header_bytes and self._due is not _Due.NOTHING
        if not (has_request or self._is_answering() or self.pipeline):
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _PipelineFlow(transport, self.pipeline)
        self._start_timer()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more. Whether the connection stays open: until the last answer, if
        there is any to wait for, and the client does not leave before."""
        cycle = self._running
        if self._forget_hangup is not None:
            return True
        if (
            cycle is None
            or cycle.response_complete
            or self._due is not _Due.NOTHING
            or not can_outlive_input(self.transport, cycle)
        ):
            return None
        if self.cycle is not None:
            self.cycle.keep_alive = False  # the latest request's
        self._forget_hangup = Hangups.watch(self.loop, self.transport, self.transport.abort)
        if cycle.response_started:
            send_nothing(self.transport, cycle)
        else:  # most answers begin soon, and scripts take the first line for the status
            self.loop.call_later(PROBE_AFTER_S, self._probe, cycle)
        return True

    def _probe(self, cycle: RequestResponseCycle) -> None:
        """Find out whether the client of an answer that has not begun is gone."""
        is_waiting = cycle is self._running and not cycle.response_started
        if is_waiting and not self.transport.is_closing():
            send_nothing(self.transport, cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._forget_hangup is not None:
            self._forget_hangup()
        self._stop_timer()
        self._stall.stop()
        # Waiting requests are never run, and would form a reference cycle with this connection.
        # The running one must learn that its client is gone.
        self.pipeline.clear()
        self._unparsed = b""
        if self._running is not None:
            self.cycle = self._running
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._stall.start(self.transport, self.limits.max_stall_s, self._on_stall)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stall.stop()
        super().resume_writing()

    def _on_stall(self) -> None:
        """Abort the connection: a client resumes a stream without a terminal event."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if len(data) <= _PIECE_BYTES and not self.pipeline:  # the usual case
            self._parse_piece(data)
            self._start_timer()
        else:
            self._parse(self._unparsed + data)

    def handle_websocket_upgrade(self) -> None:
        self._expect_next(_Due.NOTHING)  # from here on WebSocket pings detect a dead connection
        if self._is_answering():
            failure: Failure | None = refusal(
                400,
                code="invalid_upgrade",
                message="a connection cannot be upgraded while a request is being answered",
            )
        else:
            failure = handshake_failure(self.parser.get_method(), self.headers)
        if failure is not None:
            self._refuse(failure)
            return
        super().handle_websocket_upgrade()
        # Breaks a reference cycle: `connection_lost` will not be called on this protocol.
        self.parser = None  # type: ignore[assignment]

    # -- the parser -------------------------------------------------------------------------

    def _parse(self, data: bytes) -> None:
        """Parse in pieces until the pipeline is full; then the rest waits and reading pauses."""
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
        """Missing bytes of the body; 0 or less if its length is unknown, because it is chunked."""
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        return int(length) - self._num_body_bytes

    def _on_upgrade(self, rest: bytes) -> None:
        """The parser stops after a header that asks for an upgrade. An upgrade to anything but a
        WebSocket is ignored (RFC 9110 §7.8), so its header is parsed again without it."""
        method = self.parser.get_method()
        if self._should_upgrade():
            self.handle_websocket_upgrade()
        elif method == b"CONNECT":
            self._refuse(
                refusal(405, code="method_not_allowed", message="CONNECT is not supported")
            )
        else:
            version = self.parser.get_http_version().encode()
            head = [b"%b %b HTTP/%b\r\n" % (method, self.url, version)]
            head += (b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade")
            self._expect_next(_Due.NOTHING)
            self._parse_piece(b"".join([*head, b"\r\n", rest]))

    def _should_upgrade(self) -> bool:
        """HTTP/1.0 has no upgrade (RFC 9110 §7.8)."""
        return super()._should_upgrade() and self.parser.get_http_version() == "1.1"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._due is not _Due.HEADER:
            self._due, self._num_header_bytes = _Due.HEADER, 1  # at least one byte has arrived

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._due is _Due.HEADER:  # otherwise it is a trailer, which is ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._expect_next(_Due.BODY)
        self._num_framing_bytes = self._num_body_bytes = 0
        if self.parser.should_upgrade() and not self._should_upgrade():
            return  # the header is parsed again
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self.limits.max_header_bytes:
            self._refuse_by_application(_header_too_large(self.limits.max_header_bytes))
            self.scope["state"] = self.app_state.copy()
        version = self.parser.get_http_version()
        if version == "1.1":
            offer_raw_writer(cast("Scope", self.scope), _Chunks(self.transport, self.flow))
        elif failure := _version_failure(version, self.headers):
            self._refuse_by_application(failure)
            self.scope["state"] = self.app_state.copy()
        super().on_headers_complete()
        if self._is_last and self.cycle is not None:
            self.cycle.keep_alive = False

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
        self._start_timer()  # for a request that had to wait for this response

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] != "1.1":
            app = _until_close(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    # -- time -------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        """Run a timer while something is due, unless this side has paused reading."""
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
        """Answer, unless this request was answered or another one is being answered, and close."""
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
    """The answer on a connection that is then closed. It has a log line here because the request
    never reaches the access log."""
    _LOG.info("refused a connection: %d %s, %s", failure.status, failure.code, failure.message)
    response = failure.response()
    lines = [b"%s: %s\r\n" % field for field in (*headers, *response.raw_headers)]
    head = [STATUS_LINE[failure.status], *lines, b"connection: close\r\n\r\n"]
    return b"".join([*head, bytes(response.body)])


class _PipelineFlow(FlowControl):
    """Keeps reading paused while the pipeline is full. uvicorn resumes it whenever the application
    waits for a body or for a disconnect."""

    def __init__(self, transport: asyncio.Transport, pipeline: deque[Any]) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if len(self._pipeline) < _MAX_PIPELINE:
            super().resume_reading()


_NUM_HEADS = 1024
_CHUNK_HEADS = [b"%x\r\n" % size for size in range(_NUM_HEADS)]  # formatting takes longer


class _Chunks:
    """The `RawWriter` of a response without a length: the chunked coding (RFC 9112 §7.1)."""

    __slots__ = ("_flow", "_transport")

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    def write(self, payload: bytes) -> bool:
        transport, size = self._transport, len(payload)
        if not transport.is_closing():
            head = _CHUNK_HEADS[size] if size < _NUM_HEADS else b"%x\r\n" % size
            WRITES.write(transport, b"".join((head, payload, b"\r\n")))
        return not self._flow.write_paused

    async def drained(self) -> None:
        await self._flow.drain()


def _until_close(cycle: RequestResponseCycle, app: Any) -> ASGIApp:
    """`app` for a client of HTTP/1.0, which knows no chunked coding (RFC 9112 §6.1): a body without
    a length ends with the connection."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = False

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                has_length = b"content-length" in names
                if not has_length:
                    cycle.chunked_encoding = False  # uvicorn adds the coding while this is None
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return run


class RefuseConnections:
    """The outermost ASGI middleware, which answers requests that the protocol refused."""

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
    """Why this is not a valid WebSocket handshake (RFC 6455 §4.2.1); None if it is."""
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    has_body = b"transfer-encoding" in values or any(
        value.strip(b"0") for value in values.get(b"content-length", ())
    )
    if method != b"GET" or has_body:
        return refusal(
            400,
            code="invalid_upgrade",
            message="a WebSocket handshake must be a GET without a body",
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
        503, code="too_many_connections", message="the server has reached its connection limit"
    )


def _framing_too_large(max_bytes: int) -> Failure:
    message = f"trailers and chunk extensions are larger than {max_bytes} bytes"
    return refusal(431, code="header_too_large", message=message)


def _version_failure(version: str, headers: list[tuple[bytes, bytes]]) -> Failure | None:
    """Why a header of another version than HTTP/1.1 is refused; None if it is not."""
    if version != "1.0":
        message = f"HTTP/{version} is not supported; HTTP/1.1 is"
        return refusal(505, code="http_version_not_supported", message=message)
    if any(name == b"transfer-encoding" for name, _ in headers):  # RFC 9112 §6.1
        return refusal(400, code="invalid_http", message="HTTP/1.0 has no Transfer-Encoding")
    return None


def _header_too_large(max_bytes: int) -> Failure:
    return refusal(
        431, code="header_too_large", message=f"the header is larger than {max_bytes} bytes"
    )


def after_reading(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: object
) -> asyncio.TimerHandle:
    """Call `callback` in the loop's next iteration, after it has polled its sockets."""
    return loop.call_later(_TURN_S, callback, *args)


class StallTimer:
    """Runs while a transport's buffer is full. It disconnects a slow reader, which can reconnect
    and resume.

    Unread events stay in the response's log, so a connection holds at most the transport's buffer
    (64 KiB). If nothing leaves the buffer for `max_stall_s`, the connection ends.

    Attributes:
        num_stalled: connections of this process that were disconnected.
    """

    __slots__ = ("_loop", "_timer")
    num_stalled: ClassVar[int] = 0

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def start(
        self,
        transport: asyncio.WriteTransport,
        max_stall_s: float,
        on_stall: Callable[[], None],
    ) -> None:
        """The buffer is full; call `on_stall` if nothing leaves it in `max_stall_s`.

        The arguments are kept only while the timer runs, so that a connection and its timer form
        no reference cycle.
        """
        if self._timer is None:
            wait = _Wait(transport, transport.get_write_buffer_size(), max_stall_s, on_stall)
            self._timer = self._loop.call_later(max_stall_s, self._expire, wait)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, wait: _Wait) -> None:
        self._timer = after_reading(self._loop, self._judge, wait)

    def _judge(self, wait: _Wait) -> None:
        num_bytes = wait.transport.get_write_buffer_size()
        if num_bytes < wait.num_bytes:
            wait = wait._replace(num_bytes=num_bytes)
            self._timer = self._loop.call_later(wait.max_stall_s, self._expire, wait)
            return
        StallTimer.num_stalled += 1
        wait.on_stall()


class _Wait(NamedTuple):
    """For something to leave a buffer of `num_bytes`."""

    transport: asyncio.WriteTransport
    num_bytes: int
    max_stall_s: float
    on_stall: Callable[[], None]
