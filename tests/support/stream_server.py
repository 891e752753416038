"""A server in this process of which nothing is left when its context ends.

`asyncio.start_server` leaves things behind: a connection that it accepted just before its end, and
those that are still served, are found by the garbage collector, within whatever test runs then.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

Serve: TypeAlias = Callable[
    [asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, object]
]


class Acceptor:
    """Accepts connections until it is closed, and loses none: an `await` of one, as it is
    cancelled, may have it already.

    Args:
        listener: is closed with it.
        admit: gets each connection, non-blocking, and closes it.
    """

    def __init__(self, listener: socket.socket, admit: Callable[[socket.socket], object]) -> None:
        self._listener = listener
        self._admit = admit
        listener.setblocking(False)
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def close(self) -> None:
        """Refuse new connections; those that are there go on."""
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it has left already
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            self._admit(connection)


@contextlib.asynccontextmanager
async def stream_server(serve: Serve, path: Path | None = None) -> AsyncIterator[int]:
    """Serves on a free port of 127.0.0.1, which it yields; or at the path of a Unix socket.

    Args:
        serve: what it writes is sent before its connection is closed. It is cancelled when the
            context ends.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def serve_streams(connection: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # it has left
                await serve(reader, writer)
                writer.close()
                await writer.wait_closed()
        finally:
            writer.transport.abort()

    def admit(connection: socket.socket) -> None:
        task = asyncio.create_task(serve_streams(connection))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda _: connection.close())  # of one that never began, too

    listener = socket.create_server(("127.0.0.1", 0)) if path is None else _listen_at(path)
    acceptor = Acceptor(listener, admit)
    try:
        yield listener.getsockname()[1] if path is None else 0
    finally:
        acceptor.close()
        served = list(tasks)
        for task in served:
            task.cancel()
        await asyncio.gather(*served, return_exceptions=True)
        await asyncio.sleep(0)  # in which aborted transports are closed


def _listen_at(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener
