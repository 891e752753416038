"""Server-sent events, written straight to ASGI.

One task writes, one watches for the client leaving, one fills silence. The response starts with
the first event or the first silence, so that what is refused at once can still be a plain error
with its status. No `id:` and no `retry:` fields, and a comment is a block of its own: stock OpenAI
clients break on anything else. Not known here: what the events say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

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
            client leaves, so whatever it holds open must let go then. What it raises before the
            response has started goes on to whoever handles the application's exceptions.
        ping_s: silence after which a comment is sent.
        on_error: the last events of a stream that broke off by an exception after its start;
            None where `chunks` tells of its errors itself.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        ping_s: float,
        on_error: Callable[[Exception], bytes] | None = None,
    ) -> None:
        self._chunks = chunks
        self._ping_s = ping_s
        self._on_error = on_error
        self._is_started = False
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
            await asyncio.gather(*others, return_exceptions=True)
            with contextlib.suppress(asyncio.CancelledError):
                await writer

    async def _write(self, send: Send) -> None:
        async with contextlib.aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    self._is_silent = False
                    await self._send(send, chunk)
            except Exception as error:
                if self._on_error is None or not self._is_started:
                    raise
                await self._send(send, self._on_error(error))
            await self._send(send, b"", is_last=True)

    async def _ping(self, send: Send) -> None:
        while True:
            self._is_silent = True
            await asyncio.sleep(self._ping_s)
            if self._is_silent:
                await self._send(send, PING)

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        if not self._is_started:
            self._is_started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})
