"""Everything that a client of this package raises.

    PenstockError
    ├── TransportError
    │   ├── UnreachableError        no connection came about: nothing was sent
    │   └── ConnectionLostError     it broke, and going on was impossible or in vain
    ├── RefusedError                the server said no: status, code, param, retry_after_s
    │   ├── InvalidRequestError     400 and every other 4xx without a class of its own
    │   ├── AuthenticationError     401
    │   ├── PermissionDeniedError   403
    │   ├── NotFoundError           404
    │   │   └── ResponseExpiredError    the events of a response are not kept any more
    │   ├── ConflictError           409
    │   ├── RateLimitError          429
    │   └── ServerError             5xx
    │       └── OverloadedError     503
    ├── ResponseFailedError         the answer ended with `response.failed`
    └── ProtocolError               this is not what a penstock server says

`ValueError` is raised for arguments that make no sense, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PenstockError(Exception):
    """Something that a user can be told in one line."""


class TransportError(PenstockError):
    """The network, or nobody at its other end."""


class UnreachableError(TransportError):
    """No connection came about: nothing was sent."""


class ConnectionLostError(TransportError):
    """The connection broke, or nothing came for too long."""


class ResponseFailedError(PenstockError):
    """The answer ended with `response.failed`.

    Attributes:
        code: why, for programs.
        response_id: of the answer; what came of it can be read back.
    """

    def __init__(self, message: str, *, code: str | None, response_id: str) -> None:
        super().__init__(message)
        self.code = code
        self.response_id = response_id


class ProtocolError(PenstockError):
    """This is not what a penstock server says."""


class RefusedError(PenstockError):
    """The server said no.

    Attributes:
        status: of HTTP; over a WebSocket the one that HTTP would have had.
        code: why, for programs; None where no JSON came.
        param: the parameter that was wrong, if one was.
        details: of penstock's own, as the queue's length.
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
        """When to come again, if the server said so in seconds."""
        for scale, value in (
            (1e-3, self.headers.get("retry-after-ms")),
            (1.0, self.headers.get("retry-after")),
            (1e-3, self.details.get("estimated_wait_ms")),
        ):
            try:
                wait_s = float(value or "") * scale
            except ValueError:
                continue  # a date, which clocks that differ make useless
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
    """The events of a response are not kept any more; the response itself may be."""


class ConflictError(RefusedError):
    """409: another turn runs on the conversation, or has moved its head."""


class RateLimitError(RefusedError):
    """429: the caller's own limits."""


class ServerError(RefusedError):
    """5xx."""


class OverloadedError(ServerError):
    """503: too much is queued, or a part of the server is away."""


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
        error: the object under `error` in what the server said; anything else if it said nothing
            of that shape.
    """
    told = error if isinstance(error, dict) else {}
    kind = _BY_STATUS.get(status, ServerError if status >= 500 else InvalidRequestError)
    if told.get("code") == "response_expired":
        kind = ResponseExpiredError
    message = told.get("message")
    if not isinstance(message, str) or not message:
        message = f"the server answered with HTTP status {status}"
    return kind(message, status=status, error=told, headers=headers)
