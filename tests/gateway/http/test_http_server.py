"""The limit of connections, from the moment they are accepted: against the gateway's process, and
without a descriptor that is free."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from penstock.gateway.http import server as http_server
from penstock.gateway.http.http_protocol import (
    MAX_REFUSED_CONNECTIONS,
    HttpLimits,
    limited_protocol,
)
from penstock.gateway.http.server import HttpServer

from ...certificate import make_certificate
from ..conftest import PATIENCE_S, until
from ..launch.test_process import launched

_PASSWORD = "of the key"
_HELLO = b"\x16\x03\x01\x02\x00\x01"  # of a TLS handshake, the first bytes
_SHORT_S = 0.5


class Gateway:
    """A process that speaks TLS, and what was asked of it."""

    def __init__(self, process: psutil.Process, port: int, log: Path, trust: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self._trust = ssl.create_default_context(cafile=trust)

    async def status(self) -> int:
        """Of a request on a connection of its own."""
        async with httpx.AsyncClient(verify=self._trust, timeout=PATIENCE_S) as http:
            url = f"https://127.0.0.1:{self.port}/health"
            return (await http.get(url)).status_code

    async def has_logged(self, text: str) -> None:
        await until(lambda: text in self.log.read_text())


@contextlib.asynccontextmanager
async def gateway(
    model_path: Path, folder: Path, *, max_files: int | None = None, **flags: Any
) -> AsyncIterator[Gateway]:
    certificate, key = make_certificate(folder, password=_PASSWORD)
    log = folder / "log"
    with launched(
        str(model_path),
        f"{folder}/engine.sock",
        log=log,
        max_files=max_files,
        ssl_certfile=str(certificate),
        ssl_keyfile=str(key),
        ssl_keyfile_password=_PASSWORD,
        **flags,
    ) as (process, port, _):
        served = Gateway(psutil.Process(process.pid), port, log, certificate)
        assert await served.status() == 200
        # Its connection has been closed, and counts for a moment more.
        await until(lambda: not served.process.net_connections("tcp")[1:])
        yield served


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


async def test_a_handshake_counts_as_a_connection(model_path: Path, tmp_path: Path) -> None:
    async with gateway(model_path, tmp_path, max_connections=20) as served:
        with silent(served.port, 20):
            assert await served.status() == 503
            await served.has_logged("connections beyond --max-connections (20)")
            with silent(served.port, MAX_REFUSED_CONNECTIONS + 30) as others:
                await until(lambda: sum(map(is_closed, others)) >= 30)
                assert sum(map(is_closed, others)) < len(others)
                await served.has_logged("connections closed at once")
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(httpx.TransportError):  # until the others are gone
                    if await served.status() == 200:
                        break
                await asyncio.sleep(0.05)


async def test_a_handshake_has_the_time_of_a_header(model_path: Path, tmp_path: Path) -> None:
    async with gateway(
        model_path, tmp_path, max_connections=20, header_timeout_s=_SHORT_S
    ) as served:
        with silent(served.port, 20) as sockets:
            await until(lambda: all(map(is_closed, sockets)))
            await served.has_logged("TLS handshakes that failed or took too long")
            assert await served.status() == 200


async def test_some_files_are_spared(model_path: Path, tmp_path: Path) -> None:
    async with gateway(model_path, tmp_path, max_files=300) as served:
        await served.has_logged("only 300 files may be open")
        with silent(served.port, 400) as sockets:
            await until(lambda: sum(map(is_closed, sockets)) >= 200)
            assert served.process.num_fds() < 250
            await served.has_logged("connections closed at once")


async def test_waves_of_handshakes_leave_no_memory_behind(model_path: Path, tmp_path: Path) -> None:
    async with gateway(model_path, tmp_path, max_connections=100) as served:
        before = served.process.memory_info().rss
        for _ in range(4):
            with silent(served.port, 700) as sockets:
                await until(lambda: sum(map(is_closed, sockets)) >= 500)
            await until(lambda: not served.process.net_connections("tcp")[1:])
        assert served.process.memory_info().rss - before < 40 << 20


@contextlib.asynccontextmanager
async def in_process(app: Any, **settings: Any) -> AsyncIterator[tuple[HttpServer, int]]:
    limits = HttpLimits(max_connections=100, header_timeout_s=PATIENCE_S, body_timeout_s=PATIENCE_S)
    config = uvicorn.Config(
        app, http=limited_protocol(limits), log_config=None, timeout_graceful_shutdown=1, **settings
    )
    server = HttpServer(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server._serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield server, listener.getsockname()[1]
        finally:
            server.should_exit = True
            await task


async def test_a_replaced_certificate_is_that_of_the_next_connections(tmp_path: Path) -> None:
    async def answer(_: Request) -> Response:
        return Response()

    certificate, key = make_certificate(tmp_path, password=_PASSWORD)
    settings = {
        "ssl_certfile": certificate, "ssl_keyfile": key, "ssl_keyfile_password": _PASSWORD,
    }  # fmt: skip
    app = Starlette(routes=[Route("/", answer)])
    async with in_process(app, **settings) as (_, port):
        url = f"https://127.0.0.1:{port}/"

        def client() -> httpx.AsyncClient:
            trust = ssl.create_default_context(cafile=certificate)
            return httpx.AsyncClient(verify=trust, timeout=PATIENCE_S)

        async with client() as before:
            await before.get(url)
            make_certificate(tmp_path, password=_PASSWORD)  # in place
            async with client() as after:  # trusts the new one alone
                assert (await after.get(url)).status_code == 200
            assert (await before.get(url)).status_code == 200  # on its open connection
            key.write_text("half written")
            async with client() as after:
                assert (await after.get(url)).status_code == 200


async def test_without_a_free_descriptor_connections_wait_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    async def answer(_: Request) -> Response:
        return Response()

    app = Starlette(routes=[Route("/", answer)])
    async with in_process(app) as (_, port):
        with socket.socket() as client, lack_of_files():
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", port))
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: "failed accepts: Too many open files" in caplog.text)
            assert is_closed(client) is False
            let_files_open()
            async with asyncio.timeout(PATIENCE_S):
                assert (await loop.sock_recv(client, 100)).startswith(b"HTTP/1.1 200 ")


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
