"""Every toxic of the proxy, seen from both ends of real connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable

import pytest

from ..support.toxic_proxy import ToxicProxy


class Server:
    """Takes connections and leaves them to the test."""

    def __init__(self) -> None:
        self._accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.Queue()
        )
        self._writers: list[asyncio.StreamWriter] = []
        self.port = 0

    async def accepted(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(60):
            return await self._accepted.get()

    async def run(self) -> asyncio.Server:
        server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        self._accepted.put_nowait((reader, writer))

    def close(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


class Pair:
    """The two ends of one connection through the proxy."""

    def __init__(self, proxy: ToxicProxy, server: Server) -> None:
        self._proxy = proxy
        self._server = server

    async def __aenter__(self) -> Pair:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._proxy.port)
        self.far_reader, self.far_writer = await self._server.accepted()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    async with await server.run():
        yield server
        server.close()


@pytest.fixture
async def proxy(server: Server) -> AsyncIterator[ToxicProxy]:
    async with ToxicProxy("127.0.0.1", server.port) as proxy:
        yield proxy


@pytest.fixture
async def pair(proxy: ToxicProxy, server: Server) -> AsyncIterator[Pair]:
    async with Pair(proxy, server) as pair:
        yield pair


async def ends(reader: asyncio.StreamReader) -> bytes:
    """What still comes, up to a FIN."""
    async with asyncio.timeout(60):
        return await reader.read()


async def silent(reader: asyncio.StreamReader, seconds: float = 0.2) -> None:
    """Assert that neither bytes nor an end come. In ten parts: even in a process that stood still
    for all that time, the proxy has then had its turns."""
    for _ in range(10):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds / 10):
                await reader.read(1)


async def settled(count: Callable[[], int]) -> int:
    """What something counts, once it has not changed for half a second."""
    last, num_same = count(), 0
    while num_same < 25:
        await asyncio.sleep(0.02)
        now = count()
        last, num_same = now, (num_same + 1) * (now == last)
    return last


async def test_without_toxics_it_is_a_wire(proxy: ToxicProxy, pair: Pair) -> None:
    up, down = b"u" * 3_000_000, b"d" * 2_000_000
    pair.writer.write(up)
    pair.far_writer.write(down)
    pair.writer.write_eof()
    pair.far_writer.write_eof()
    assert await asyncio.gather(ends(pair.far_reader), ends(pair.reader)) == [up, down]
    assert (proxy.upstream.num_bytes, proxy.downstream.num_bytes) == (len(up), len(down))
    async with asyncio.timeout(60):
        while proxy.num_connections:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_half_closed_connection_goes_on_the_other_way(pair: Pair) -> None:
    pair.writer.write(b"question")
    pair.writer.write_eof()
    assert await ends(pair.far_reader) == b"question"
    pair.far_writer.write(b"answer")
    assert await pair.reader.readexactly(6) == b"answer"
    pair.far_writer.close()
    assert await ends(pair.reader) == b""


async def test_latency_delays_one_direction_and_keeps_the_rate(
    proxy: ToxicProxy, pair: Pair
) -> None:
    proxy.downstream.latency_s = 1000
    pair.writer.write(b"x")
    async with asyncio.timeout(60):
        await pair.far_reader.readexactly(1)
    proxy.downstream.latency_s = 0.4
    for number in range(100):  # many small pieces are under way at once
        sent_s = time.monotonic()
        pair.far_writer.write(b"%02d" % number)
        await asyncio.sleep(0.002)
    assert await pair.reader.readexactly(200) == b"".join(b"%02d" % number for number in range(100))
    assert time.monotonic() - sent_s >= 0.4
    proxy.downstream.latency_s = 30
    pair.far_writer.write(b"y")
    await silent(pair.reader)
    proxy.downstream.latency_s = 0  # counts for what waits already
    assert await pair.reader.readexactly(1) == b"y"


async def test_jitter_varies_and_reorders_nothing(proxy: ToxicProxy, pair: Pair) -> None:
    proxy.downstream.latency_s, proxy.downstream.jitter_s = 0.02, 0.1
    delays = []
    for number in range(12):
        sent_s = time.monotonic()
        pair.far_writer.write(b"%c" % number)
        assert await pair.reader.readexactly(1) == b"%c" % number
        delays.append(time.monotonic() - sent_s)
    assert min(delays) >= 0.02
    assert max(delays) - min(delays) > 0.03
    for number in range(50):
        pair.far_writer.write(b"%c" % number)
        await asyncio.sleep(0.001)
    assert await pair.reader.readexactly(50) == bytes(range(50))


async def test_a_rate_is_kept_and_can_be_lifted(proxy: ToxicProxy, pair: Pair) -> None:
    proxy.upstream.rate_bytes_per_s = 50_000
    pair.writer.write(b"x" * 25_000)
    began_s = time.monotonic()
    await pair.far_reader.readexactly(25_000)
    assert time.monotonic() - began_s > 0.4
    proxy.upstream.rate_bytes_per_s = 10
    pair.writer.write(b"x" * 1_000_000)
    await asyncio.sleep(0.1)
    proxy.upstream.rate_bytes_per_s = 0
    async with asyncio.timeout(60):
        await pair.far_reader.readexactly(1_000_000)


async def test_slices_come_one_by_one(proxy: ToxicProxy, pair: Pair) -> None:
    proxy.downstream.slice_bytes, proxy.downstream.slice_delay_s = 3, 0.02
    pair.far_writer.write(b"abcdefghij")
    pieces = []
    began_s = time.monotonic()
    while sum(map(len, pieces)) < 10:
        pieces.append(await pair.reader.read(100))
    assert b"".join(pieces) == b"abcdefghij"
    assert time.monotonic() - began_s >= 0.05
    assert max(map(len, pieces[:2])) <= 6  # a slow reader may find two at once
    assert len(pieces) >= 3


async def test_a_reset_after_so_many_bytes(proxy: ToxicProxy, pair: Pair) -> None:
    proxy.downstream.reset_after_bytes = 1000
    pair.far_writer.write(b"x" * 400)
    assert await pair.reader.readexactly(400) == b"x" * 400
    pair.far_writer.write(b"x" * 5000)
    assert await pair.reader.readexactly(600) == b"x" * 600
    for reader in (pair.reader, pair.far_reader):
        with pytest.raises(ConnectionResetError):
            await ends(reader)


async def test_reset_all_resets_both_ends(proxy: ToxicProxy, pair: Pair) -> None:
    assert proxy.num_connections == 1
    proxy.reset_all()
    for reader in (pair.reader, pair.far_reader):
        with pytest.raises(ConnectionResetError):
            await ends(reader)
    assert proxy.num_connections == 0


@pytest.mark.parametrize("is_client", [True, False])
async def test_a_reset_of_one_end_reaches_the_other(pair: Pair, is_client: bool) -> None:
    broken, other = pair.writer, pair.far_reader
    if not is_client:
        broken, other = pair.far_writer, pair.reader
    linger = struct.pack("ii", 1, 0)
    broken.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    broken.transport.abort()
    with pytest.raises(ConnectionResetError):
        await ends(other)


async def test_half_close_sends_an_end_one_way(proxy: ToxicProxy, pair: Pair) -> None:
    proxy.downstream.half_close()
    assert await ends(pair.reader) == b""
    pair.far_writer.write(b"lost")
    pair.writer.write(b"still heard")
    assert await pair.far_reader.readexactly(11) == b"still heard"
    await silent(pair.far_reader)


@pytest.mark.parametrize("how", ["fin", "reset"])
async def test_a_pulled_cable_tells_nobody(proxy: ToxicProxy, pair: Pair, how: str) -> None:
    proxy.upstream.drops_end = True
    if how == "reset":
        linger = struct.pack("ii", 1, 0)
        client = pair.writer.get_extra_info("socket")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    pair.writer.close()
    await silent(pair.far_reader)
    for _ in range(20):  # what it sends now finds nobody, and is not answered by a reset
        pair.far_writer.write(b"x" * 100)
        await asyncio.sleep(0.005)
    await silent(pair.far_reader)
    assert proxy.num_connections == 1


async def test_a_black_hole_swallows_bytes_and_end(proxy: ToxicProxy, pair: Pair) -> None:
    proxy.upstream.is_black_hole = True
    pair.writer.write(b"x" * 3_000_000)
    await pair.writer.drain()  # it is taken
    pair.writer.write_eof()
    await silent(pair.far_reader)
    pair.far_writer.write(b"other way")
    assert await pair.reader.readexactly(9) == b"other way"
    assert proxy.upstream.num_bytes == 0


async def test_a_black_hole_can_be_closed(proxy: ToxicProxy, pair: Pair) -> None:
    proxy.upstream.is_black_hole = True
    pair.writer.write(b"lost")
    await silent(pair.far_reader, 0.1)
    proxy.upstream.is_black_hole = False
    pair.writer.write(b"found")
    assert await pair.far_reader.readexactly(5) == b"found"


async def test_refused_connections_are_refused(
    proxy: ToxicProxy, server: Server, pair: Pair
) -> None:
    port = proxy.port
    await proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    pair.writer.write(b"an old one goes on")
    await pair.far_reader.readexactly(18)
    proxy.accept()
    assert proxy.port == port
    async with Pair(proxy, server) as another:
        another.writer.write(b"hello")
        assert await another.far_reader.readexactly(5) == b"hello"


async def test_no_server_behind_is_a_reset() -> None:
    with contextlib.closing(socket.socket()) as taken:  # and nobody listens there
        taken.bind(("127.0.0.1", 0))
        async with ToxicProxy("127.0.0.1", taken.getsockname()[1]) as proxy:
            reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
            with pytest.raises(ConnectionResetError):
                await ends(reader)
            writer.close()


async def test_who_does_not_read_stops_the_one_who_writes(proxy: ToxicProxy, pair: Pair) -> None:
    pair.reader._transport.pause_reading()  # type: ignore[attr-defined]
    client = pair.writer.get_extra_info("socket")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    written = 0

    async def write_much() -> None:
        nonlocal written
        while written < 64_000_000:
            pair.far_writer.write(b"x" * 65536)
            written += 65536
            await pair.far_writer.drain()

    writing = asyncio.create_task(write_much())
    # The far end's own send buffer may grow to megabytes; what left it is bounded.
    assert await settled(lambda: proxy.downstream.num_bytes) < 2_000_000
    assert not writing.done()
    writing.cancel()
    pair.reader._transport.resume_reading()  # type: ignore[attr-defined]
    pair.far_writer.write_eof()
    assert len(await ends(pair.reader)) == written


async def test_a_slow_rate_stops_the_one_who_writes(proxy: ToxicProxy, pair: Pair) -> None:
    proxy.upstream.rate_bytes_per_s = 20_000
    pair.writer.transport.set_write_buffer_limits(high=0)
    sent = pair.writer.get_extra_info("socket")
    sent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
    pair.writer.write(b"x" * 2_000_000)
    await asyncio.sleep(0.5)
    # 2 MB less what the proxy and three socket buffers hold: the rest has not left the client.
    assert pair.writer.transport.get_write_buffer_size() > 1_000_000
