"""Shared by `sync_io` and `async_io`: options of httpx and websockets, and their failures as this
package's exceptions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
from websockets.http11 import Response as Handshake

from .errors import ConnectionLostError, PenstockError, RefusedError, UnreachableError, refused
from .server import error_in
from .steps import Request

CONNECT_S = 10.0
ANSWER_S = 600.0  # for an answer that is not a stream
SILENCE_S = 60.0  # on an event stream; the server sends a comment every 15 s
CLOSE_S = 2.0  # for the closing handshake
MAX_MESSAGE_BYTES = 64 << 20


def http_request(client: httpx.Client | httpx.AsyncClient, request: Request) -> httpx.Request:
    silence_s = SILENCE_S if request.is_stream else ANSWER_S
    return client.build_request(
        request.method,
        request.url,
        headers=dict(request.headers),
        content=request.body,
        timeout=httpx.Timeout(silence_s, connect=CONNECT_S),
    )


def socket_options(headers: Mapping[str, str], *, is_loopback: bool) -> dict[str, Any]:
    """For `websockets.connect`: no compression, which costs more than it saves on short events."""
    return {
        "additional_headers": headers,
        "compression": None,
        "max_size": MAX_MESSAGE_BYTES,
        "open_timeout": CONNECT_S,
        "close_timeout": CLOSE_S,
        "proxy": None if is_loopback else True,
    }


def http_failure(error: httpx.TransportError) -> PenstockError:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return unreachable(error)
    return lost(error)


def unreachable(error: Exception) -> UnreachableError:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ConnectionRefusedError) or "connection attempts failed" in str(error):
        return UnreachableError("connection refused; is `penstock serve` running?")
    return UnreachableError(getattr(cause, "strerror", None) or str(error) or type(error).__name__)


def lost(error: Exception) -> ConnectionLostError:
    why = str(error) or type(error).__name__
    return ConnectionLostError(f"the connection to the server broke ({why})")


def refused_handshake(answer: Handshake) -> RefusedError:
    headers = {name.lower(): value for name, value in answer.headers.raw_items()}
    return refused(answer.status_code, error_in(bytes(answer.body or b"")), headers=headers)
