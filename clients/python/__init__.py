"""The Python client; uses only the server's public protocol."""

from .client import AsyncClient, Client
from .errors import (
    AuthenticationError,
    ConflictError,
    ConnectionLostError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PenstockError,
    PermissionDeniedError,
    ProtocolError,
    RateLimitError,
    RefusedError,
    ResponseExpiredError,
    ResponseFailedError,
    ServerError,
    TransportError,
    UnfinishedOutputError,
    UnreachableError,
)
from .event_stream import EventStream
from .events import ResponseEvent
from .objects import output_text
from .responses_socket import ResponsesSocket
from .retries import RetryPolicy
from .tools import Tool, ToolRun, calls_of

__all__ = [
    "AsyncClient",
    "AuthenticationError",
    "Client",
    "ConflictError",
    "ConnectionLostError",
    "EventStream",
    "InvalidRequestError",
    "NotFoundError",
    "OverloadedError",
    "PenstockError",
    "PermissionDeniedError",
    "ProtocolError",
    "RateLimitError",
    "RefusedError",
    "ResponseEvent",
    "ResponseExpiredError",
    "ResponseFailedError",
    "ResponsesSocket",
    "RetryPolicy",
    "ServerError",
    "TransportError",
    "Tool",
    "ToolRun",
    "UnfinishedOutputError",
    "UnreachableError",
    "calls_of",
    "output_text",
]
