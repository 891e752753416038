"""Server-sent events, through ASGI until the head is out and past it from then on (`raw_writer`).

One task writes, the request's own watches for the client leaving, and a timer fills silence. The
response starts with the first event or the first silence, so that what is refused at once can still
be a plain error with its status. No `id:` and no `retry:` fields, and a comment is a block of its
own: stock OpenAI clients break on anything else. sse-starlette's writer, measured beside this one
(`load.gateway.writers`), takes twice the CPU per event.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.types import Receive, Scope, Send

from penstock.gateway.errors import failure_of
from penstock.gateway.http.raw_writer import RawWriter, raw_writer_of

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


Source = Callable[[RawWriter], Awaitable[None]]


def from_chunks(chunks: AsyncGenerator[bytes, None]) -> Source:
    """A source that is a generator of whole events, several at once where several are ready. It is
    closed when the client leaves, so whatever it holds open must let go then."""

    async def write_to(out: RawWriter) -> None:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if not out.write(chunk):
                    await out.drained()

    return write_to


class EventStream:
    """A response of events, and the `RawWriter` that its source writes them to.

    Args:
        source: writes whole events, and returns after the last; cancelled when the client leaves.
            What it raises before the response has started becomes a plain error.
        ping_s: silence after which a comment is sent.
        on_error: the last events of a stream that broke off by an exception after its start.
    """

    def __init__(
        self, source: Source, *, ping_s: float, on_error: Callable[[Exception], bytes]
    ) -> None:
        self._source = source
        self._ping_s = ping_s
        self._on_error = on_error
        self._is_started = False
        self._is_silent = True
        self._unsent = b""  # what `write` took before there was a raw writer
        self._writer: RawWriter | None = None
        self._scope: Scope
        self._send: Send
        self._silence: asyncio.TimerHandle
        self._ping: asyncio.Future[None]  # kept, since the event loop holds tasks weakly

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._send = scope, send
        writer = asyncio.create_task(self._run(receive))
        self._await_silence()
        try:
            await wait_disconnect(receive)
        finally:
            self._silence.cancel()
            writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await writer

    def write(self, payload: bytes) -> bool:
        self._is_silent = False
        if self._writer is not None:
            return self._writer.write(payload)
        self._unsent += payload
        return False

    async def drained(self) -> None:
        if self._writer is not None:
            await self._writer.drained()
        else:
            await self._send_unsent(more_body=True)

    async def _run(self, receive: Receive) -> None:
        try:
            await self._source(self)
        except Exception as error:
            if not self._is_started:
                await failure_of(error).response()(self._scope, receive, self._send)
                return
            self.write(self._on_error(error))
        await self._send_unsent(more_body=False)

    async def _send_unsent(self, *, more_body: bool) -> None:
        """As ASGI messages, the head first."""
        if not self._is_started:
            self._is_started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._writer = raw_writer_of(self._scope)
        body, self._unsent = self._unsent, b""
        await self._send({"type": "http.response.body", "body": body, "more_body": more_body})

    def _await_silence(self) -> None:
        self._is_silent = True
        loop = asyncio.get_running_loop()
        self._silence = loop.call_later(self._ping_s, self._on_silence)

    def _on_silence(self) -> None:
        if self._is_silent and not self.write(PING):
            self._ping = asyncio.ensure_future(self.drained())
        self._await_silence()
