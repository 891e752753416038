"""A server that stood still finds its timers due: what came in time is read before they end
anything. In a process of its own, stopped and continued while it waits for its sockets."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import psutil
import pytest

from ..conftest import PATIENCE_S
from . import timed_server
from .timed_server import LARGE, TIMEOUT_S

pytestmark = pytest.mark.process_kills

_GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
_POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
_UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
_PING = 0x89  # the first byte of such a frame


@dataclass
class Server:
    process: psutil.Popen
    port: int

    def connect(self, buffer_bytes: int | None = None) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(PATIENCE_S)
        if buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        connection.connect(("127.0.0.1", self.port))
        return connection

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """For longer than anything may take, from a moment at which it waits for its sockets."""
        num_looks = 0
        while num_looks < 5:  # one after another
            time.sleep(0.01)
            num_looks = num_looks + 1 if self._is(psutil.STATUS_SLEEPING) else 0
        self.process.suspend()
        while not self._is(psutil.STATUS_STOPPED):
            time.sleep(0.01)
        yield
        time.sleep(1.25 * TIMEOUT_S)
        self.process.resume()

    def _is(self, status: str) -> bool:
        return bool(self.process.status() == status)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [sys.executable, "-m", timed_server.__name__, str(listener.fileno())]
        process = psutil.Popen(command, pass_fds=[listener.fileno()])
        found = Server(process, listener.getsockname()[1])
    try:
        with found.connect() as connection:
            assert _answer(connection, _GET) == b""
        yield found
    finally:
        process.kill()
        process.wait()


def _read_answer(connection: socket.socket) -> bytes:
    """The body of a 200."""
    data = b""
    while (head := re.match(rb"HTTP/1.1 200 .*?\r\n\r\n", data, re.DOTALL)) is None:
        piece = connection.recv(1 << 16)
        assert piece, data
        data += piece
    length = re.search(rb"content-length: (\d+)", head[0])
    assert length is not None
    body = data[head.end() :]
    while len(body) < int(length[1]):
        piece = connection.recv(1 << 16)
        assert piece, f"closed after {len(body)} bytes"
        body += piece
    return body


def _answer(connection: socket.socket, request: bytes) -> bytes:
    connection.sendall(request)
    return _read_answer(connection)


# What a client does before the server stands still, meanwhile, and after that.
Client = Generator[None]


def _asks(server: Server, before: bytes, meanwhile: bytes, body: bytes) -> Client:
    with server.connect() as connection:
        connection.sendall(before)
        yield
        connection.sendall(meanwhile)
        yield
        assert _read_answer(connection) == body


def _asks_again(server: Server) -> Client:
    with server.connect() as connection:
        assert _answer(connection, _POST + b"abcd") == b"abcd"
        yield
        connection.sendall(_POST + b"efgh")
        yield
        assert _read_answer(connection) == b"efgh"


def _reads(server: Server) -> Client:
    with server.connect(buffer_bytes=1 << 14) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        num_bytes = len(connection.recv(1 << 14))
        yield
        connection.settimeout(0.1)
        with contextlib.suppress(TimeoutError):  # that was what the two sockets hold
            while True:
                num_bytes += len(connection.recv(1 << 16))
        connection.settimeout(PATIENCE_S)
        assert num_bytes < LARGE
        yield
        assert num_bytes + _num_bytes_of_rest(connection, LARGE - num_bytes) >= LARGE


def _answers_a_ping(server: Server) -> Client:
    with server.connect() as connection:
        connection.sendall(_UPGRADE)
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(1 << 16)
        first, size = connection.recv(1), connection.recv(1)[0]
        assert first[0] == _PING
        payload = connection.recv(size)
        yield
        connection.sendall(bytes([0x8A, 0x80 | size, 0, 0, 0, 0]) + payload)  # masked with zeros
        yield
        assert connection.recv(1)[0] == _PING, "and not the end"


def _says_nothing(server: Server) -> Client:
    with server.connect() as connection:
        yield
        yield
        assert connection.recv(1) == b"", "it is closed all the same"


def test_what_comes_meanwhile_counts(server: Server) -> None:
    clients = {  # the first one waits for its ping, the others only for an answer
        "a pong": _answers_a_ping(server),
        "a request of a new connection": _asks(server, b"", _GET, b""),
        "the rest of a header": _asks(server, _GET[:9], _GET[9:], b""),
        "a body": _asks(server, _POST, b"abcd", b"abcd"),
        "the next request": _asks_again(server),
        "reading": _reads(server),
        "nothing": _says_nothing(server),
    }
    for client in clients.values():
        next(client)
    with server.standing_still():
        for client in clients.values():
            next(client)
    failed: dict[str, Exception] = {}
    for name, client in clients.items():
        try:
            next(client, None)
        except (AssertionError, OSError) as error:
            failed[name] = error
    assert not failed


def test_who_reads_slowly_does_not_stall(server: Server) -> None:
    """All takes longer than a stall may, each piece less."""
    with server.connect(buffer_bytes=1 << 14) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        num_bytes = 0
        for _ in range(8):
            time.sleep(TIMEOUT_S / 5)
            for _ in range(4):
                num_bytes += len(connection.recv(1 << 16))
        assert num_bytes < LARGE
        assert num_bytes + _num_bytes_of_rest(connection, LARGE - num_bytes) >= LARGE


def _num_bytes_of_rest(connection: socket.socket, least: int) -> int:
    """Read until there were so many, or the end."""
    num_bytes = 0
    while num_bytes < least and (piece := connection.recv(1 << 16)):
        num_bytes += len(piece)
    return num_bytes
