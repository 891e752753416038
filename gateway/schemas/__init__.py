"""The wire types of requests: the only pydantic in the project.

A body becomes a typed, frozen request here. Which parameters exist at all is `parameters`'
business; what a request then does is the endpoints'.
"""

from penstock.gateway.schemas.parsing import parse_fields, parse_json, parse_request
from penstock.gateway.schemas.requests import (
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
    SocketRequest,
)
from penstock.gateway.schemas.sampling import Branching, SamplingRequest, StreamOptions

__all__ = [
    "Branching",
    "ChatRequest",
    "CompletionRequest",
    "ResponsesRequest",
    "SamplingRequest",
    "SocketRequest",
    "StreamOptions",
    "parse_fields",
    "parse_json",
    "parse_request",
]
