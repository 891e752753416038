"""A WebSocket server that does as told: the other end of the WebSocket transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import orjson
from websockets.asyncio.server import ServerConnection, serve

from penstock.load.client.websocket import WebSocketTransport

from .scripted_server import response

EVENTS = response("on", "e t", "wo")


class Peer:
    """The server's end of one socket."""

    def __init__(self, connection: ServerConnection) -> None:
        self.connection = connection

    async def take(self) -> dict[str, Any]:
        message: dict[str, Any] = orjson.loads(await self.connection.recv())
        return message

    async def send(self, event: dict[str, Any], lane: str) -> None:
        await self.connection.send(orjson.dumps({**event, "stream_id": lane}).decode())

    async def answer(self, lane: str, *, num_events: int | None = None) -> None:
        for event in EVENTS[:num_events]:
            await self.send(event, lane)


@asynccontextmanager
async def connected(
    handle: Callable[[Peer], Awaitable[None]], **settings: Any
) -> AsyncIterator[tuple[WebSocketTransport, list[Peer]]]:
    """A transport to a server, and the server's ends of its sockets."""
    peers: list[Peer] = []

    async def accept(connection: ServerConnection) -> None:
        peers.append(Peer(connection))
        await handle(peers[-1])

    async with serve(accept, "127.0.0.1", 0, compression=None) as server:
        base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with WebSocketTransport(base_url, **settings) as transport:
            yield transport, peers
