"""Who may come in: Host, Origin and API key, checked before anything else, for HTTP and WebSocket.

    Host     bound to loopback, it must name loopback (or an allowed origin): a rebound DNS name
             could otherwise reach us
    Origin   absent, the server's own, or allowed: browsers let any page open a WebSocket to us
    key      `/v1/*`, `/tokenize`, `/detokenize`: `Authorization: Bearer`, or for browsers'
             WebSockets a ticket as `?ticket=`, or the subprotocol `openai-insecure-api-key.<key>`

Whoever is let in is known from here on (`callers`), and is told with every answer what is left of
its limits. No key and no ticket leaves this file: the ticket is taken out of the address.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.gateway.auth.callers import NO_LIMITS, Caller, set_caller
from penstock.gateway.auth.keys import KeyRing
from penstock.gateway.auth.tickets import Tickets
from penstock.gateway.config import GatewayConfig, is_loopback
from penstock.gateway.errors import Failure, refusal

KEY_SUBPROTOCOL = "openai-insecure-api-key."
_KEY_PATHS = ("/v1", "/tokenize", "/detokenize")
_TICKET = "ticket"
_READING_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class Guard:
    """ASGI middleware; a WebSocket is refused at its handshake with the same answer as HTTP.

    Args:
        limit_headers: what to tell a caller of its limits.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: GatewayConfig,
        *,
        keys: KeyRing,
        tickets: Tickets,
        limit_headers: Callable[[Caller], Mapping[str, str]],
    ) -> None:
        self._app = app
        self._keys = keys
        self._tickets = tickets
        self._limit_headers = limit_headers
        self._checks_host = config.is_loopback
        self._allowed_origins = frozenset(config.allowed_origins)
        # A name trusted as an origin is no rebound name: a proxy here may pass it on as Host. Nor
        # is the name that the server was told to listen on.
        self._hosts = {"localhost", config.host_name.lower()} | {
            name for origin in self._allowed_origins if (name := urlsplit(origin).hostname)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        ticket = _pop_ticket(scope) if scope["type"] == "websocket" else None
        failure = self._check(scope)
        if failure is None and not self._keys.is_open and scope["path"].startswith(_KEY_PATHS):
            caller = await self._caller(scope, ticket)
            if caller is None:
                failure = refusal(
                    401, code="invalid_api_key", message="a valid API key is required"
                )
            else:
                set_caller(scope, caller)
                send = self._telling(caller, send)
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
        return None

    def _lets_in(self, origin: str, host: str) -> bool:
        if not self._allowed_origins.isdisjoint((origin, "*")):
            return True
        return bool(host) and origin.partition("://")[2] == host

    async def _caller(self, scope: Scope, ticket: str | None) -> Caller | None:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        offered = [key] if scheme.lower() == "bearer" else []
        offered += _subprotocol_keys(scope.get("subprotocols", ()))
        caller = self._keys.find([item.encode("latin-1", "replace") for item in offered])
        if caller is not None or ticket is None:
            return caller
        key_id = await self._tickets.redeem(ticket)
        return None if key_id is None else self._keys.by_id(key_id)

    def _telling(self, caller: Caller, send: Send) -> Send:
        """Adds what is left of the caller's limits to the head of an answer."""
        if caller.limits == NO_LIMITS:
            return send

        async def telling(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self._limit_headers(caller).items():
                    headers.setdefault(name, value)
            await send(message)

        return telling


def _pop_ticket(scope: Scope) -> str | None:
    """The ticket in an address, which is taken out of it: addresses get into logs."""
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
    """The name in a Host header, without the port; nothing where there is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
