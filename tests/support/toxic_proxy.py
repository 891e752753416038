"""A TCP proxy on this machine that behaves as badly as networks do, as told, while it runs.

    client ──► proxy.upstream ──► server
    client ◄── proxy.downstream ◄── server

Each direction has toxics of its own: latency, a rate, slices, a reset after so many bytes, a black
hole, an end that is not passed on. A reader that does not read stops the proxy from reading: some
256 KiB of a direction wait in it at most, and 64 KiB in the buffers of each of its sockets.

Not known here: what the bytes mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from .stream_server import Acceptor

_PIECE_BYTES = 32 << 10
_MAX_WAITING_BYTES = 256 << 10
_SOCKET_BUFFER_BYTES = 64 << 10
_LOOK_S = 0.02  # how soon a changed toxic counts for bytes that wait for the old one
_RATE_STEP_S = 0.02  # a rate lets through what comes in so long at once
_LINGER_NOT = struct.pack("ii", 1, 0)


@dataclass(slots=True, kw_only=True)
class Direction:
    """One direction of all connections, and its toxics. They may be set at any time.

    Attributes:
        latency_s: added to every byte.
        jitter_s: up to so much more, drawn for each piece read; none overtakes another.
        rate_bytes_per_s: of one connection; 0: no limit.
        slice_bytes: bytes go out in pieces of so many; 0: as they come.
        slice_delay_s: between two of these.
        reset_after_bytes: a connection is reset, both ways, after exactly so many bytes.
        is_black_hole: bytes and end are taken and go nowhere.
        drops_end: the end of the source, by FIN or reset, is kept from the target, as if a cable
            had been pulled: a half-open connection.
        num_bytes: passed on so far, by all connections.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    rate_bytes_per_s: float = 0.0
    slice_bytes: int = 0
    slice_delay_s: float = 0.0
    reset_after_bytes: int | None = None
    is_black_hole: bool = False
    drops_end: bool = False
    num_bytes: int = 0
    _pumps: set[_Pump] = field(default_factory=set, repr=False)

    def half_close(self) -> None:
        """Send FIN to the targets of all connections now; the other direction goes on. What
        comes from the sources after that goes nowhere."""
        for pump in self._pumps:
            pump.half_close()


class ToxicProxy:
    """Listens on a free port of 127.0.0.1 while it is open as a context.

    Args:
        seed: of the jitter.
    """

    def __init__(self, upstream_host: str, upstream_port: int, *, seed: int = 0) -> None:
        self.upstream = Direction()
        self.downstream = Direction()
        self.port = 0
        self._server = (upstream_host, upstream_port)
        self._rng = random.Random(seed)
        self._acceptor: Acceptor | None = None
        self._links: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self.accept()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.refuse()
        links = list(self._links)
        self.reset_all()
        await asyncio.gather(*links, return_exceptions=True)

    @property
    def num_connections(self) -> int:
        return len(self._links)

    def accept(self) -> None:
        """Take connections, at the port it had before if it had one."""
        if self._acceptor is None:
            listener = _listen(self.port)
            self.port = listener.getsockname()[1]
            self._acceptor = Acceptor(listener, self._admit)

    def refuse(self) -> None:
        """Refuse new connections; those that are there go on."""
        if self._acceptor is not None:
            self._acceptor.close()
            self._acceptor = None

    def reset_all(self) -> None:
        """Reset every connection, both ways, now."""
        for link in self._links:
            link.cancel()

    def _admit(self, client: socket.socket) -> None:
        _prepare(client)
        link = _Link(client, self.upstream, self.downstream)
        task = asyncio.create_task(link.run(self._server, self._rng))
        self._links.add(task)
        task.add_done_callback(self._links.discard)
        task.add_done_callback(link.close)


class _Link:
    """A client's connection, and the one to the server that was made for it."""

    def __init__(self, client: socket.socket, upstream: Direction, downstream: Direction) -> None:
        self._client = client
        self._server = _prepare(socket.socket())
        self._upstream = upstream
        self._downstream = downstream
        self._is_orderly = False

    async def run(self, server_address: tuple[str, int], rng: random.Random) -> None:
        """Until both directions have ended, or something breaks one."""
        up, down = self._upstream, self._downstream
        try:
            await asyncio.get_running_loop().sock_connect(self._server, server_address)
        except OSError:
            return
        with (
            _Pump(self._client, self._server, directions=(up, down), rng=rng) as sending,
            _Pump(self._server, self._client, directions=(down, up), rng=rng) as receiving,
        ):
            works = (sending.read(), sending.write(), receiving.read(), receiving.write())
            self._is_orderly = await _all_end_well(works)

    def close(self, _: asyncio.Task[None]) -> None:
        """Close both connections; by a reset unless both directions had ended."""
        for connection in (self._client, self._server):
            if not self._is_orderly:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
            connection.close()


async def _all_end_well(works: Sequence[Coroutine[Any, Any, None]]) -> bool:
    """Run all until they have ended or one fails; whether none did."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return all(task.exception() is None for task in done)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _ResetError(Exception):
    """A toxic wants the connection reset."""


class _Pump:
    """One direction of one connection: a task that reads, one that writes, a short queue between.

    Args:
        directions: its own, and the opposite one.
    """

    def __init__(
        self,
        source: socket.socket,
        target: socket.socket,
        *,
        directions: tuple[Direction, Direction],
        rng: random.Random,
    ) -> None:
        self._source = source
        self._target = target
        self._toxics, self._opposite = directions
        self._rng = rng
        self._loop = asyncio.get_running_loop()
        # When it was read, its draw of the jitter, the bytes; none are the end.
        self._pieces: asyncio.Queue[tuple[float, float, bytes]] = asyncio.Queue()
        self._num_waiting_bytes = 0
        self._has_room = asyncio.Event()
        self._num_sent_bytes = 0
        self._free_s = 0.0  # when the rate lets more through
        self._sliced_s = 0.0  # when the last slice went out
        self._is_half_closed = False

    def __enter__(self) -> Self:
        self._toxics._pumps.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._toxics._pumps.discard(self)

    async def read(self) -> None:
        """Take what the source sends, as long as there is room for it."""
        data = b"more"
        while data:
            try:
                data = await self._loop.sock_recv(self._source, _PIECE_BYTES)
            except OSError:
                if not self._toxics.drops_end:
                    raise
                data = b""
            self._pieces.put_nowait((self._loop.time(), self._rng.random(), data))
            self._num_waiting_bytes += len(data)
            while self._num_waiting_bytes >= _MAX_WAITING_BYTES:
                self._has_room.clear()
                await self._has_room.wait()

    async def write(self) -> None:
        """Give the target what was read, as the toxics have it."""
        data = b"more"
        while data:
            read_s, draw, data = await self._pieces.get()
            await self._wait(lambda r=read_s, d=draw: r + self._latency_s(d))  # type: ignore[misc]
            await self._pass_on(memoryview(data))
            self._num_waiting_bytes -= len(data)
            self._has_room.set()
        if self._toxics.is_black_hole or self._toxics.drops_end:
            await asyncio.Event().wait()  # the target is told nothing
        self.half_close()

    def half_close(self) -> None:
        self._is_half_closed = True
        with contextlib.suppress(OSError):  # it has gone already
            self._target.shutdown(socket.SHUT_WR)

    async def _pass_on(self, data: memoryview) -> None:
        toxics = self._toxics
        while data and not toxics.is_black_hole and not self._is_half_closed:
            step = self._step_bytes(len(data))
            if step <= 0:
                raise _ResetError
            await self._wait(lambda: self._free_s if toxics.rate_bytes_per_s else 0.0)
            await self._wait(
                lambda: self._sliced_s + toxics.slice_delay_s if toxics.slice_bytes else 0.0
            )
            await self._send(data[:step])
            data = data[step:]
            if self._step_bytes(1) <= 0:
                raise _ResetError

    def _step_bytes(self, num_wanted: int) -> int:
        """How many bytes may go out at once; none where a reset is due."""
        toxics, limits = self._toxics, [num_wanted]
        if toxics.rate_bytes_per_s:
            limits.append(max(1, int(toxics.rate_bytes_per_s * _RATE_STEP_S)))
        if toxics.slice_bytes:
            limits.append(toxics.slice_bytes)
        if toxics.reset_after_bytes is not None:
            limits.append(toxics.reset_after_bytes - self._num_sent_bytes)
        return min(limits)

    async def _send(self, data: memoryview) -> None:
        try:
            await self._loop.sock_sendall(self._target, data)
        except OSError:
            if not self._opposite.drops_end:
                raise
            await asyncio.Event().wait()  # nobody is to know that the target has gone
        now_s = self._sliced_s = self._loop.time()
        if self._toxics.rate_bytes_per_s:
            took_s = len(data) / self._toxics.rate_bytes_per_s
            self._free_s = max(now_s, self._free_s) + took_s
        self._num_sent_bytes += len(data)
        self._toxics.num_bytes += len(data)

    def _latency_s(self, draw: float) -> float:
        return self._toxics.latency_s + draw * self._toxics.jitter_s

    async def _wait(self, until_s: Callable[[], float]) -> None:
        """Wait for a time, which toxics may change meanwhile."""
        while (left_s := until_s() - self._loop.time()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(left_s, _LOOK_S))


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _prepare(listener)  # those it accepts inherit the buffers
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def _prepare(connection: socket.socket) -> socket.socket:
    """Small buffers, so that waiting bytes are seen, and none waits for a full segment."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    return connection
