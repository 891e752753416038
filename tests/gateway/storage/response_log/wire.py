"""A gateway's way to Redis. It passes commands and replies on, and at a command that a test names
it holds them or cuts the connection: so the gateway, or Redis, stands still at that very point.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from ....support.stream_server import stream_server

Command = tuple[bytes, ...]


class Hold:
    """Where one connection stands still, once.

    Attributes:
        is_reached: the command is here; if its replies are held, Redis has done it.
    """

    def __init__(self, words: tuple[bytes, ...], *, is_after: bool) -> None:
        self.words = words
        self.is_after = is_after
        self.is_reached = asyncio.Event()
        self._is_taken = False
        self._is_over = asyncio.Event()

    def takes(self, command: Command) -> bool:
        """Whether this is the command: the first that has the words."""
        is_it = not self._is_taken and _has(command, self.words)
        self._is_taken |= is_it
        return is_it

    async def here(self) -> None:
        self.is_reached.set()
        await self._is_over.wait()

    def end(self) -> None:
        self._is_over.set()


class Wire:
    """Listens on a free port while it is open as a context.

    Attributes:
        num_lost: connections that were cut before a reply.
        num_refused: connections that nobody got.
        sent: connections' numbers and commands, in order.
    """

    def __init__(self, redis_port: int) -> None:
        self.port = 0
        self.num_lost = 0
        self.num_refused = 0
        self.sent: list[tuple[int, Command]] = []
        self._redis_port = redis_port
        self._holds: list[Hold] = []
        self._lost: list[tuple[bytes, ...]] = []
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = stream_server(self._serve)
        self._num_connections = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def hold(self, *words: str | bytes, is_after: bool = False) -> Hold:
        """Hold the next command that has all of these words, and what follows on its connection.

        Args:
            is_after: pass them on, and hold the replies.
        """
        hold = Hold(_as_bytes(words), is_after=is_after)
        self._holds.append(hold)
        return hold

    def lose_reply(self, *words: str | bytes) -> None:
        """Of the next command that has all of these words; its connection is cut."""
        self._lost.append(_as_bytes(words))

    def stop(self) -> None:
        """Nothing passes any more, in either direction."""
        self._flows.clear()

    def go_on(self) -> None:
        """Everything passes again."""
        self._flows.set()
        for hold in self._holds:
            hold.end()
        self._holds.clear()

    def refuse(self) -> None:
        """Cut all connections, and each new one, as if Redis were not there."""
        self._refuses = True
        for task in self._tasks:
            task.cancel()

    def accept(self) -> None:
        """Connections hold again."""
        self._refuses = False

    async def __aenter__(self) -> Self:
        self.port = await self._server.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._server.__aexit__(None, None, None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError):  # Redis is not there, or an end has gone
            await self._connect(reader, writer)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection until one of its ends closes it, or it is cut."""
        if self._refuses:
            self.num_refused += 1
            return
        number, self._num_connections = self._num_connections, self._num_connections + 1
        redis_reader, redis_writer = await asyncio.open_connection("127.0.0.1", self._redis_port)
        connection = _Connection(number, reader, writer)
        answering = asyncio.create_task(self._answer(connection, redis_reader))
        answering.add_done_callback(lambda _: writer.close())
        try:
            while (found := await _next_command(reader)) is not None:
                await self._pass_on(connection, redis_writer, *found)
        finally:
            answering.cancel()
            redis_writer.close()
            await asyncio.gather(answering, redis_writer.wait_closed(), return_exceptions=True)

    async def _pass_on(
        self, connection: _Connection, to: asyncio.StreamWriter, command: Command, data: bytes
    ) -> None:
        hold = next((hold for hold in self._holds if hold.takes(command)), None)
        lost = next((words for words in self._lost if _has(command, words)), None)
        if hold is not None and hold.is_after:
            connection.holds.append(hold)
        elif hold is not None:
            await hold.here()
        if lost is not None:
            self._lost.remove(lost)
            connection.is_lost = True
        await self._flows.wait()
        to.write(data)
        self.sent.append((connection.number, command))

    async def _answer(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if connection.is_lost:
                    self.num_lost += 1
                    return
                for hold in connection.holds:
                    await hold.here()
                await self._flows.wait()
                connection.writer.write(data)


@dataclass
class _Connection:
    """Attributes:
    holds: where its replies wait.
    is_lost: no reply gets to the client any more.
    """

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    holds: list[Hold] = field(default_factory=list)
    is_lost: bool = False


async def _next_command(reader: asyncio.StreamReader) -> tuple[Command, bytes] | None:
    """A client's next command and its bytes; None after the last one."""
    try:
        head = await reader.readuntil(b"\r\n")
        parts, words = [head], list[bytes]()
        for _ in range(int(head[1:])):
            size = await reader.readuntil(b"\r\n")
            word = await reader.readexactly(int(size[1:]) + 2)
            parts += (size, word)
            words.append(word[:-2])
    except asyncio.IncompleteReadError:
        return None
    return tuple(words), b"".join(parts)


def _has(command: Command, words: tuple[bytes, ...]) -> bool:
    return all(word in command for word in words)


def _as_bytes(words: tuple[str | bytes, ...]) -> tuple[bytes, ...]:
    return tuple(word.encode() if isinstance(word, str) else word for word in words)
