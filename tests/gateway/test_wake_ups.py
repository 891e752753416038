"""Callbacks that run together, and what they write to real sockets."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from penstock.gateway.http.raw_writer import pump
from penstock.gateway.wake_ups import ENDS, WRITES, WakeUps


@contextlib.asynccontextmanager
async def connection() -> AsyncIterator[tuple[asyncio.Transport, socket.socket]]:
    """A transport, and its peer's socket."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
    with theirs:
        yield transport, theirs
    transport.abort()


def read(peer: socket.socket) -> bytes:
    try:
        return peer.recv(1 << 16)
    except BlockingIOError:
        return b""


async def turns(number: int = 2) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_nothing_is_written_before_the_last_callback() -> None:
    wake_ups = WakeUps()
    seen = []
    async with connection() as (first, peer), connection() as (second, other):

        def write(transport: asyncio.Transport, data: bytes) -> None:
            WRITES.write(transport, data)
            seen.append((read(peer), read(other)))

        wake_ups.add(lambda: write(first, b"1"))
        wake_ups.add(lambda: write(second, b"a"))
        wake_ups.add(lambda: write(first, b"2"))
        await turns()
        assert seen == [(b"", b"")] * 3
        assert (read(peer), read(other)) == (b"12", b"a")
        WRITES.write(first, b"3")  # outside of a callback at once
        assert read(peer) == b"3"


async def test_what_one_connection_gets_in_an_iteration_is_one_write() -> None:
    """However many streams it has, in the order in which they wrote."""

    class Counting(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.written: list[bytes] = []

        def write(self, data: bytes | bytearray | memoryview) -> None:
            self.written.append(bytes(data))

    one, other = Counting(), Counting()
    with WRITES:
        for transport, data in ((one, b"1"), (other, b"a"), (one, b"2"), (one, b"3")):
            WRITES.write(transport, data)
        assert not one.written
    with WRITES:
        WRITES.write(one, b"4")
    assert (one.written, other.written) == ([b"123", b"4"], [b"a"])


async def test_what_is_done_for_all_comes_after_the_last_callback() -> None:
    """What it writes is still written with theirs. Outside of a callback it is the next turn's."""
    wake_ups = WakeUps()
    done: list[str] = []
    async with connection() as (transport, peer):

        def store() -> None:
            done.append("stored")
            WRITES.write(transport, b"seen")

        def append(what: str) -> None:
            done.append(what)
            if what == "1":
                ENDS.add(store)

        for what in ("1", "2", "3"):
            wake_ups.add(lambda what=what: append(what))  # type: ignore[misc]
        await turns()
        assert done == ["1", "2", "3", "stored"]
        assert read(peer) == b"seen"
        ENDS.add(store)
        assert done[-2:] == ["3", "stored"]
        await turns()
        assert done[-2:] == ["stored", "stored"]


async def test_a_callback_that_fails_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wake_ups = WakeUps()
    async with connection() as (transport, peer):
        wake_ups.add(lambda: WRITES.write(transport, b"1"))
        wake_ups.add(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        wake_ups.add(lambda: WRITES.write(transport, b"2"))
        await turns()
        assert read(peer) == b"12"
    assert "ZeroDivisionError" in caplog.text


async def test_a_connection_that_cannot_be_written_to_ends_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wake_ups = WakeUps()
    async with connection() as (broken, _), connection() as (transport, peer):
        wake_ups.add(lambda: WRITES.write(broken, "not bytes"))  # type: ignore[arg-type]
        wake_ups.add(lambda: WRITES.write(transport, b"1"))
        await turns()
        assert read(peer) == b"1"
        assert broken.is_closing()
    assert "a write failed" in caplog.text


async def test_a_reader_that_never_reads_is_held_up_within_one_batch() -> None:
    """Held writes do not fill the transport's buffer, so they are bounded themselves."""
    piece = bytes(1 << 14)

    class Endless:
        is_over = False
        num_taken = 0

        def take(self) -> list[bytes]:
            self.num_taken += 1
            return [piece]

        def when_ready(self, _: object) -> bool:
            return False

    class Out:
        def __init__(self, transport: asyncio.Transport) -> None:
            self._transport = transport

        def write(self, payload: bytes) -> bool:
            WRITES.write(self._transport, payload)
            return self._transport.get_write_buffer_size() < 1 << 16

        async def drained(self) -> None:
            await asyncio.Event().wait()

    async with connection() as (transport, _):
        endless = Endless()
        pumping = pump(endless, lambda pieces: pieces, Out(transport))
        with WRITES:
            pumping.send(None)  # to its first wait
        pumping.close()
        assert 4 <= endless.num_taken <= 64
