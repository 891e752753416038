"""Server-sent events, through ASGI until the head is out and past it from then on (`raw_writer`).

`EventStream` carries live answers, `ResumedEventStream` those that are resumed or run in the
background. The latter is sse-starlette's response; live answers go past it for speed and memory.
Events are JSON without line breaks, so `data` and `named` encode them as sse-starlette does, in
0.5 ms instead of 7.8 for an event of 1 MiB.

Either response starts with the first event or the first silence, so that what is refused at once
can still be a plain error with its status. No `id:` and no `retry:` fields, and a comment is a
block of its own: stock OpenAI clients break on anything else. Anthropic's API has an event instead
of the comment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.types import Message, Receive, Scope, Send

from penstock.gateway.errors import failure_of
from penstock.gateway.http.raw_writer import RawWriter, raw_writer_of

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_CACHE_CONTROL = {"Cache-Control": "no-cache"}
# sse-starlette's, but whether the connection is kept is for uvicorn to say.
_HEADERS = [
    field
    for field in EventSourceResponse(iter(()), headers=_CACHE_CONTROL).raw_headers
    if field[0] != b"connection"
]

# sse-starlette replaces `uvicorn.Server.handle_exit`, and would cut its streams within half a
# second of SIGTERM. Here all streams are drained first (`launch/process.py`).
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]
logging.getLogger("sse_starlette.sse").setLevel(logging.INFO)  # at debug it logs what is sent


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


class EventStream:
    """A response of events, and the `RawWriter` that its source writes them to.

    Args:
        source: writes whole events, and returns after the last; cancelled when the client leaves.
            What it raises before the response has started becomes a plain error.
        ping_s: silence after which `ping` is sent.
        on_error: the last events of a stream that broke off by an exception after its start.
        ping: a comment or an event.
    """

    def __init__(
        self,
        source: Source,
        *,
        ping_s: float,
        on_error: Callable[[Exception], bytes],
        ping: bytes = PING,
    ) -> None:
        self._source = source
        self._ping_s = ping_s
        self._ping_sent = ping
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
        """Send what is unsent as ASGI messages, the head first."""
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
        if self._is_silent and not self.write(self._ping_sent):
            self._ping = asyncio.ensure_future(self.drained())
        self._await_silence()


class _Ping(ServerSentEvent):
    """A ping as it is; while events are sent it is nothing."""

    def __init__(self, ping: bytes) -> None:
        super().__init__()
        self._ping = ping

    def encode(self) -> bytes:
        return self._ping


class ResumedEventStream(EventStream):
    """A stream by sse-starlette, which sends the head, the pings and the end, and watches for the
    client leaving. The source writes past it: what sse-starlette sends itself wakes a task and
    enters a cancel scope at every event.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._send = scope, send
        content, link = self._content(), _Link(self, receive)
        response = EventSourceResponse(
            content,
            headers=_CACHE_CONTROL,
            ping=self._ping_s,
            ping_message_factory=link.next_ping,
        )
        try:
            await response({"type": "http", "method": scope["method"]}, link.receive, link.send)
        except Exception as error:
            if self._is_started:
                raise
            await failure_of(error).response()(scope, receive, send)
        finally:
            link.close()
            await content.aclose()

    async def drained(self) -> None:
        await super().drained()
        await asyncio.sleep(0)  # once the client is gone nothing waits, and so nothing is cancelled

    async def _content(self) -> AsyncGenerator[bytes, None]:
        try:
            await self._source(self)
        except asyncio.CancelledError:
            # Not passed on, since what `_Link` says of cycles holds for an exception's frames too:
            # these hold the source. The task ends at its next wait; anyio cancels again there.
            return
        except Exception as error:
            if not (self._is_started or self._unsent):
                raise
            yield self._on_error(error)

    def next_ping(self) -> ServerSentEvent:
        is_silent, self._is_silent = self._is_silent, True
        return _Ping(self._ping_sent if is_silent else b"")

    async def on_message(self, message: Message) -> None:
        """What sse-starlette sends: the head, which waits, pings, the last event, and the end."""
        if message["type"] != "http.response.body":
            return
        if body := message["body"]:
            is_silent = self._is_silent
            if not self.write(body):
                await self.drained()
            self._is_silent = is_silent
        if not message["more_body"]:
            await self._send_unsent(more_body=False)


class _Link:
    """From sse-starlette's response to a stream and its connection, until `close`.

    Its task group (anyio's `task_done`) leaves reference cycles to the garbage collector, which
    comes seldom. They must not hold the connection.
    """

    def __init__(self, stream: ResumedEventStream, receive: Receive) -> None:
        self._ends: tuple[ResumedEventStream, Receive] | None = (stream, receive)

    def next_ping(self) -> ServerSentEvent:
        assert self._ends is not None
        return self._ends[0].next_ping()

    async def send(self, message: Message) -> None:
        assert self._ends is not None
        await self._ends[0].on_message(message)

    async def receive(self) -> Message:
        assert self._ends is not None
        return await self._ends[1]()

    def close(self) -> None:
        self._ends = None
