"""The fields of messages on the Responses WebSocket that are read before anything else is.

Not known here: connections, and what is done with a message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from penstock.gateway.errors import RequestRefusedError

_LANE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_Message = Mapping[str, Any]


def response_id_of(message: _Message, kind: str) -> str:
    response_id = message.get("response_id")
    if not isinstance(response_id, str):
        raise RequestRefusedError(
            f"{kind} needs a response_id",
            code="missing_required_parameter",
            param="response_id",
        )
    return response_id


def starting_after_of(message: _Message) -> int:
    after = message.get("starting_after")
    if after is None:
        return -1
    if not isinstance(after, int) or isinstance(after, bool):
        raise RequestRefusedError(
            "starting_after must be a sequence number", code="invalid_type", param="starting_after"
        )
    return max(-1, after)


def stream_id_of(message: _Message) -> str | None:
    stream_id = message.get("stream_id")
    if stream_id is not None and not (
        isinstance(stream_id, str) and _LANE_NAME.fullmatch(stream_id)
    ):
        raise RequestRefusedError(
            "stream_id must be 1 to 256 letters, digits, '_', '.' or '-'",
            code="invalid_stream_id",
            param="stream_id",
        )
    return stream_id


def on_lane(event: dict[str, Any], stream_id: str | None) -> dict[str, Any]:
    return event if stream_id is None else {**event, "stream_id": stream_id}


def limit_reached(message: str) -> RequestRefusedError:
    return RequestRefusedError(message, code="websocket_stream_limit_reached", param="stream_id")
