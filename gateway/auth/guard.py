"""Checks Host, Origin and API key of every HTTP request and WebSocket before anything else.

    Host     exactly one (HTTP/1.0: at most one), and valid (RFC 9112 §3.2); on a server bound to
             loopback it must name loopback (or an allowed origin), against DNS rebinding
    Origin   absent, the server's own, or allowed: browsers let any page open a WebSocket
    key      required where an operation declares it (`/v1/*`, …), read everywhere:
             `Authorization: Bearer`, Anthropic's `x-api-key`, or for browsers' WebSockets a
             ticket as `?ticket=`, or the subprotocol `openai-insecure-api-key.<key>`

The accepted caller is put into the scope (`callers`), and every answer gets headers with what is
left of its limits. Keys and tickets do not leave this module: the ticket is removed from the query
string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.auth.callers import NO_LIMITS, STRANGER, Caller, set_caller
from penstock.gateway.auth.keys import KeyRing
from penstock.gateway.auth.tickets import Tickets
from penstock.gateway.config import GatewayConfig, is_loopback
from penstock.gateway.errors import Failure, refusal

KEY_SUBPROTOCOL = "openai-insecure-api-key."
_KEY_HEADER = "x-api-key"
_TICKET = "ticket"
# `uri-host [":" port]` (RFC 3986 §3.2.2)
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|([a-z0-9._~!$&'()*+,;=-]|%[0-9a-f]{2})*)(:[0-9]{0,5})?")
_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Guard:
    """ASGI middleware. A WebSocket is refused at its handshake with the same answer as HTTP.

    Args:
        keyed_paths: how paths begin that need a key.
        limit_headers: gives the headers with what is left of a caller's limits.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: GatewayConfig,
        *,
        keyed_paths: Sequence[str],
        keys: KeyRing,
        tickets: Tickets,
        limit_headers: Callable[[Caller], Mapping[str, str]],
    ) -> None:
        self._app = app
        self._keyed = tuple(keyed_paths)
        self._keys = keys
        self._tickets = tickets
        self._limit_headers = limit_headers
        self._checks_host = config.is_loopback
        self._listens_on = config.host
        self._allowed_origins = frozenset(config.allowed_origins)
        # Names of allowed origins are trusted: a local proxy may pass them on as Host. So is the
        # name that the server was told to listen on.
        self._hosts = {"localhost", config.host_name.lower()} | {
            name for origin in self._allowed_origins if (name := urlsplit(origin).hostname)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        ticket = _pop_ticket(scope) if scope["type"] == "websocket" else None
        failure = self._check(scope)
        if failure is None and not self._keys.is_open:
            caller = await self._caller(scope, ticket)
            if scope["path"].startswith(self._keyed):
                if caller is None:
                    failure = refusal(
                        401, code="invalid_api_key", message="a valid API key is required"
                    )
                else:
                    send = self._adding_limits(caller, send)
            set_caller(scope, caller or STRANGER)
        if failure is None:
            await self._app(scope, receive, send)
        else:
            await failure.response()(scope, receive, send)

    def _check(self, scope: Scope) -> Failure | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        host = hosts[0].lower() if hosts else ""
        if len(hosts) > 1 or not (hosts or scope["http_version"] == "1.0"):
            message = f"the request has {len(hosts)} Host headers instead of one"
            return refusal(400, code="invalid_host", message=message)
        if not _HOST.fullmatch(host):
            message = f"the Host {hosts[0]!r} is not a name or address with an optional port"
            return refusal(400, code="invalid_host", message=message)
        name = _name_of(host)
        if self._checks_host and name not in self._hosts and not is_loopback(name):
            return refusal(
                403,
                code="host_not_allowed",
                message=f"the Host {host!r} is not allowed: this server listens on "
                f"{self._listens_on} only. Start it with --host 0.0.0.0 to take any Host, or with "
                f"--allowed-origins http://{name} to take this one",
            )
        is_reading = scope["type"] == "http" and scope["method"] in _READING_METHODS
        origin = headers.get("origin")
        if origin is not None and not is_reading and not self._allows(origin.lower(), host):
            return refusal(
                403,
                code="origin_not_allowed",
                message=f"the origin {origin!r} is not allowed; see --allowed-origins",
            )
        return None

    def _allows(self, origin: str, host: str) -> bool:
        if not self._allowed_origins.isdisjoint((origin, "*")):
            return True
        return bool(host) and origin.partition("://")[2] == host

    async def _caller(self, scope: Scope, ticket: str | None) -> Caller | None:
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        offered = [key] if scheme.lower() == "bearer" else []
        offered += headers.getlist(_KEY_HEADER)[:1]
        offered += _subprotocol_keys(scope.get("subprotocols", ()))
        caller = self._keys.find([item.encode("latin-1", "replace") for item in offered])
        if caller is not None or ticket is None:
            return caller
        key_id = await self._tickets.redeem(ticket)
        return None if key_id is None else self._keys.by_id(key_id)

    def _adding_limits(self, caller: Caller, send: Send) -> Send:
        """Adds headers with what is left of the caller's limits to an answer."""
        if caller.limits == NO_LIMITS:
            return send

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._limit_headers(caller).items():
                    headers.setdefault(name, value)
            await send(message)

        return send_with_limits


def _pop_ticket(scope: Scope) -> str | None:
    """Remove the ticket from the query string and return it: URLs get into logs."""
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    tickets = [value for name, value in query if name == _TICKET]
    if tickets:
        rest = [(name, value) for name, value in query if name != _TICKET]
        scope["query_string"] = urlencode(rest).encode("latin-1")
    return tickets[0] if tickets else None


def _subprotocol_keys(subprotocols: Sequence[str]) -> list[str]:
    return [
        name.removeprefix(KEY_SUBPROTOCOL)
        for name in subprotocols
        if name.startswith(KEY_SUBPROTOCOL)
    ]


def _name_of(host: str) -> str:
    """The name in a Host header, without the port; empty if there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
