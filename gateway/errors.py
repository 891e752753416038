"""Every failure a caller can see: one table from exception to status, code and wire form.

HTTP, an event stream and a WebSocket tell the same failure the same way:

    HTTP        status   {"error": {"message", "type", "param", "code", "penstock"?}}
    SSE         (200)    data: {"error": {…}}                 in the middle of a stream
    WebSocket            {"type": "error", "status": …, "error": {…}, "stream_id": …}

but in Anthropic's API, over HTTP and as the event `error`:

    {"type": "error", "error": {"type", "message"}, "request_id"}
"""

from __future__ import annotations

import logging
import math
import random
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from penstock.engine.errors import EngineDeadError, InvalidRequestError, PromptTooLongError

_LOG = logging.getLogger(__name__)
_MAX_MESSAGE_CHARS = 480  # a line of the log with it has less than 2 KB
_MAX_PARAM_CHARS = 120
_ANTHROPIC_PATH, _ANTHROPIC_HEADER = "/v1/messages", b"anthropic-version"
REQUEST_ID, FAILURE = "penstock.request_id", "penstock.failure"  # in a scope; in a response's start
_UNAVAILABLE_S = (1.0, 5.0)  # Retry-After, spread so that clients do not all return at once


class RequestRefusedError(InvalidRequestError):
    """A request that this gateway does not serve, with the status and code that say why.

    Attributes:
        headers: to send with it over HTTP (`Retry-After`, …).
        details: fields of our own, sent under `penstock` beside OpenAI's.
    """

    headers: Mapping[str, str] = MappingProxyType({})
    details: Mapping[str, Any] = MappingProxyType({})

    def __init__(
        self, message: str, *, code: str, param: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message, param=param)
        self.code = code
        self.status = status


class GenerationFailedError(Exception):
    """The engine gave up on one request; the others continue."""


class SupersededError(GenerationFailedError):
    """Another gateway runs the request now. Callers never see this error: their readers continue
    with that gateway's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failure as the caller sees it. A long message, which repeats a value of the caller's, is
    cut in the middle, and so is a long parameter name."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Frozen for everybody else.
        object.__setattr__(self, "message", shortened(self.message, _MAX_MESSAGE_CHARS))
        if self.param is not None:
            object.__setattr__(self, "param", shortened(self.param, _MAX_PARAM_CHARS))

    def body(self) -> dict[str, Any]:
        """The JSON that is sent."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        if self.details:
            error["penstock"] = dict(self.details)
        return {"error": error}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """The JSON that is sent by Anthropic's API."""
        kind = _ANTHROPIC_TYPES.get(self.status)
        if kind is None:
            kind = "invalid_request_error" if self.status < 500 else "api_error"
        if self.code == "server_overloaded":
            kind = "overloaded_error"
        # By these words Claude Code knows that it has to compact the conversation.
        is_too_long = self.code == "context_length_exceeded"
        message = f"prompt is too long: {self.message}" if is_too_long else self.message
        error = {"type": kind, "message": message}
        return {"type": "error", "error": error, "request_id": request_id}

    def response(self) -> FailureResponse:
        defaults: dict[str, str] = {}
        if self.status == 401:
            defaults = {"WWW-Authenticate": "Bearer"}
        elif self.status == 503:
            defaults = retry_headers(random.uniform(*_UNAVAILABLE_S))  # noqa: S311
        return FailureResponse(self, {**defaults, **self.headers})


class FailureResponse(Response):
    """A failure over HTTP. Its start tells the failure, for the request's record."""

    media_type = "application/json"

    def __init__(self, failure: Failure, headers: Mapping[str, str]) -> None:
        super().__init__(orjson.dumps(failure.body()), failure.status, headers)
        self._failure = failure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_anthropic(scope):
            self.body = orjson.dumps(self._failure.anthropic_body(scope.get(REQUEST_ID, "")))
            self.headers["content-length"] = str(len(self.body))

        async def tell(message: Message) -> None:
            if message["type"].endswith("response.start"):
                message = {**message, FAILURE: self._failure}
            await send(message)

        await super().__call__(scope, receive, tell)


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is made by Anthropic's API, in which failures and models look otherwise."""
    is_path = bool(scope["path"].startswith(_ANTHROPIC_PATH))
    return is_path or any(name == _ANTHROPIC_HEADER for name, _ in scope["headers"])


@dataclass(frozen=True, slots=True)
class _Rule:
    exception: type[Exception]
    status: int
    type: str
    code: str


# The first matching row counts, so a subclass must come before its base.
_TABLE = (
    _Rule(PromptTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    _Rule(InvalidRequestError, 400, "invalid_request_error", "invalid_value"),
    _Rule(EngineDeadError, 503, "server_error", "engine_unavailable"),
    _Rule(GenerationFailedError, 500, "server_error", "generation_failed"),
)
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    **_TYPES,
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    504: "timeout_error",
}


def failure_of(error: Exception) -> Failure:
    """The failure that a caller is told for `error`. An exception that is not in the table is a
    bug: it is logged under an incident id, and the caller is told only the id."""
    if isinstance(error, RequestRefusedError):
        failure = refusal(error.status, code=error.code, message=str(error), param=error.param)
        return replace(failure, headers=error.headers, details=error.details)
    for rule in _TABLE:
        if isinstance(error, rule.exception):
            return Failure(
                status=rule.status,
                type=rule.type,
                code=rule.code,
                message=str(error),
                param=getattr(error, "param", None),
            )
    incident = uuid.uuid4().hex[:12]
    _LOG.error("internal error %s", incident, exc_info=error)
    return Failure(
        status=500,
        type="server_error",
        code="internal_error",
        message=f"internal error; see incident {incident} in the server's log",
    )


def refusal(status: int, *, code: str, message: str, param: str | None = None) -> Failure:
    """A failure without an exception, or with a status and code of its own."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return Failure(status=status, type=kind, code=code, message=message, param=param)


def key_reused(what: str) -> RequestRefusedError:
    """An `Idempotency-Key` that came before, with another body or input (`what`)."""
    error = RequestRefusedError(
        f"this Idempotency-Key was already used with a different {what}",
        code="idempotency_key_reused",
        param="Idempotency-Key",
        status=409,
    )
    error.headers = {"x-should-retry": "false"}  # OpenAI's clients retry other 409s
    return error


def shortened(text: str, max_chars: int) -> str:
    """The text, with an ellipsis in place of its middle if it is longer."""
    if len(text) <= max_chars:
        return text
    tail = max_chars // 3
    return f"{text[: max_chars - tail - 1]}…{text[-tail:]}"


def retry_headers(wait_s: float) -> dict[str, str]:
    """When to retry: in whole seconds (HTTP), and in milliseconds, which OpenAI's clients read."""
    return {
        "Retry-After": str(math.ceil(wait_s)),
        "retry-after-ms": str(math.ceil(wait_s * 1e3)),
    }


def handle_exception(_: Request, error: Exception) -> Response:
    """Starlette's handler for every exception that an endpoint raises."""
    return failure_of(error).response()


def handle_client_gone(_: Request, __: Exception) -> Response:
    """The client disconnected while sending its body; nobody receives this answer."""
    return Response(status_code=499)


EXCEPTION_HANDLERS = {
    ClientDisconnect: handle_client_gone,
    InvalidRequestError: handle_exception,
    EngineDeadError: handle_exception,
    GenerationFailedError: handle_exception,
    Exception: handle_exception,
}
