"""A proxy that cuts every connection behind its n-th event: by FIN, by a reset, or with a piece of
the next event passed on, in turn.

It knows an event by its `sequence_number`, in an event stream and in a WebSocket alike. For other
toxics there is `tests/support/toxic_proxy.py`, which does not know what the bytes mean.
"""

from __future__ import annotations

import contextlib
import itertools
import select
import socket
import struct
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

_NUMBERED = b'"sequence_number"'
_HEAD_END = b"\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)
_TORN_BYTES = 9
_LOOK_S = 0.01


class CuttingProxy:
    """Listens while it is open as a context.

    Args:
        upstream_url: may be set anew; it counts for connections from then on.
        cuts: behind how many events each connection is cut, from the first connection on; the last
            counts for all that follow. None: not at all.
    """

    def __init__(self, upstream_url: str, *cuts: int | None) -> None:
        self.upstream_url = upstream_url
        self.cut_behind(*cuts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_cut = 0
        self._open: set[socket.socket] = set()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.refuse()
        self.cut_all()

    def refuse(self) -> None:
        """No more connections from now on."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def cut_behind(self, *cuts: int | None) -> None:
        """From now on."""
        self._cuts = itertools.chain(cuts, itertools.repeat(cuts[-1]))

    def cut_all(self) -> None:
        for connection in list(self._open):
            _end(connection)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            for number in itertools.count():
                client, _ = self._listener.accept()
                port = int(self.upstream_url.rpartition(":")[2])
                server = socket.create_connection(("127.0.0.1", port))
                self._open |= {client, server}
                pump = (client, server)
                threading.Thread(target=self._up, args=pump, daemon=True).start()
                down = (*pump, next(self._cuts), number)
                threading.Thread(target=self._down, args=down, daemon=True).start()

    def _up(self, client: socket.socket, server: socket.socket) -> None:
        # Never long in `recv`: a reset goes out only when nobody is in there any more.
        with contextlib.suppress(OSError, ValueError):  # closed
            while True:
                if not select.select([client], [], [], _LOOK_S)[0]:
                    continue
                if not (data := client.recv(65_536)):
                    break
                server.sendall(data)
        _end(server)

    def _down(
        self, client: socket.socket, server: socket.socket, cut: int | None, number: int
    ) -> None:
        seen = b""
        with contextlib.suppress(OSError):
            while data := server.recv(65_536):
                before, seen = len(seen), seen + data
                end = None if cut is None else next(itertools.islice(ends(seen), cut, None), None)
                if end is None:
                    client.sendall(data)
                    continue
                self.num_cut += 1
                torn = _TORN_BYTES if number % 3 == 2 else 0
                client.sendall(seen[before : end + torn])
                if number % 3 == 1:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                break
        for connection in (client, server):
            _end(connection)
            connection.close()
            self._open.discard(connection)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, len(_RESET)) != _RESET:
            connection.shutdown(socket.SHUT_RDWR)


def ends(seen: bytes) -> Iterator[int]:
    """Where in the bytes of a connection its head ends, and each of its events."""
    start = seen.find(_HEAD_END) + len(_HEAD_END)
    if start < len(_HEAD_END):
        return
    yield start
    blocks = _frames if seen.startswith(b"HTTP/1.1 101") else _blocks
    for begin, end in blocks(seen, start):
        if _NUMBERED in seen[begin:end]:
            yield end


def _blocks(seen: bytes, start: int) -> Iterator[tuple[int, int]]:
    while (end := seen.find(b"\n\n", start)) >= 0:
        yield start, end + 2
        start = end + 2


def _frames(seen: bytes, start: int) -> Iterator[tuple[int, int]]:
    while len(seen) >= start + 10:
        length, header = seen[start + 1], 2
        if length == 126:
            length, header = int.from_bytes(seen[start + 2 : start + 4]), 4
        elif length == 127:
            length, header = int.from_bytes(seen[start + 2 : start + 10]), 10
        if len(seen) < start + header + length:
            return
        yield start, start + header + length
        start += header + length
