"""The Responses WebSocket mode: many responses on one socket, one JSON event a message.

    client → response.create {…, stream_id?} · penstock.cancel {response_id | stream_id} ·
             penstock.drop_prefix {response_id} · response.steer (refused)
    server → the events of `response_events`, with `stream_id` where one was given ·
             penstock.prefix_dropped · error

Responses of one lane (`stream_id`) run in order, those of different lanes side by side. One task
always receives, so a cancel is read while tokens are sent. Nothing is queued for a slow reader:
each lane waits for the socket, and its tokens merge meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.websockets import WebSocket, WebSocketDisconnect

from penstock.gateway.auth import KEY_SUBPROTOCOL
from penstock.gateway.errors import RequestRefusedError, failure_of
from penstock.gateway.responder import Responder, Turn
from penstock.gateway.schemas import SocketRequest, parse_json, parse_request
from penstock.gateway.sessions import SessionStore

MAX_IN_FLIGHT = 16
MAX_LANES = 32
_LANE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_Message = Mapping[str, Any]


class ResponsesSocket:
    """The endpoint: a `Connection` per WebSocket."""

    def __init__(self, responder: Responder, sessions: SessionStore) -> None:
        self._responder = responder
        self._sessions = sessions

    async def serve(self, websocket: WebSocket) -> None:
        await websocket.accept(subprotocol=_subprotocol(websocket.scope["subprotocols"]))
        connection = Connection(websocket, self._responder, sessions=self._sessions)
        try:
            await connection.run()
        except WebSocketDisconnect:
            pass
        finally:
            await connection.close()


def _subprotocol(offered: list[str]) -> str | None:
    # A browser drops the connection unless one it offered comes back: a real one if there is any.
    return next((name for name in offered if not name.startswith(KEY_SUBPROTOCOL)), None) or next(
        iter(offered), None
    )


class Connection:
    """One client's socket and what runs on it."""

    def __init__(
        self, websocket: WebSocket, responder: Responder, *, sessions: SessionStore
    ) -> None:
        self._websocket = websocket
        self._responder = responder
        self._sessions = sessions
        self._lanes: dict[str | None, Lane] = {}
        self._handlers = {
            "response.create": self._create,
            "response.steer": self._steer,
            "penstock.cancel": self._cancel,
            "penstock.drop_prefix": self._drop_prefix,
        }

    async def run(self) -> None:
        """Take messages until the client leaves."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            await self._handle(message.get("text") or message.get("bytes") or b"")

    async def close(self) -> None:
        """The client is gone: stop everything that ran for it."""
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def send(self, event: _Message) -> None:
        await self._websocket.send({"type": "websocket.send", "text": orjson.dumps(event).decode()})

    async def _handle(self, data: str | bytes) -> None:
        stream_id = None
        try:
            message = parse_json(data)
            stream_id = _stream_id(message)
            kind = message.get("type")
            handler = self._handlers.get(kind) if isinstance(kind, str) else None
            if handler is None:
                raise RequestRefusedError(
                    f"unknown event type {kind!r}; this server takes {', '.join(self._handlers)}",
                    code="unknown_event_type",
                    param="type",
                )
            await handler(message, stream_id)
        except WebSocketDisconnect:
            raise
        except Exception as error:  # one bad message must not end the others' streams
            await self.send(failure_of(error).websocket_event(stream_id))

    async def _create(self, message: _Message, stream_id: str | None) -> None:
        if sum(lane.num_open for lane in self._lanes.values()) >= MAX_IN_FLIGHT:
            raise _limit(f"at most {MAX_IN_FLIGHT} responses may be in flight on a connection")
        lane = self._lanes.get(stream_id)
        if lane is None:
            if len(self._lanes) >= MAX_LANES:
                raise _limit(f"a connection may use at most {MAX_LANES} stream ids")
            lane = self._lanes[stream_id] = Lane(self, self._responder, stream_id=stream_id)
        lane.add({k: v for k, v in message.items() if k not in ("type", "stream_id")})

    async def _cancel(self, message: _Message, stream_id: str | None) -> None:
        response_id = message.get("response_id")
        is_named = response_id is None and stream_id is not None
        if not is_named and not isinstance(response_id, str):
            raise _missing_id("penstock.cancel needs a response_id or a stream_id")
        for lane in self._lanes.values():
            if lane.stream_id == stream_id if is_named else lane.runs(response_id):
                lane.cancel()
                return
        # A cancel may cross the end of its response: then there is nothing left to do.
        if response_id is not None and response_id not in self._sessions:
            raise RequestRefusedError(
                f"no response {response_id!r} runs on this connection",
                code="response_not_found",
                param="response_id",
                status=404,
            )

    async def _drop_prefix(self, message: _Message, stream_id: str | None) -> None:
        response_id = message.get("response_id")
        if not isinstance(response_id, str):
            raise _missing_id("penstock.drop_prefix needs a response_id")
        self._responder.drop_prefix(response_id)
        event = {"type": "penstock.prefix_dropped", "response_id": response_id}
        await self.send(_on_lane(event, stream_id))

    async def _steer(self, message: _Message, stream_id: str | None) -> None:
        event = {
            "type": "response.steer.failed",
            "sequence_number": 0,
            "error": {
                "type": "invalid_request_error",
                "code": "steering_not_supported",
                "message": "this server does not steer running responses",
            },
            "steer": {
                "input": message.get("input"),
                "previous_response_id": message.get("previous_response_id"),
            },
        }
        await self.send(_on_lane(event, stream_id))


class Lane:
    """Responses that run one after the other. It has a task while it has work."""

    def __init__(
        self, connection: Connection, responder: Responder, *, stream_id: str | None
    ) -> None:
        self.stream_id = stream_id
        self.turn: Turn | None = None  # the one running
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._responder = responder
        self._waiting: deque[_Message] = deque()
        self._is_running = False
        self._is_cancelled = False  # while its turn was still being prepared

    @property
    def num_open(self) -> int:
        return len(self._waiting) + self._is_running

    def add(self, body: _Message) -> None:
        self._waiting.append(body)
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._run())

    def runs(self, response_id: object) -> bool:
        return self.turn is not None and self.turn.response_id == response_id

    def cancel(self) -> None:
        """Stop the response that runs or is about to; those queued behind it go on."""
        if self.turn is not None:
            self.turn.cancel()
        else:
            self._is_cancelled = self.num_open > 0

    async def _run(self) -> None:
        while self._waiting:
            self._is_running = True
            try:
                await self._respond(self._waiting.popleft())
            finally:
                self.turn = None
                self._is_running = self._is_cancelled = False

    async def _respond(self, body: _Message) -> None:
        try:
            # Only now: it may continue the response that ran before it in this lane.
            self.turn = await self._responder.prepare(parse_request(SocketRequest, body))
        except Exception as error:
            await self._connection.send(failure_of(error).websocket_event(self.stream_id))
            return
        async with contextlib.aclosing(self.turn.batches()) as batches:
            async for batch in batches:
                if self._is_cancelled:
                    self._is_cancelled = False
                    self.turn.cancel()
                for event in batch:
                    await self._connection.send(_on_lane(event, self.stream_id))


def _stream_id(message: _Message) -> str | None:
    stream_id = message.get("stream_id")
    if stream_id is not None and not (
        isinstance(stream_id, str) and _LANE_NAME.fullmatch(stream_id)
    ):
        raise RequestRefusedError(
            "stream_id must be 1 to 256 letters, digits, '_', '.' or '-'",
            code="invalid_value",
            param="stream_id",
        )
    return stream_id


def _on_lane(event: dict[str, Any], stream_id: str | None) -> dict[str, Any]:
    return event if stream_id is None else {**event, "stream_id": stream_id}


def _missing_id(message: str) -> RequestRefusedError:
    return RequestRefusedError(message, code="missing_required_parameter", param="response_id")


def _limit(message: str) -> RequestRefusedError:
    return RequestRefusedError(
        message, code="websocket_stream_limit_reached", param="stream_id", status=429
    )
