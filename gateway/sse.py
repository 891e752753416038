"""Server-sent events, written straight to ASGI.

One task writes, one watches for the client leaving, one fills silence. No `id:` and no `retry:`
fields, and a comment is a block of its own: stock OpenAI clients break on anything else.
Not known here: what the events say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.types import Receive, Scope, Send

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold events back
]


def data(payload: bytes) -> bytes:
    """One unnamed event."""
    return b"data: " + payload + b"\n\n"


def named(event: str, payload: bytes) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + payload + b"\n\n"


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client is gone; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of events.

    Args:
        chunks: whole events, several at once where several are ready. It is closed when the
            client leaves, so whatever it holds open must let go then.
        ping_s: silence after which a comment is sent.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], *, ping_s: float) -> None:
        self._chunks = chunks
        self._ping_s = ping_s
        self._is_silent = True

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(send))
        others = [
            asyncio.create_task(wait_disconnect(receive)),
            asyncio.create_task(self._ping(send)),
        ]
        try:
            await asyncio.wait([writer, *others], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writer, *others):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer
            await asyncio.gather(*others, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        async with contextlib.aclosing(self._chunks) as chunks:
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            async for chunk in chunks:
                self._is_silent = False
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _ping(self, send: Send) -> None:
        while True:
            self._is_silent = True
            await asyncio.sleep(self._ping_s)
            if self._is_silent:
                await send({"type": "http.response.body", "body": PING, "more_body": True})
