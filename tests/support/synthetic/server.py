"""Running the synthetic server, here or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import uvicorn

from .app import Answers, HttpEndpoints
from .outlets import Receive, Scope, Send, TransportProtocol
from .precise_loop import new_precise_loop
from .settings import SyntheticSettings, as_arguments
from .socket_mode import SocketEndpoint

_ROOT = Path(__file__).parents[3]
_STOP_S = 5.0
_MAX_MESSAGE_BYTES = 1 << 20


def run(settings: SyntheticSettings) -> None:
    """Serve until a signal; says where on a line of its own."""
    answers = Answers(settings)
    http, websocket = HttpEndpoints(answers), SocketEndpoint(answers)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = websocket if scope["type"] == "websocket" else http
        await endpoint(scope, receive, send)

    # asyncio warns of writes to a client that has just left: every other one here.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    listener = socket.create_server(("127.0.0.1", settings.port), backlog=1024)
    config = uvicorn.Config(
        app,
        http=TransportProtocol,
        ws="websockets-sansio",
        ws_max_size=_MAX_MESSAGE_BYTES,
        ws_per_message_deflate=False,
        lifespan="off",
        access_log=False,
        log_level="error",
        timeout_graceful_shutdown=1,
    )
    with asyncio.Runner(loop_factory=new_precise_loop) as runner:
        runner.run(_Server(config).serve(sockets=[listener]))


class _Server(uvicorn.Server):
    """Says where it is once it answers at once: the first request is timed too."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets is not None
        print(f"synthetic server at http://127.0.0.1:{sockets[0].getsockname()[1]}", flush=True)


class SyntheticServer:
    """The server as a process that can be killed and started again at the same address."""

    def __init__(self, settings: SyntheticSettings) -> None:
        self._settings = settings
        self.process = self._start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._settings.port}"

    def kill(self) -> None:
        """As a crash would: no goodbye to anybody."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Serve again, with whatever answers were under way."""
        self.process = self._start()

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _start(self) -> subprocess.Popen[str]:
        flags = [*as_arguments(self._settings), f"--die-with={os.getpid()}"]
        command = [sys.executable, "-m", "tests.support.synthetic", *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the synthetic server did not start: exit code {process.wait()}")
        self._settings = replace(self._settings, port=int(line.rpartition(":")[2]))
        return process

    def _end(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def serve(settings: SyntheticSettings | None = None) -> Iterator[SyntheticServer]:
    """A server that is ready, stopped at the end."""
    server = SyntheticServer(settings or SyntheticSettings())
    try:
        yield server
    finally:
        server.stop()
