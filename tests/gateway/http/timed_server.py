"""A server whose every time limit is `TIMEOUT_S`, in a process that can be stopped and continued.

Run by `test_timers` as `python -m tests.gateway.http.timed_server LISTENING_FD`.
"""

from __future__ import annotations

import socket
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from penstock.gateway.http.http_protocol import HttpLimits, limited_protocol
from penstock.gateway.http.server import HttpServer
from penstock.gateway.http.websocket_protocol import PatientWebSocketProtocol

TIMEOUT_S = 0.8
LARGE = 4 << 20  # bytes of an answer, more than a socket holds here


async def _echo(request: Request) -> Response:
    return PlainTextResponse(await request.body())


async def _large(_: Request) -> Response:
    return PlainTextResponse(b"x" * LARGE)


async def _socket(web: WebSocket) -> None:
    await web.accept()
    await web.receive()


class _Patient(PatientWebSocketProtocol):
    max_stall_s = TIMEOUT_S


def _serve(listener: socket.socket) -> None:
    limits = HttpLimits(
        max_connections=100,
        header_timeout_s=TIMEOUT_S,
        body_timeout_s=TIMEOUT_S,
        keep_alive_s=TIMEOUT_S,
        max_stall_s=TIMEOUT_S,
    )
    routes = [Route("/", _echo, methods=["GET", "POST"]), Route("/large", _large)]
    config = uvicorn.Config(
        Starlette(routes=[*routes, WebSocketRoute("/ws", _socket)]),
        http=limited_protocol(limits),
        ws=_Patient,
        loop="uvloop",
        ws_ping_interval=TIMEOUT_S,
        ws_ping_timeout=TIMEOUT_S,
        log_level="warning",
    )
    HttpServer(config).run(sockets=[listener])


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
