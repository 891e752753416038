"""A server that stood still finds its timers due: what came in time is read before they end
anything. In a process of its own, stopped and continued while it waits for its sockets."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from penstock.gateway.http.http_protocol import HttpLimits, limited_protocol
from penstock.gateway.http.server import HttpServer
from penstock.gateway.http.websocket_protocol import PatientWebSocketProtocol

from ..conftest import PATIENCE_S

_TIMEOUT_S = 1.0  # of all that the server times
_LARGE = 4 << 20  # bytes of an answer, more than a socket holds here
_GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
_POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
_UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
_PING, _CLOSE = 0x89, 0x88  # first bytes of such frames


async def _echo(request: Request) -> Response:
    return PlainTextResponse(await request.body())


async def _large(_: Request) -> Response:
    return PlainTextResponse(b"x" * _LARGE)


async def _socket(web: WebSocket) -> None:
    await web.accept()
    await web.receive()


class _Patient(PatientWebSocketProtocol):
    max_stall_s = _TIMEOUT_S


def _serve(listener: socket.socket) -> None:
    limits = HttpLimits(
        max_connections=100,
        header_timeout_s=_TIMEOUT_S,
        body_timeout_s=_TIMEOUT_S,
        keep_alive_s=_TIMEOUT_S,
        max_stall_s=_TIMEOUT_S,
    )
    routes = [Route("/", _echo, methods=["GET", "POST"]), Route("/large", _large)]
    config = uvicorn.Config(
        Starlette(routes=[*routes, WebSocketRoute("/ws", _socket)]),
        http=limited_protocol(limits),
        ws=_Patient,
        loop="uvloop",
        ws_ping_interval=_TIMEOUT_S,
        ws_ping_timeout=_TIMEOUT_S,
        log_level="warning",
    )
    HttpServer(config).run(sockets=[listener])


@dataclass
class Server:
    process: BaseProcess
    port: int

    def connect(self, buffer_bytes: int | None = None) -> socket.socket:
        connection = socket.socket()
        connection.settimeout(PATIENCE_S)
        if buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        connection.connect(("127.0.0.1", self.port))
        return connection

    def stand_still(self, meanwhile: Callable[[], object]) -> None:
        """For longer than anything may take, from a moment at which nothing is due."""
        assert self.process.pid is not None
        time.sleep(_TIMEOUT_S / 4)  # it has come to wait for its sockets
        os.kill(self.process.pid, signal.SIGSTOP)
        while psutil.Process(self.process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        meanwhile()
        time.sleep(1.5 * _TIMEOUT_S)
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(listener,))
        process.start()
        found = Server(process, listener.getsockname()[1])
    try:
        with found.connect() as connection:
            assert _answer(connection, _GET) == b""
        yield found
    finally:
        process.kill()
        process.join()
        process.close()


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


@pytest.mark.parametrize(
    ("before", "request_", "body"),
    [
        pytest.param(b"", _GET, b"", id="connection"),
        pytest.param(_GET[:9], _GET[9:], b"", id="header"),
        pytest.param(_POST, b"abcd", b"abcd", id="body"),
    ],
)
def test_a_request_that_comes_meanwhile_is_answered(
    server: Server, before: bytes, request_: bytes, body: bytes
) -> None:
    with server.connect() as connection:
        connection.sendall(before)
        server.stand_still(lambda: connection.sendall(request_))
        assert _read_answer(connection) == body


def test_the_next_request_of_a_connection_is_answered(server: Server) -> None:
    with server.connect() as connection:
        assert _answer(connection, _POST + b"abcd") == b"abcd"
        server.stand_still(lambda: connection.sendall(_POST + b"efgh"))
        assert _read_answer(connection) == b"efgh"


def test_who_reads_meanwhile_does_not_stall(server: Server) -> None:
    with server.connect(buffer_bytes=1 << 14) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        head = connection.recv(1 << 14)

        def read() -> None:  # what the two sockets hold
            nonlocal head
            connection.settimeout(0.2)
            try:
                while piece := connection.recv(1 << 16):
                    head += piece
            except TimeoutError:
                connection.settimeout(PATIENCE_S)

        server.stand_still(read)
        num_bytes = len(head)
        assert num_bytes < _LARGE
        while num_bytes < _LARGE and (piece := connection.recv(1 << 16)):
            num_bytes += len(piece)
        assert num_bytes >= _LARGE


def test_who_reads_slowly_does_not_stall(server: Server) -> None:
    """All takes longer than a stall may, each piece less."""
    with server.connect(buffer_bytes=1 << 14) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        num_bytes = 0
        for _ in range(6):
            time.sleep(_TIMEOUT_S / 3)
            for _ in range(8):
                num_bytes += len(connection.recv(1 << 16))
        assert num_bytes < _LARGE
        while num_bytes < _LARGE and (piece := connection.recv(1 << 16)):
            num_bytes += len(piece)
        assert num_bytes >= _LARGE


def test_a_pong_that_comes_meanwhile_counts(server: Server) -> None:
    with server.connect() as connection:
        connection.sendall(_UPGRADE)
        data = b""
        while b"\r\n\r\n" not in data:
            data += connection.recv(1 << 16)
        first, size = connection.recv(1), connection.recv(1)[0]
        assert first[0] == _PING
        payload = connection.recv(size)
        pong = bytes([0x8A, 0x80 | size, 0, 0, 0, 0]) + payload  # masked with zeros
        server.stand_still(lambda: connection.sendall(pong))
        assert connection.recv(1)[0] == _PING, "and not the end"


def test_who_sends_nothing_is_closed_all_the_same(server: Server) -> None:
    with server.connect() as connection:
        server.stand_still(lambda: None)
        assert connection.recv(1) == b""
