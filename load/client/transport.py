"""The seam between a workload and the wire."""

from __future__ import annotations

from typing import Literal, Protocol, Self, TypeAlias

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Call, StreamRecord
from penstock.load.client.requests import Endpoint
from penstock.load.client.sse import SseTransport
from penstock.load.client.websocket import WebSocketTransport


class Transport(Protocol):
    """Sends calls to one server and fills in what came back."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def stream(self, call: Call, record: StreamRecord) -> None:
        """Send it and read to the end.

        Whatever goes wrong is noted as a fault of the record; nothing is raised but
        cancellation, which closes the connection (that is how a client walks away).
        """
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
    """A transport, to be entered. Raises ConfigError if the transport does not speak to that
    endpoint, or the address is none."""
    if kind == "sse":
        return SseTransport(base_url, endpoint, api_key=api_key, stall_s=stall_s)
    if endpoint != "responses":
        raise ConfigError(
            f"the WebSocket speaks responses alone, not {endpoint}: choose the endpoint responses, "
            "or the transport sse"
        )
    return WebSocketTransport(base_url, api_key=api_key, stall_s=stall_s)
