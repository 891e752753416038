"""Writes stream data directly to the socket, bypassing the middlewares.

As an ASGI message, each token would pass the `send` of every middleware, although none changes
anything after a response's head. So our protocols put a `RawWriter` into the scope, and streams use
it once their head is sent. On a server without one, streams send ASGI messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar, cast

from starlette.types import Scope

from penstock.gateway.sources import Source, consume

_T = TypeVar("_T")
_KEY = "penstock.raw_writer"


class RawWriter(Protocol):
    """Writes the body of a response without a length, or the messages of a WebSocket.

    It has no reference to the connection, which the scope would otherwise keep alive.
    """

    def write(self, payload: bytes) -> bool:
        """Write a piece of the body, or a text message. If False, await `drained` before the next.

        Raises:
            WebSocketDisconnect: the client is gone (with HTTP, the data is dropped instead).
        """
        ...

    async def drained(self) -> None:
        """Return when there is room again, or the client is gone."""
        ...


def offer_raw_writer(scope: Scope, writer: RawWriter) -> None:
    scope.setdefault("extensions", {})[_KEY] = writer


def raw_writer_of(scope: Scope) -> RawWriter | None:
    """The connection's writer, to be used once the head is sent; None if it has none."""
    if scope.get("method") == "HEAD":
        return None  # the answer has no body
    return cast("RawWriter | None", scope.get("extensions", {}).get(_KEY))


async def pump(
    source: Source[_T], encode: Callable[[list[_T]], Iterable[bytes]], out: RawWriter
) -> None:
    """Write a source to its end, waking this task only when the connection has no room.

    Args:
        encode: items that are taken together → payloads, each for one `write`.

    Raises:
        Exception: what the source, `encode` or `out` raises.
    """

    def write(items: list[_T]) -> bool:
        has_room = True
        for payload in encode(items):
            has_room = out.write(payload)
        return has_room

    while not await consume(source, write):
        await out.drained()
