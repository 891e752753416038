"""The gateway as its own process: settings from a pipe, an inherited listening socket, uvicorn.

Run by the supervisor as `python -m penstock.gateway.process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import Any

import uvicorn
import uvloop

from penstock.engine.process import Status, run_child
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.engine_client import EngineClient

LISTEN_FD = "PENSTOCK_LISTEN_FD"
_FLUSH_S = 2  # for connections to close once their streams have ended


def serve(settings: Mapping[str, Any], status: Status) -> None:
    """The process: read the model, connect, report ready, serve until SIGTERM.

    Raises:
        ModelLoadError: the model's tokenizer or settings cannot be read.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    config = GatewayConfig.from_settings(settings)
    logging.basicConfig(level=config.log_level.upper(), format=config.log_format)
    app = create_app(config)
    server = _Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="websockets-sansio",
            ws_max_size=config.max_websocket_message_bytes,
            ws_per_message_deflate=False,
            lifespan="on",
            access_log=False,
            log_config=None,
            log_level="warning",  # its start and stop are the supervisor's to tell
            server_header=False,
            timeout_graceful_shutdown=_FLUSH_S,
        ),
        engine=app.state.engine,
        grace_s=config.shutdown_grace_s,
    )
    listener = socket.socket(fileno=int(os.environ[LISTEN_FD]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(server, listener, status=status))


class _Server(uvicorn.Server):
    """Ends streams with a terminal event before uvicorn, which would just cut them, shuts down."""

    def __init__(self, config: uvicorn.Config, *, engine: EngineClient, grace_s: float) -> None:
        super().__init__(config)
        self.engine = engine
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self.engine.drain(self._grace_s)
        await asyncio.sleep(0.1)  # uvicorn closes WebSockets at once: let the last events out
        await super().shutdown(sockets)


async def _serve(server: _Server, listener: socket.socket, *, status: Status) -> None:
    async def announce() -> None:
        await server.engine.wait_ready()
        status.ready()

    announcer = asyncio.create_task(announce())
    try:
        await server.serve(sockets=[listener])
    finally:
        announcer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await announcer


if __name__ == "__main__":
    sys.exit(run_child("penstock-gateway", serve))
