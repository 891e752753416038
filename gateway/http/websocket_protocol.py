"""uvicorn's WebSocket protocol with a limit for slow readers, and with RFC 6455's close codes where
uvicorn only logs a traceback.

    1007   a text message that is not UTF-8 (RFC 6455 §8.1)
    1013   "try again later": the reader was too slow and should reconnect and resume

The connection stays open until the client has read the code, and answers with a close frame or
closes. uvicorn would close it at once, and data that the client is still sending would reset it,
often before the client has read the code. (A TLS connection has no end of its own to show.)
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar, cast

from starlette.types import Scope
from starlette.websockets import WebSocketDisconnect
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidMessage
from websockets.frames import Close
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from penstock.gateway.errors import refusal
from penstock.gateway.http.http_protocol import MAX_STALL_S, StallTimer, after_reading, last_answer
from penstock.gateway.http.raw_writer import offer_raw_writer
from penstock.gateway.wake_ups import WRITES

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

_OPEN = State.OPEN  # looking up an enum's member takes longer than a call
_CLOSE_S = 5.0  # for the client to read the close code
_MAX_CONTROL_BYTES = 131  # of a masked frame


class PatientWebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection."""

    max_stall_s: ClassVar[float] = MAX_STALL_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stall = StallTimer(self.loop)
        self._has_failed = False
        self._last_bytes = b""  # received since it failed

    def connection_lost(self, exc: Exception | None) -> None:
        self._stall.stop()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._stall.start(self.transport, self.max_stall_s, self._on_stall)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stall.stop()
        super().resume_writing()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.handshake_complete:  # the handshake was not refused
            offer_raw_writer(
                cast("Scope", self.scope), _Messages(self.conn, self.transport, self.writable)
            )

    def start_keepalive(self) -> None:
        del self.request, self.response  # not needed after the handshake; saves memory
        super().start_keepalive()

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # refused by an answer; uvicorn would log an error

    def data_received(self, data: bytes) -> None:
        if self._has_failed:
            self._last_bytes = (self._last_bytes + data)[-_MAX_CONTROL_BYTES:]
            if self.conn.close_sent and _ends_with_echo(self._last_bytes, self.conn.close_sent):
                self.transport.close()
            return
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            self._refuse_handshake(self.conn.handshake_exc)

    def _refuse_handshake(self, error: Exception) -> None:
        """Answer a handshake that the websockets library cannot read: its limits are tighter than
        those for HTTP. uvicorn would wait without an answer."""
        self._has_failed = self.handshake_complete = self.close_sent = True
        if isinstance(error, InvalidMessage):
            failure = refusal(400, code="invalid_upgrade", message=str(error))
        else:
            failure = refusal(431, code="header_too_large", message=str(error))
        self.transport.write(last_answer(failure, self.default_headers))
        self.transport.close()

    def handle_ping(self) -> None:
        if not self._has_failed:
            super().handle_ping()

    def keepalive_timeout(self) -> None:
        self.pong_timer = after_reading(self.loop, super().keepalive_timeout)

    def handle_parser_exception(self) -> None:
        """Send the close code to the client and the application, and wait for the client to
        close."""
        close = self.conn.close_sent
        assert close is not None
        self._has_failed = self.close_sent = self.disconnected = True
        self.queue.put_nowait(
            {"type": "websocket.disconnect", "code": close.code, "reason": close.reason}
        )
        self.transport.write(b"".join(self.conn.data_to_send()))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.close_timer = self.loop.call_later(_CLOSE_S, self.transport.abort)

    def send_receive_event_to_app(self) -> None:
        is_text = self.curr_msg_data_type == "text" and not self.close_sent
        if is_text and not _is_utf8(b"".join(self.frames)):
            self.frames = []
            self.conn.send_close(1007, "text must be UTF-8")
            self.handle_parser_exception()
            return
        super().send_receive_event_to_app()

    def _on_stall(self) -> None:
        """Send 1013 after the data in the buffer; abort if the client does not read it."""
        if not (self.close_sent or self.transport.is_closing()):
            self.conn.send_close(1013, "too slow; connect again and resume")
            self.handle_parser_exception()
        self.loop.call_later(_CLOSE_S, self.transport.abort)


class _Messages:
    """The `RawWriter` of a WebSocket: text messages."""

    __slots__ = ("_conn", "_transport", "_writable")

    def __init__(
        self, conn: ServerProtocol, transport: asyncio.Transport, writable: asyncio.Event
    ) -> None:
        self._conn = conn
        self._transport = transport
        self._writable = writable

    def write(self, payload: bytes) -> bool:
        if self._conn.state is not _OPEN or self._transport.is_closing():
            raise WebSocketDisconnect(1006)
        size = len(payload)
        head = _FRAME_HEADS[size] if size < _NUM_HEADS else frame_head(size)
        WRITES.write(self._transport, head + payload)
        return self._writable.is_set()

    async def drained(self) -> None:
        await self._writable.wait()


def frame_head(size: int) -> bytes:
    """The start of an unmasked text message in one frame (RFC 6455 §5.2)."""
    if size < 126:
        return b"\x81%c" % size
    if size < 1 << 16:
        return b"\x81\x7e" + size.to_bytes(2, "big")
    return b"\x81\x7f" + size.to_bytes(8, "big")


_NUM_HEADS = 1024
_FRAME_HEADS = [frame_head(size) for size in range(_NUM_HEADS)]  # making one takes longer


def _ends_with_echo(received: bytes, sent: Close) -> bool:
    """Whether the client's last frame is its answer to a close frame: with the same code, and the
    same reason or none (RFC 6455 §5.5.1)."""
    for size in (2, 2 + len(sent.reason.encode())):
        frame = received[-size - 6 :]  # two bytes, a mask of four, code and reason
        code = bytes(a ^ b for a, b in zip(frame[6:8], frame[2:4], strict=False))
        if frame[:2] == bytes((0x88, 0x80 | size)) and code == sent.code.to_bytes(2, "big"):
            return True
    return False


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
