"""Where an answer goes: an event stream or a WebSocket, through ASGI.

A reset needs the TCP connection itself, which ASGI hides: `TransportProtocol` hands it on in the
scope.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
Scope: TypeAlias = MutableMapping[str, Any]

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
_LINGER_NOT = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of HTTP, and the way to answer it."""

    scope: Scope
    receive: Receive
    send: Send


class TransportProtocol(HttpToolsProtocol):
    """uvicorn's, with two things in `scope["state"]`: the transport, also after an upgrade to
    WebSocket, and when the request came. Of many at once each then counts from its own arrival."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio turns Nagle's algorithm off only where the listening socket named its protocol.
        connection: socket.socket = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.app_state = {**self.app_state, "transport": transport}

    def data_received(self, data: bytes) -> None:
        self.app_state["received_us"] = time.monotonic_ns() // 1000
        super().data_received(data)


def reset(scope: Scope) -> None:
    """End a connection by a TCP reset."""
    transport: asyncio.Transport = scope["state"]["transport"]
    connection: socket.socket = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    transport.abort()


class EventStreamOutlet:
    """One response of HTTP."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._is_reset = False

    async def begin(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})

    async def send(self, frames: Sequence[bytes]) -> None:
        body = frames[0] if len(frames) == 1 else b"".join(frames)
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def cut(self) -> None:
        """The end of the stream, which `end` makes in any case."""

    async def end(self) -> None:
        if not self._is_reset:
            await self._send({"type": "http.response.body", "body": b""})

    def reset(self) -> None:
        self._is_reset = True
        reset(self._scope)


class SocketOutlet:
    """One WebSocket, which may carry several answers."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send

    async def send(self, frames: Sequence[bytes]) -> None:
        for frame in frames:
            await self._send({"type": "websocket.send", "text": frame.decode()})

    async def cut(self) -> None:
        await self._send({"type": "websocket.close", "code": 1001})

    def reset(self) -> None:
        reset(self._scope)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do some work of HTTP; stop when the client leaves."""
    worker = asyncio.create_task(work)
    watcher = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            await worker
    finally:
        worker.cancel()
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(worker, watcher, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
