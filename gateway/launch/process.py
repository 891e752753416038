"""The gateway as its own process: settings from a pipe, an inherited listening socket, uvicorn.

Run by the supervisor as `python -m penstock.gateway.launch.process`.

On SIGTERM it accepts no connections, `/ready` answers 503, and streams have `shutdown_grace_s` to
end by themselves. Other streams are handed over where the store can (Redis), or end with their
terminal event. Who reads here what another gateway runs now has as long again. A second SIGTERM
ends the process at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.engine.process.launch import LISTEN_FD, Status, run_child
from penstock.engine.process.logs import LogWriter, configure_logging
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.generation.served_model import load_model
from penstock.gateway.http.http_protocol import (
    MAX_REFUSED_CONNECTIONS,
    HttpLimits,
    LimitedHttpProtocol,
    RefuseConnections,
    limited_protocol,
)
from penstock.gateway.http.server import HttpServer, https_context
from penstock.gateway.http.websocket_protocol import PatientWebSocketProtocol
from penstock.gateway.telemetry.access_log import tag_log_lines

_LOG = logging.getLogger(__name__)
_HELLO_S = 1.0  # a running engine answers much sooner
_HAND_OVER_S = 2.0
_PONG_S = 20.0  # a slow reader gets pings only after all earlier data
_UNDER_WAY_S = 0.1  # for requests that a client has sent, and this process not read
_FLUSH_S = 2  # for connections to close once their streams have ended
_SWITCH_S = 0.0005  # for which the event loop waits for a thread that holds Python's lock
_GC_OBJECTS = 5_000  # allocated and not freed between two collections: a pause of 1 ms
_GC_GENERATIONS = 200, 100  # collections of a generation between two of the next
_OPEN_MAX = 10_240  # on a Mac
_SPARE_FILES = 128  # for files other than connections: Redis, the engine, the log, …
_TRIM_EVERY_S = 1.0
_MAX_TRIM_PAUSE_S = 30.0  # between two tries that free nothing
_MIN_TRIM_BYTES = 16 << 20  # less is not worth a trim
_STATM = Path("/proc/self/statm")


def serve(settings: Mapping[str, Any], status: Status) -> None:
    """The process: read the model, connect, report ready, serve until SIGTERM.

    Raises:
        ConfigError: certificate or key cannot be used.
        ModelLoadError: the model's tokenizer or settings cannot be read.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    config = GatewayConfig.from_settings(settings)
    log = configure_logging(config.log_level, config.log_format)
    tag_log_lines()
    config = replace(config, max_connections=_make_room_for(config.max_connections))
    model = load_model(config, checks_template=True)
    app = create_app(config, model, log=log)
    server = _Server(
        _uvicorn_config(config, app),
        app,
        log=log,
        grace_s=config.shutdown_grace_s,
        has_siblings=config.num_workers > 1,
    )
    _calm_collector()
    sys.setswitchinterval(_SWITCH_S)
    listener = socket.socket(fileno=int(os.environ[LISTEN_FD]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(server, listener, status=status, formats=model.formats.described))


def _uvicorn_config(config: GatewayConfig, app: Starlette) -> uvicorn.Config:
    limits = HttpLimits(
        max_connections=config.max_connections,
        header_timeout_s=config.header_timeout_s,
        body_timeout_s=config.body_timeout_s,
        keep_alive_s=config.keep_alive_s,
    )
    result = uvicorn.Config(
        RefuseConnections(_start_with_engine(app)),
        http=limited_protocol(limits),
        ws=PatientWebSocketProtocol,
        ws_max_size=config.max_websocket_message_bytes,
        ws_ping_interval=config.ping_interval_s,
        ws_ping_timeout=max(config.ping_interval_s, _PONG_S),
        ws_per_message_deflate=False,
        lifespan="on",
        access_log=False,
        log_config=None,
        log_level="warning",  # the supervisor reports start and stop
        server_header=False,
        timeout_graceful_shutdown=_FLUSH_S,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
        # With None, OpenSSL would ask on the terminal.
        ssl_keyfile_password=config.ssl_keyfile_password or "none was given",
    )
    if result.is_ssl:
        https_context(result)  # so that a mistake is reported as one
    result.load()
    return result


def _start_with_engine(app: Starlette) -> ASGIApp:
    """The application, whose start waits a moment for a running engine, so that connections that
    waited for a gateway's restart can be served."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_after_hello(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(app.state.engine.wait_ready(), _HELLO_S)
            await send(message)

        await app(scope, receive, send_after_hello if scope["type"] == "lifespan" else send)

    return run


def _calm_collector() -> None:
    """Make garbage collections rare. Every token makes objects that live as long as their response;
    at the default rate, scanning them costs as much as all other work for a token. Cycles are few.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_OBJECTS, *_GC_GENERATIONS)


def _make_room_for(max_connections: int) -> int:
    """Raise the limit of open files as far as allowed; a connection is one file.

    Returns:
        How many connections are possible: fewer than requested if need be, so that files are left
        for Redis and for answering 503.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_spare = _SPARE_FILES + MAX_REFUSED_CONNECTIONS
    num_files = hard
    if hard == resource.RLIM_INFINITY:  # which a Mac says, and does not take
        num_files = max(soft, min(max_connections + num_spare, _OPEN_MAX))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    if num_files >= max_connections + num_spare:
        return max_connections
    room = max(1, num_files - num_spare)
    _LOG.warning(
        "only %d files may be open, %d of them connections: fewer than --max-connections (%d)",
        num_files,
        room,
        max_connections,
    )
    return room


class _Server(HttpServer):
    """Ends streams with a terminal event before uvicorn shuts down, which would just cut them.

    Args:
        grace_s: for streams to end by themselves.
        has_siblings: other gateways listen on the same socket.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        app: Starlette,
        *,
        log: LogWriter,
        grace_s: float,
        has_siblings: bool = False,
    ) -> None:
        super().__init__(config)
        self.app = app
        self._log = log
        self._grace_s = grace_s
        self._has_siblings = has_siblings

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.stop_accepting()  # uvicorn would do so only after the streams
        if self._has_siblings:
            await self._close_idle()
        await self.app.state.engine.drain(self._grace_s, hand_over=self._hand_over)
        await self.app.state.log_store.let_readers_end(self._grace_s)
        # uvicorn closes WebSockets at once: let the last events out first. That takes turns of this
        # loop, and a single sleep might have only one if the process was stopped meanwhile.
        for _ in range(10):
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)
        self._log.drain()  # the process dies of the signal that uvicorn then raises again

    async def _close_idle(self) -> None:
        """Close idle connections, and the others after their answer: their clients connect again,
        to a sibling. Requests that are under way are still served."""
        for connection in self._http_connections():
            connection.close_after_answer()
        await asyncio.sleep(_UNDER_WAY_S)
        for connection in self._http_connections():
            connection.close_if_idle()

    def _http_connections(self) -> list[LimitedHttpProtocol]:
        found = self.server_state.connections
        return [each for each in found if isinstance(each, LimitedHttpProtocol)]

    async def _hand_over(self) -> None:
        """Leave unfinished responses to another gateway, if the log's store can do that."""
        log_store = getattr(self.app.state, "log_store", None)
        hand_over = getattr(log_store, "hand_over", None)
        if hand_over is None:
            return
        try:
            await asyncio.wait_for(hand_over(), _HAND_OVER_S)
        except Exception as error:
            _LOG.warning("could not hand responses over: %s", type(error).__name__)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        super().handle_exit(sig, frame)


async def _serve(server: _Server, listener: socket.socket, *, status: Status, formats: str) -> None:
    async def announce() -> None:
        await server.app.state.engine.wait_ready()
        status.ready(formats=formats, place=server.app.state.place)

    tasks = [asyncio.create_task(announce()), asyncio.create_task(_trim_memory())]
    try:
        await server.serve(sockets=[listener])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _trim_memory() -> None:
    """Return freed memory to the system. glibc keeps it for later allocations: after six prompts of
    4 MB that was several hundred MB, for good.

    Checks every second, and trims when memory has grown; returns at once where the C library has
    no `malloc_trim`.
    """
    trim = _malloc_trim()
    if trim is None:
        return
    floor, pause_s = _resident_bytes(), _TRIM_EVERY_S
    while True:
        await asyncio.sleep(pause_s)
        before = _resident_bytes()
        floor = min(floor, before)
        if before < floor + _MIN_TRIM_BYTES:
            pause_s = _TRIM_EVERY_S
            continue
        await asyncio.to_thread(trim)
        is_worth_it = before - _resident_bytes() >= _MIN_TRIM_BYTES
        # Memory in use cannot be returned, and may be in use for hours.
        pause_s = _TRIM_EVERY_S if is_worth_it else min(2 * pause_s, _MAX_TRIM_PAUSE_S)


def _resident_bytes() -> int:
    """Resident memory of this process, now (Linux)."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()


def _malloc_trim() -> Callable[[], object] | None:
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return None if malloc_trim is None or not _STATM.exists() else lambda: malloc_trim(0)


if __name__ == "__main__":
    sys.exit(run_child("penstock-gateway", serve))
