"""Who may come in: Host, Origin and API key, checked before anything else, for HTTP and WebSocket.

    Host     bound to loopback, it must name loopback (or an allowed origin): a rebound DNS name
             could otherwise reach us
    Origin   absent, the server's own, or allowed: browsers let any page open a WebSocket to us
    key      `/v1/*` only: `Authorization: Bearer`, or for browsers' WebSockets the subprotocol
             `openai-insecure-api-key.<key>`

Not known here: tenants, quotas, and anything that a request asks for.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.gateway.config import GatewayConfig, is_loopback
from penstock.gateway.errors import Failure, refusal

KEY_SUBPROTOCOL = "openai-insecure-api-key."
_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Guard:
    """ASGI middleware; a WebSocket is refused at its handshake with the same answer as HTTP."""

    def __init__(self, app: ASGIApp, config: GatewayConfig) -> None:
        self._app = app
        self._checks_host = config.is_loopback
        self._allowed_origins = frozenset(config.allowed_origins)
        # A name trusted as an origin is no rebound name: a proxy here may pass it on as Host. Nor
        # is the name that the server was told to listen on.
        self._hosts = {"localhost", config.host_name.lower()} | {
            name for origin in self._allowed_origins if (name := urlsplit(origin).hostname)
        }
        self._keys = [key.encode() for key in config.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        failure = self._check(scope)
        if failure is None:
            await self._app(scope, receive, send)
        else:
            await failure.response()(scope, receive, send)

    def _check(self, scope: Scope) -> Failure | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        name = _name_of(host)
        if self._checks_host and name not in self._hosts and not is_loopback(name):
            return refusal(
                403,
                code="host_not_allowed",
                message=f"this server is for this machine alone, and is not called {host!r}",
            )
        is_reading = scope["type"] == "http" and scope["method"] in _READING_METHODS
        origin = headers.get("origin")
        if origin is not None and not is_reading and not self._lets_in(origin.lower(), host):
            return refusal(
                403,
                code="origin_not_allowed",
                message=f"pages of {origin!r} may not use this server; see --allowed-origins",
            )
        if self._keys and scope["path"].startswith("/v1") and not self._has_key(scope, headers):
            return refusal(401, code="invalid_api_key", message="a valid API key is required")
        return None

    def _lets_in(self, origin: str, host: str) -> bool:
        if not self._allowed_origins.isdisjoint((origin, "*")):
            return True
        return bool(host) and origin.partition("://")[2] == host

    def _has_key(self, scope: Scope, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        offered = [key] if scheme.lower() == "bearer" else []
        offered += _subprotocol_keys(scope.get("subprotocols", ()))
        # A list, not a generator: every pair is compared, each in constant time.
        matches = [
            hmac.compare_digest(item.encode("latin-1", "replace"), known)
            for item in offered
            for known in self._keys
        ]
        return any(matches)


def _subprotocol_keys(subprotocols: Sequence[str]) -> list[str]:
    return [
        name.removeprefix(KEY_SUBPROTOCOL)
        for name in subprotocols
        if name.startswith(KEY_SUBPROTOCOL)
    ]


def _name_of(host: str) -> str:
    """The name in a Host header, without the port; nothing where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
