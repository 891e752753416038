"""What tests of the WebSocket mode share."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import websockets

TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")


async def send(socket: websockets.ClientConnection, **message: Any) -> None:
    await socket.send(json.dumps(message))


async def until_end(socket: websockets.ClientConnection) -> list[dict[str, Any]]:
    """The events up to the next terminal one."""
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(60):
        while not events or events[-1]["type"] not in TERMINAL:
            events.append(json.loads(await socket.recv()))
    return events
