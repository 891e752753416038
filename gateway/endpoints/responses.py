"""`POST /v1/responses`, and reading back or deleting a stored response.

The events come from `responder`, the same ones that the WebSocket sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.endpoints.http import CLIENT_GONE, json_response, read_json, unless_gone
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.responder import Responder, Turn
from penstock.gateway.schemas import ResponsesRequest, parse_request
from penstock.gateway.sessions import SessionStore
from penstock.gateway.sse import EventStream, named


class Responses:
    """The endpoints.

    Args:
        ping_s: silence on a stream after which a comment is sent.
    """

    def __init__(
        self, responder: Responder, sessions: SessionStore, *, max_body_bytes: int, ping_s: float
    ) -> None:
        self._responder = responder
        self._sessions = sessions
        self._max_body_bytes = max_body_bytes
        self._ping_s = ping_s

    async def create(self, request: Request) -> Response | EventStream:
        body = await read_json(request, max_bytes=self._max_body_bytes)
        asked = parse_request(ResponsesRequest, body)
        turn = await self._responder.prepare(asked)
        if asked.stream:
            return EventStream(_stream(turn), ping_s=self._ping_s)
        whole = await unless_gone(request, _whole(turn))
        if turn.failure is not None:
            return turn.failure.response()
        return Response(status_code=CLIENT_GONE) if whole is None else json_response(whole)

    async def retrieve(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise RequestRefusedError(
                "a stored response cannot be streamed again",
                code="unsupported_parameter",
                param="stream",
            )
        stored = self._sessions.get(request.path_params["response_id"])
        return Response(stored.body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._responder.delete(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})


async def _stream(turn: Turn) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(turn.batches()) as batches:
        async for batch in batches:
            yield b"".join(named(event["type"], orjson.dumps(event)) for event in batch)


async def _whole(turn: Turn) -> dict[str, Any]:
    response: dict[str, Any] = {}
    async with contextlib.aclosing(turn.batches()) as batches:
        async for batch in batches:
            response = batch[-1].get("response", response)
    return response
