"""uvicorn's HTTP protocol with an end to its patience: slow headers and bodies, large headers,
readers that do not keep up, and connections beyond the limit.

uvicorn 0.54 knows one timer, for a kept-alive connection without a request. Here a connection
that is due to complete a header or a body has a time for it, and is then answered 408 (closed
without a word where it sent nothing). What has no time left, or no place, is refused in the shape
of OpenAI's errors; a header can be refused only through the application, so that WebSocket
handshakes get the same answer: the failure goes with the scope, and `RefuseConnections`, around
the application, sends it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, ClassVar, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from penstock.gateway.direct import offer_direct
from penstock.gateway.errors import Failure, refusal
from penstock.gateway.stall_timer import MAX_STALL_S, StallTimer

_STATE_KEY = "penstock.refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """What a connection may take; the fields of `GatewayConfig` of the same names."""

    max_connections: int
    header_timeout_s: float
    body_timeout_s: float
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
        self._due = _Due.HEADER
        self._timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0
        self._stall = StallTimer(self.loop)

    # -- the connection ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self._refuse_by_application(_too_many_connections())
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stall.stop()
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
        if self._due is _Due.NOTHING and (self.cycle is None or self.cycle.response_complete):
            self._due, self._num_header_bytes = _Due.HEADER, 0
        if self._due is _Due.HEADER:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._due is _Due.HEADER and self._num_header_bytes > self.limits.max_header_bytes:
            self._refuse(_header_too_large(self.limits.max_header_bytes))
        self._start_timer()

    def handle_websocket_upgrade(self) -> None:
        self._settle(_Due.NOTHING)  # from here on WebSocket pings tell whether it lives
        super().handle_websocket_upgrade()
        # They hold each other, and nobody will say that this one is lost.
        self.parser = None  # type: ignore[assignment]

    # -- the parser -------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._settle(_Due.BODY)
        num_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if num_bytes > self.limits.max_header_bytes:
            self._refuse_by_application(_header_too_large(self.limits.max_header_bytes))
            self.scope["state"] = self.app_state.copy()
        offer_direct(cast("Scope", self.scope), _Chunks(self.transport, self.flow))
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._settle(_Due.NOTHING)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._start_timer()  # of a request that had to wait for this response

    # -- time -------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        """Have one running while something is due, unless we do not read for a while ourselves."""
        has_to_wait = bool(self.pipeline) or self.transport.is_closing()
        if self._due is _Due.NOTHING or self._timer is not None or has_to_wait:
            return
        limits = self.limits
        is_header = self._due is _Due.HEADER
        timeout_s = limits.header_timeout_s if is_header else limits.body_timeout_s
        self._timer = self.loop.call_later(timeout_s, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _settle(self, due: _Due) -> None:
        self._stop_timer()
        self._due = due

    def _on_timeout(self) -> None:
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
            response = failure.response()
            fields = [*self.server_state.default_headers, *response.raw_headers]
            lines = [b"%s: %s\r\n" % field for field in fields]
            head = [STATUS_LINE[failure.status], *lines, b"connection: close\r\n\r\n"]
            self.transport.write(b"".join([*head, bytes(response.body)]))
        self._settle(_Due.NOTHING)
        self.transport.close()

    def _may_answer(self) -> bool:
        cycle = self.cycle
        if cycle is None or not cycle.response_started:
            return not self.pipeline
        return cycle.response_complete and self._due is not _Due.BODY

    def _refuse_by_application(self, failure: Failure) -> None:
        self.app_state = {**self.app_state, _STATE_KEY: failure}


class _Chunks:
    """The `Direct` of a response without a length: the chunked coding (RFC 9112 §7.1)."""

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


def _too_many_connections() -> Failure:
    return refusal(
        503, code="too_many_connections", message="the server has as many connections as it takes"
    )


def _header_too_large(max_bytes: int) -> Failure:
    return refusal(
        431, code="header_too_large", message=f"the header is larger than {max_bytes} bytes"
    )
