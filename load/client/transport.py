"""The interface between a workload and its connections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeAlias

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
History: TypeAlias = Literal["full", "previous_response_id"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """How requests are sent."""

    transport: TransportKind = "sse"
    endpoint: Endpoint = "completions"
    history: History = "full"
    api_key: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of every body
    ignore_eos: bool = True
    stall_s: float = 60.0  # silence that counts as a fault

    def __post_init__(self) -> None:
        if self.history == "previous_response_id" and self.endpoint != "responses":
            raise ConfigError("--history previous_response_id needs --endpoint responses")
        if self.stall_s <= 0:
            raise ConfigError("--stall-s must be positive")

    def open(self, base_url: str) -> Transport:
        """A transport, to be entered. Raises ConfigError if it does not support the endpoint, or
        the address is invalid."""
        settings: dict[str, Any] = {"api_key": self.api_key, "stall_s": self.stall_s}
        if self.transport == "sse":
            return SseTransport(base_url, self.endpoint, **settings)
        if self.endpoint != "responses":
            raise ConfigError(
                f"WebSocket supports only the endpoint responses, not {self.endpoint}: choose "
                "responses, or the transport sse"
            )
        return WebSocketTransport(base_url, **settings)
