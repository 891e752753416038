"""The exceptions of the Python client.

    PenstockError
    ├── TransportError
    │   ├── UnreachableError        could not connect: nothing was sent
    │   └── ConnectionLostError     the connection broke, and could not be resumed
    ├── RefusedError                the server refused: status, code, param, retry_after_s
    │   ├── InvalidRequestError     400 and every other 4xx without a class of its own
    │   ├── AuthenticationError     401
    │   ├── PermissionDeniedError   403
    │   ├── NotFoundError           404
    │   │   └── ResponseExpiredError    the server no longer keeps a response's events
    │   ├── ConflictError           409
    │   ├── RateLimitError          429
    │   └── ServerError             5xx
    │       └── OverloadedError     503
    ├── ResponseFailedError         the answer ended with `response.failed`
    ├── UnfinishedOutputError       the answer ended before the output that was to be parsed
    └── ProtocolError               the answer is not one of a penstock server

Invalid arguments raise `ValueError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PenstockError(Exception):
    """Base class; the message is one line, written for users."""


class TransportError(PenstockError):
    """The network failed, or no server answered."""


class UnreachableError(TransportError):
    """The client could not connect: nothing was sent."""


class ConnectionLostError(TransportError):
    """The connection broke, or nothing arrived for too long."""


class ResponseFailedError(PenstockError):
    """The answer ended with `response.failed`.

    Attributes:
        code: the reason, for programs.
        response_id: of the answer; its partial output can be retrieved.
    """

    def __init__(self, message: str, *, code: str | None, response_id: str) -> None:
        super().__init__(message)
        self.code = code
        self.response_id = response_id


class UnfinishedOutputError(PenstockError):
    """The answer ended before the output that was to be parsed.

    Attributes:
        reason: in chat the `finish_reason`, such as `length` or `grammar`; in responses the reason
            in `incomplete_details`, such as `max_output_tokens`, or else the `status`.
        answer: the whole answer, as the server gave it.
    """

    def __init__(self, reason: str, *, answer: Mapping[str, Any]) -> None:
        super().__init__(f"the answer ended before its output was complete: {reason}")
        self.reason = reason
        self.answer = answer


class ProtocolError(PenstockError):
    """The answer is not one of a penstock server."""


class RefusedError(PenstockError):
    """The server refused the request.

    Attributes:
        status: the HTTP status; over a WebSocket, the status that HTTP would have had.
        code: the reason, for programs; None if the body was not JSON.
        param: the invalid parameter, if there is one.
        details: penstock's own, such as the queue's length.
        headers: of the answer, with names in lower case; empty over a WebSocket.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        error: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        error = error or {}
        self.code: str | None = error.get("code")
        self.param: str | None = error.get("param")
        self.details: Mapping[str, Any] = error.get("penstock") or {}
        self.headers: Mapping[str, str] = headers or {}

    @property
    def retry_after_s(self) -> float | None:
        """Seconds to wait before a retry, if the server gave them."""
        for scale, value in (
            (1e-3, self.headers.get("retry-after-ms")),
            (1.0, self.headers.get("retry-after")),
            (1e-3, self.details.get("estimated_wait_ms")),
        ):
            try:
                wait_s = float(value or "") * scale
            except ValueError:
                continue  # a date, which is useless if the clocks differ
            if 0.0 <= wait_s < float("inf"):
                return wait_s
        return None


class InvalidRequestError(RefusedError):
    """400, and every other 4xx without a class of its own."""


class AuthenticationError(RefusedError):
    """401."""


class PermissionDeniedError(RefusedError):
    """403."""


class NotFoundError(RefusedError):
    """404."""


class ResponseExpiredError(NotFoundError):
    """The server no longer keeps a response's events; it may still have the response."""


class ConflictError(RefusedError):
    """409: another turn is running in the conversation, or has moved its head."""


class RateLimitError(RefusedError):
    """429: the caller's limits are used up."""


class ServerError(RefusedError):
    """5xx."""


class OverloadedError(ServerError):
    """503: the queue is full, or a part of the server is unavailable."""


_BY_STATUS: Mapping[int, type[RefusedError]] = {
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    429: RateLimitError,
    503: OverloadedError,
}


def refused(
    status: int, error: object, *, headers: Mapping[str, str] | None = None
) -> RefusedError:
    """The exception for a refusal.

    Args:
        error: the object under `error` in the server's answer; anything else if there is none.
    """
    told = error if isinstance(error, dict) else {}
    kind = _BY_STATUS.get(status, ServerError if status >= 500 else InvalidRequestError)
    if told.get("code") == "response_expired":
        kind = ResponseExpiredError
    message = told.get("message")
    if not isinstance(message, str) or not message:
        message = f"the server answered with HTTP status {status}"
    return kind(message, status=status, error=told, headers=headers)


def raise_if_failed(response: Mapping[str, Any]) -> None:
    """Raises: ResponseFailedError: the response failed."""
    if response["status"] == "failed":
        error = response["error"] or {"message": "the answer failed", "code": "failed"}
        raise ResponseFailedError(error["message"], code=error["code"], response_id=response["id"])
