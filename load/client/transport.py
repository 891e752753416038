"""The interface between a workload and its connections."""

from __future__ import annotations

from typing import Literal, Protocol, Self, TypeAlias

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Call, Endpoint, StreamRecord
from penstock.load.client.sse import SseTransport
from penstock.load.client.websocket import WebSocketTransport


class Transport(Protocol):
    """Sends calls to one server and fills in what came back."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def stream(self, call: Call, record: StreamRecord) -> None:
        """Send a call and read its whole answer. Errors become faults of the record; only
        cancellation is raised, and closes the connection: that is how a client leaves."""
        ...


TransportKind: TypeAlias = Literal["sse", "websocket"]


def open_transport(
    kind: TransportKind,
    endpoint: Endpoint,
    base_url: str,
    *,
    api_key: str | None = None,
    stall_s: float = 60.0,
) -> Transport:
    """A transport, to be entered. Raises ConfigError if it does not support the endpoint, or the
    address is invalid."""
    if kind == "sse":
        return SseTransport(base_url, endpoint, api_key=api_key, stall_s=stall_s)
    if endpoint != "responses":
        raise ConfigError(
            f"WebSocket supports only the endpoint responses, not {endpoint}: choose responses, "
            "or the transport sse"
        )
    return WebSocketTransport(base_url, api_key=api_key, stall_s=stall_s)
