"""How requests go to a server: the arguments that say so, and what they come to.

Shared by the benches that send to a server. Knows no dataset and no times.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from penstock.engine.errors import ConfigError
from penstock.load.client.bodies import Endpoint
from penstock.load.client.choose import TransportKind, open_transport
from penstock.load.client.transport import Transport
from penstock.load.workloads.driver import History


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """
    Attributes:
        extra: further fields of every body.
        stall_s: silence that counts as a fault.
    """

    transport: TransportKind = "sse"
    endpoint: Endpoint = "completions"
    history: History = "full"
    api_key: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    stall_s: float = 60.0

    def __post_init__(self) -> None:
        if self.history == "previous_response_id" and self.endpoint != "responses":
            raise ConfigError("--history previous_response_id needs --endpoint responses")
        if self.stall_s <= 0:
            raise ConfigError("--stall-s must be positive")

    def open(self, base_url: str) -> Transport:
        return open_transport(
            self.transport,
            self.endpoint,
            base_url,
            api_key=self.api_key,
            stall_s=self.stall_s,
        )


def add_wire_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--model", help="name in the requests; else the first that a server lists")
    group.add_argument("--transport", choices=("sse", "websocket"), default="sse", help="sent by")
    group.add_argument(
        "--endpoint",
        choices=("completions", "chat", "responses"),
        help="below /v1; else completions for sse, responses for websocket",
    )
    group.add_argument(
        "--history",
        choices=("full", "previous_response_id"),
        default="full",
        help="how later turns of a dialogue refer to earlier ones",
    )
    group.add_argument("--api-key", help="else the first in PENSTOCK_API_KEY, if any")
    group.add_argument(
        "--extra-body", default='{"temperature": 0}', help="JSON object: fields of every request"
    )
    group.add_argument(
        "--stall-s", type=float, default=60.0, help="seconds of silence that are a fault"
    )


def wire_of(parsed: argparse.Namespace) -> Wire:
    """
    Raises:
        ConfigError: arguments that do not go together.
    """
    try:
        extra = orjson.loads(parsed.extra_body)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body must be a JSON object")
    keys = os.environ.get("PENSTOCK_API_KEY", "")
    return Wire(
        transport=parsed.transport,
        endpoint=parsed.endpoint
        or ("responses" if parsed.transport == "websocket" else "completions"),
        history=parsed.history,
        api_key=parsed.api_key or keys.split(",")[0].strip() or None,
        extra=extra,
        stall_s=parsed.stall_s,
    )
