"""Writers of event streams compared: the server's CPU per event, its memory per stream.

    python -m penstock.load.gateway.writers

Each runs in its own server process and writes one event of a delta's size per stream and tick:

    live           `EventStream`, which carries live answers
    resumed        `ResumedEventStream`: sse-starlette's response, our source writes past it
    sse-starlette  its response alone, with a generator of events
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from statistics import median

import psutil
import uvicorn
import uvloop
from sse_starlette.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from penstock.gateway.errors import failure_of
from penstock.gateway.http.event_stream import EventStream, ResumedEventStream, Source, named
from penstock.gateway.http.http_protocol import HttpLimits, limited_protocol
from penstock.gateway.http.raw_writer import RawWriter
from penstock.load.report.options import positive
from penstock.load.report.tables import table

WRITERS = ("live", "resumed", "sse-starlette")
_KIND = "response.output_text.delta"
_JSON = (
    b'{"type":"response.output_text.delta","item_id":"msg_0123456789abcdef0123456789abcdef",'
    b'"output_index":0,"content_index":0,"sequence_number":17,"delta":" word","logprobs":[]}'
)
_PING_S = 15.0
_START_S = 60.0
_REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
_LISTEN_FD = "PENSTOCK_LISTEN_FD"


class Ticker:
    """Wakes all streams `ticks_per_s` times a second."""

    def __init__(self, ticks_per_s: float) -> None:
        self._period_s = 1.0 / ticks_per_s
        self._tick: asyncio.Future[None] | None = None

    async def next(self) -> None:
        if self._tick is None:
            loop = asyncio.get_running_loop()
            self._tick = loop.create_future()
            loop.call_later(self._period_s, self._fire)
        await asyncio.shield(self._tick)

    def _fire(self) -> None:
        tick, self._tick = self._tick, None
        assert tick is not None
        tick.set_result(None)


def from_chunks(chunks: AsyncGenerator[bytes, None]) -> Source:
    """A source that is a generator of whole events; it is closed when the client leaves."""

    async def write_to(out: RawWriter) -> None:
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if not out.write(chunk):
                    await out.drained()

    return write_to


def app_of(writer: str, ticks_per_s: float) -> Starlette:
    """A server of endless streams."""
    ticker = Ticker(ticks_per_s)

    async def chunks() -> AsyncGenerator[bytes, None]:
        while True:
            await ticker.next()
            yield named(_KIND, _JSON)

    async def events() -> AsyncGenerator[dict[str, str], None]:
        text = _JSON.decode()
        while True:
            await ticker.next()
            yield {"event": _KIND, "data": text}

    async def stream(_: Request) -> ASGIApp:
        if writer == "sse-starlette":
            return EventSourceResponse(events(), ping=_PING_S)
        kind = ResumedEventStream if writer == "resumed" else EventStream
        return kind(from_chunks(chunks()), ping_s=_PING_S, on_error=_broken)

    return Starlette(routes=[Route("/", stream)])


def _broken(error: Exception) -> bytes:
    return failure_of(error).message.encode()


def serve(writer: str, ticks_per_s: float) -> None:
    """Run the server process on the socket it inherited."""
    limits = HttpLimits(max_connections=10_000, header_timeout_s=_START_S, body_timeout_s=_START_S)
    config = uvicorn.Config(
        app_of(writer, ticks_per_s),
        http=limited_protocol(limits),
        loop="uvloop",
        log_level="critical",
    )
    uvicorn.Server(config).run([socket.socket(fileno=int(os.environ[_LISTEN_FD]))])


class _Counter(asyncio.Protocol):
    """Counts the events of all streams."""

    num_events = 0

    def data_received(self, data: bytes) -> None:
        _Counter.num_events += data.count(b"data: ")


async def _one_event(port: int) -> None:
    async with asyncio.timeout(_START_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_REQUEST)
        await reader.readuntil(b"data: ")
    writer.transport.abort()


async def _read(port: int, num_streams: int, pid: int, window_s: float) -> tuple[int, float, float]:
    """Events in the window, the server's CPU seconds, and the bytes it grew by."""
    loop, process = asyncio.get_running_loop(), psutil.Process(pid)
    await _one_event(port)  # what the first request loads is not a stream's
    num_bytes = process.memory_info().rss
    transports = []
    for _ in range(num_streams):
        transport, _ = await loop.create_connection(_Counter, "127.0.0.1", port)
        transports.append(transport)
        transport.write(_REQUEST)
    num_at_start = _Counter.num_events
    async with asyncio.timeout(_START_S):
        while _Counter.num_events < num_at_start + num_streams:  # noqa: ASYNC110  (a poll will do)
            await asyncio.sleep(0.05)
    before, num_before = process.cpu_times(), _Counter.num_events
    await asyncio.sleep(window_s)
    after, num_after = process.cpu_times(), _Counter.num_events
    num_bytes = process.memory_info().rss - num_bytes
    for transport in transports:  # a loop that closes with them open waits for ever
        transport.abort()
    await asyncio.sleep(0.1)
    cpu_s = after.user + after.system - before.user - before.system
    return num_after - num_before, cpu_s, num_bytes


def measure(writer: str, parsed: argparse.Namespace) -> tuple[float, float, float]:
    """Events a second, and the server's CPU microseconds per event and KiB per stream."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        command = [sys.executable, "-m", "penstock.load.gateway.writers", "--serve", writer]
        server = subprocess.Popen(  # noqa: S603  (ourselves)
            [*command, "--ticks-per-s", str(parsed.ticks_per_s)],
            env={**os.environ, _LISTEN_FD: str(listener.fileno())},
            pass_fds=[listener.fileno()],
        )
        try:
            port = listener.getsockname()[1]
            num_events, cpu_s, num_bytes = uvloop.run(
                _read(port, parsed.streams, server.pid, parsed.window_s)
            )
        finally:
            server.kill()
            server.wait()
    cpu_us = 1e6 * cpu_s / max(num_events, 1)
    return num_events / parsed.window_s, cpu_us, num_bytes / parsed.streams / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add = parser.add_argument
    add("--streams", type=positive, default=500)
    add("--ticks-per-s", type=float, default=20.0)
    add("--window-s", type=float, default=5.0)
    add("--rounds", type=positive, default=3, help="of all writers in turn; medians are shown")
    add("--serve", choices=WRITERS, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.serve:
        with contextlib.suppress(KeyboardInterrupt):
            serve(parsed.serve, parsed.ticks_per_s)
        return 0
    runs: dict[str, list[tuple[float, ...]]] = {writer: [] for writer in WRITERS}
    for _ in range(parsed.rounds):
        for writer in WRITERS:
            runs[writer].append(measure(writer, parsed))
    rows = []
    for writer, results in runs.items():
        per_s, cpu_us, kib = map(median, zip(*results, strict=True))
        rows.append([writer, f"{per_s:,.0f}", f"{cpu_us:.1f}", f"{kib:.1f}"])
    print(table(["writer", "events/s", "CPU µs per event", "KiB per stream"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
