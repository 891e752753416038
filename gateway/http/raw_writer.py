"""A way to the socket past the middlewares, for what is sent at every token.

As an ASGI message each token would go through the `send` of every middleware, and all of them pass
on untouched what comes after a response's head. So our protocols put a `RawWriter` into the scope,
and streams write with it once their head is out. A server without one gets ASGI messages.
"""

from __future__ import annotations

from typing import Protocol, cast

from starlette.types import Scope

_KEY = "penstock.raw_writer"


class RawWriter(Protocol):
    """The body of a response that has no length, or the messages of a WebSocket.

    It holds no connection: a scope that did would keep it alive.
    """

    def write(self, payload: bytes) -> bool:
        """Write a piece of the body, or a text message. False: wait for `drained` before the next.

        Raises:
            WebSocketDisconnect: the client is gone (HTTP: nothing happens then).
        """
        ...

    async def drained(self) -> None:
        """Return when there is room again, or nobody to read."""
        ...


def offer_raw_writer(scope: Scope, writer: RawWriter) -> None:
    scope.setdefault("extensions", {})[_KEY] = writer


def raw_writer_of(scope: Scope) -> RawWriter | None:
    """The way of this connection, once its head is out; None if it has none."""
    if scope.get("method") == "HEAD":
        return None  # what follows the head is not to be sent
    return cast("RawWriter | None", scope.get("extensions", {}).get(_KEY))
