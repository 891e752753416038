"""The limit of connections, from the moment they are accepted, also where few files may be open or
no descriptor is free."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.gateway.http import server as http_server
from penstock.gateway.http.http_protocol import (
    MAX_REFUSED_CONNECTIONS,
    HttpLimits,
    RefuseConnections,
    limited_protocol,
)
from penstock.gateway.http.server import HttpServer

from ...certificate import make_certificate
from ..conftest import PATIENCE_S, serving, until
from ..launch.test_process import launched

_PASSWORD = "of the key"
_HELLO = b"\x16\x03\x01\x02\x00\x01"  # of a TLS handshake, the first bytes
_SHORT_S = 0.2


@dataclass
class Tls:
    """A server's certificate."""

    certificate: Path
    key: Path

    @property
    def settings(self) -> dict[str, Any]:
        """The server's."""
        return {
            "ssl_certfile": str(self.certificate),
            "ssl_keyfile": str(self.key),
            "ssl_keyfile_password": _PASSWORD,
        }

    def client(self) -> httpx.AsyncClient:
        """Trusts this certificate alone."""
        trust = ssl.create_default_context(cafile=self.certificate)
        return httpx.AsyncClient(verify=trust, timeout=PATIENCE_S)

    async def status(self, port: int) -> int:
        """Of a request on a connection of its own."""
        async with self.client() as http:
            return (await http.get(f"https://127.0.0.1:{port}/live")).status_code


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return Tls(*make_certificate(tmp_path, password=_PASSWORD))


@contextlib.contextmanager
def silent(port: int, num: int, greeting: bytes = _HELLO) -> Iterator[list[socket.socket]]:
    """Connections that begin a handshake, and say no more."""
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(num):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with contextlib.suppress(ConnectionError):
                connection.sendall(greeting)
            sockets.append(connection)
        yield sockets


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


async def answer(_: Request) -> Response:
    return Response()


_APP = Starlette(routes=[Route("/live", answer)])


@contextlib.asynccontextmanager
async def in_process(
    app: Any = _APP,
    *,
    max_connections: int = 100,
    header_timeout_s: float = PATIENCE_S,
    **settings: Any,
) -> AsyncIterator[tuple[HttpServer, int]]:
    limits = HttpLimits(
        max_connections=max_connections,
        header_timeout_s=header_timeout_s,
        body_timeout_s=PATIENCE_S,
    )
    config = uvicorn.Config(
        RefuseConnections(app),
        http=limited_protocol(limits),
        log_config=None,
        timeout_graceful_shutdown=1,
        **settings,
    )
    async with serving(config) as served:
        yield served


def on_uvloop(work: Coroutine[None, None, None]) -> None:
    """In the event loop that servers have, whose listener would not count handshakes."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def test_a_handshake_counts_as_a_connection(tls: Tls, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with in_process(max_connections=20, **tls.settings) as (server, port):
            with silent(port, 20):
                assert await tls.status(port) == 503
                with silent(port, MAX_REFUSED_CONNECTIONS + 30) as others:
                    await until(lambda: sum(map(is_closed, others)) >= 30)
                    assert sum(map(is_closed, others)) < len(others)
            await until(lambda: not server.server_state.connections)
            assert await tls.status(port) == 200

    on_uvloop(run())
    assert "connections beyond --max-connections (20)" in caplog.text
    assert "connections closed at once" in caplog.text


def test_a_handshake_has_the_time_of_a_header(tls: Tls, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def run() -> None:
        limits: dict[str, Any] = {"max_connections": 20, "header_timeout_s": _SHORT_S}
        async with in_process(**limits, **tls.settings) as (server, port):
            with silent(port, 20) as sockets:
                await until(lambda: all(map(is_closed, sockets)))
                await until(lambda: not server.server_state.connections)

    on_uvloop(run())
    assert "20 TLS handshakes that failed or took too long" in caplog.text


@pytest.mark.exhaustive
async def test_some_files_are_spared_and_waves_of_handshakes_leave_no_memory_behind(
    model_path: Path, tls: Tls, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    settings = {"log": log, "max_files": 300, "header_timeout_s": 2.0, **tls.settings}
    with launched(str(model_path), f"{tmp_path}/engine.sock", **settings) as (popen, port, _):
        process = psutil.Process(popen.pid)

        async def is_left_alone() -> None:
            await until(lambda: not process.net_connections("tcp")[1:])

        assert await tls.status(port) == 200
        await is_left_alone()
        assert "only 300 files may be open" in log.read_text()
        with silent(port, 400) as sockets:
            await until(lambda: sum(map(is_closed, sockets)) >= 200)
            assert process.num_fds() < 250
            await until(lambda: all(map(is_closed, sockets)))  # when their time is over
        await is_left_alone()
        before = process.memory_info().rss
        for _ in range(4):
            with silent(port, 700) as sockets:
                await until(lambda: sum(map(is_closed, sockets)) >= 500)
            await is_left_alone()
        assert process.memory_info().rss - before < 40 << 20
        assert await tls.status(port) == 200
        await until(lambda: "connections beyond --max-connections (108)" in log.read_text())
        assert "connections closed at once" in log.read_text()


async def test_a_connection_that_has_just_come_does_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with in_process() as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            server._accept(server._listeners[0])
            await server.shutdown()
            assert is_closed(client)
    assert "timeout graceful shutdown exceeded" not in caplog.text


async def test_a_replaced_certificate_is_that_of_the_next_connections(
    tls: Tls, tmp_path: Path
) -> None:
    async with in_process(**tls.settings) as (_, port):
        url = f"https://127.0.0.1:{port}/live"
        async with tls.client() as before:
            await before.get(url)
            make_certificate(tmp_path, password=_PASSWORD)  # in place
            assert await tls.status(port) == 200  # trusts the new one alone
            assert (await before.get(url)).status_code == 200  # on its open connection
            tls.key.write_text("half written")
            assert await tls.status(port) == 200


async def test_without_a_free_descriptor_connections_wait_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with in_process() as (_, port):
        with socket.socket() as client, lack_of_files():
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(0.05)  # the server, in the same loop, has tried to accept it
            assert is_closed(client) is False
            let_files_open()
            async with asyncio.timeout(PATIENCE_S):
                assert (await loop.sock_recv(client, 100)).startswith(b"HTTP/1.1 200 ")
    assert "failed accepts: Too many open files" in caplog.text


_LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)


@contextlib.contextmanager
def lack_of_files() -> Iterator[None]:
    """No descriptor is free."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, _LIMITS[1]))
    try:
        yield
    finally:
        let_files_open()


def let_files_open() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, _LIMITS)


async def test_a_closed_connection_ends_though_its_peer_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With less unsent than pauses the writer, so that no stall is noticed."""
    monkeypatch.setattr(http_server, "_SWEEP_TICKS", 2)
    sent = asyncio.Event()

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        (connection,) = server.server_state.connections
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not connection.transport.get_write_buffer_size():
            body = bytes(8 << 10)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        sent.set()

    async with in_process(app) as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                await sent.wait()
            await until(lambda: not server.server_state.connections)
