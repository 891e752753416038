"""Data about a request, collected while it is served, for its log line, its span and the metrics.

A context variable holds the record, so code that serves the request can add to it without having it
passed. A WebSocket has one record for the connection, with the sums of its responses. A response
that continues after its request still adds to the record, which is then ignored.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.gateway.errors import Failure, is_anthropic

_REFUSALS = frozenset({429, 503})
REQUEST_ID_HEADER = "x-request-id"
_ANTHROPIC_REQUEST_ID = b"request-id"
_PLAIN = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


def _ignore(_: str) -> None:
    """The default of `on_refusal`."""


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One request, or one WebSocket.

    Attributes:
        request_id: the client's or a new one.
        on_refusal: called with the code of every 429 and 503.
        began_ns: nanoseconds since the Unix epoch.
        tenant: of its key; None: no valid key, or none is required.
        route: the template of its path, such as `/v1/responses/{response_id}`; None: unknown path.
        status: as sent; 101 for an open WebSocket; None if the client left before one was sent.
        error: code of the last failure that the caller got.
        model: the model that generated for it.
        input_tokens, output_tokens: of generations that ended.
        first_token_s: from arrival to the first token.
    """

    request_id: str
    scope: Scope
    on_refusal: Callable[[str], None] = _ignore
    began_ns: int = field(default_factory=time.time_ns)
    began_s: float = field(default_factory=time.perf_counter)
    duration_s: float = 0.0
    tenant: str | None = None
    route: str | None = None
    status: int | None = None
    error: str | None = None
    model: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    first_token_s: float | None = None

    @property
    def method(self) -> str:
        return str(self.scope["method"]) if self.scope["type"] == "http" else "WEBSOCKET"

    @property
    def headers(self) -> Headers:
        return Headers(scope=self.scope)

    @property
    def is_anthropic(self) -> bool:
        return is_anthropic(self.scope)

    @property
    def id_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers with its id for the answer."""
        names = [REQUEST_ID_HEADER.encode()]
        if self.is_anthropic:
            names.append(_ANTHROPIC_REQUEST_ID)
        return [(name, self.request_id.encode()) for name in names]

    def note_failure(self, failure: Failure) -> None:
        """The caller gets a failure."""
        self.error = failure.code
        if failure.status in _REFUSALS:
            self.on_refusal(failure.code)

    def note_first_token(self, model: str, now_s: float) -> None:
        """
        Args:
            now_s: of `time.perf_counter`.
        """
        self.model = model
        if self.first_token_s is None:
            self.first_token_s = now_s - self.began_s

    def note_usage(self, *, input_tokens: int, output_tokens: int) -> None:
        """A generation ended."""
        self.input_tokens += input_tokens
        self.output_tokens += output_tokens


CURRENT_REQUEST: ContextVar[RequestRecord | None] = ContextVar("request", default=None)


def request_id_of(sent: bytes | None) -> str:
    """A request's id in answers and logs: the client's own if it has only plain characters. Other
    characters would let a caller inject text into logs and response headers.

    Args:
        sent: the request's `x-request-id`; None if it has no such header.
    """
    if sent is not None and _PLAIN.fullmatch(sent):
        return sent.decode("ascii")
    return f"req_{secrets.token_hex(16)}"


def told(failure: Failure) -> dict[str, Any]:
    """The JSON of a failure for the caller of the current request, in the middle of its answer."""
    record = CURRENT_REQUEST.get()
    if record is None:
        return failure.body()
    record.note_failure(failure)
    return failure.anthropic_body(record.request_id) if record.is_anthropic else failure.body()
