"""Server-sent events, written straight to ASGI.

One task writes, the request's own watches for the client leaving, and a timer fills silence. The
response starts with the first event or the first silence, so that what is refused at once can still
be a plain error with its status. No `id:` and no `retry:` fields, and a comment is a block of its
own: stock OpenAI clients break on anything else. sse-starlette's writer, measured beside this one
(`load.gateway.writers`), takes twice the CPU per event. Not known here: what the events say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from starlette.types import Receive, Scope, Send

from penstock.gateway.errors import failure_of

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
    return b"event: %b\ndata: %b\n\n" % (event.encode(), payload)


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client is gone or has its whole response; the request's body must have been
    read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A response of events.

    Args:
        chunks: whole events, several at once where several are ready. It is closed when the
            client leaves, so whatever it holds open must let go then. What it raises before the
            response has started becomes a plain error.
        ping_s: silence after which a comment is sent.
        on_error: the last events of a stream that broke off by an exception after its start.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes, None],
        *,
        ping_s: float,
        on_error: Callable[[Exception], bytes],
    ) -> None:
        self._chunks = chunks
        self._ping_s = ping_s
        self._on_error = on_error
        self._is_started = False
        self._is_silent = True
        self._silence: asyncio.TimerHandle
        self._ping: asyncio.Future[None]  # kept, since the event loop holds tasks weakly

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(self._write(scope, receive, send))
        self._await_silence(send)
        try:
            await wait_disconnect(receive)
        finally:
            self._silence.cancel()
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer

    async def _write(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    await self._send(send, chunk)
            except Exception as error:
                if not self._is_started:
                    await failure_of(error).response()(scope, receive, send)
                    return
                await self._send(send, self._on_error(error))
            await self._send(send, b"", is_last=True)

    def _await_silence(self, send: Send) -> None:
        self._is_silent = True
        loop = asyncio.get_running_loop()
        self._silence = loop.call_later(self._ping_s, self._on_silence, send)

    def _on_silence(self, send: Send) -> None:
        if self._is_silent:
            self._ping = asyncio.ensure_future(self._send(send, PING))
        self._await_silence(send)

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        self._is_silent = False
        if not self._is_started:
            self._is_started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})
