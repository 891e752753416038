"""The transport that a user names."""

from __future__ import annotations

from typing import Literal, TypeAlias

from penstock.engine.errors import ConfigError
from penstock.load.client.bodies import Endpoint
from penstock.load.client.sse import SseTransport
from penstock.load.client.transport import Transport
from penstock.load.client.websocket import WebSocketTransport

TransportKind: TypeAlias = Literal["sse", "websocket"]


def open_transport(
    kind: TransportKind,
    endpoint: Endpoint,
    base_url: str,
    *,
    api_key: str | None = None,
    stall_s: float = 60.0,
) -> Transport:
    """A transport, to be entered.

    Raises:
        ConfigError: the transport does not speak to that endpoint, or the address is none.
    """
    if kind == "sse":
        return SseTransport(base_url, endpoint, api_key=api_key, stall_s=stall_s)
    if endpoint != "responses":
        raise ConfigError(
            f"the WebSocket speaks responses alone, not {endpoint}: choose the endpoint responses, "
            "or the transport sse"
        )
    return WebSocketTransport(base_url, api_key=api_key, stall_s=stall_s)
