"""The Responses WebSocket mode: several answers on one socket.

    client → response.create {…, stream_id?} · penstock.cancel {response_id | stream_id} ·
             penstock.resume {response_id, starting_after}
    server → the events of `events`, with `stream_id` where one was given · error ·
             penstock.recovered {response_id, recovered: true | false}, before what a resume brings

Answers of one lane follow each other, those of different lanes run side by side.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import orjson

from .app import Answers
from .asked import Endpoint, RefusedError, parse_json
from .events import Events
from .outlets import Receive, Scope, Send, SocketOutlet
from .plan import Fault, StreamPlan
from .player import Player

_MAX_IN_FLIGHT = 16


class SocketEndpoint:
    """Takes WebSockets of `/v1/responses`."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        if scope["path"] != "/v1/responses":
            await send({"type": "websocket.close", "code": 1008})
            return
        await send({"type": "websocket.accept"})
        connection = _Connection(self._answers, SocketOutlet(scope, send))
        try:
            while (message := await receive())["type"] == "websocket.receive":
                await connection.take(message.get("text") or message.get("bytes") or b"")
        finally:
            await connection.close()


class _Lane:
    """Answers that follow each other."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.response_id = ""  # of the answer under way


class _Connection:
    """One client."""

    def __init__(self, answers: Answers, outlet: SocketOutlet) -> None:
        self._answers = answers
        self._outlet = outlet
        self._lanes: defaultdict[str | None, _Lane] = defaultdict(_Lane)
        self._tasks: set[asyncio.Task[None]] = set()
        self._handlers = {
            "response.create": self._create,
            "penstock.cancel": self._cancel,
            "penstock.resume": self._resume,
        }

    async def take(self, data: str | bytes) -> None:
        """One message of the client's."""
        stream_id = None
        try:
            message = parse_json(data)
            stream_id = message.get("stream_id")
            if not isinstance(stream_id, str | None):
                stream_id = None
                raise RefusedError("must be a text", code="invalid_value", param="stream_id")
            handler = self._handlers.get(str(message.get("type")))
            if handler is None:
                raise RefusedError("unknown event type", code="unknown_event_type", param="type")
            await handler(message, stream_id)
        except RefusedError as refusal:
            await self._refuse(refusal, stream_id)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _create(self, message: Mapping[str, Any], stream_id: str | None) -> None:
        if len(self._tasks) >= _MAX_IN_FLIGHT:
            raise RefusedError(
                f"at most {_MAX_IN_FLIGHT} responses may be in flight on a connection",
                code="websocket_stream_limit_reached",
                param="stream_id",
                status=429,
            )
        body = {name: value for name, value in message.items() if name not in ("type", "stream_id")}
        self._start(self._respond(body, stream_id))

    async def _cancel(self, message: Mapping[str, Any], stream_id: str | None) -> None:
        response_id = message.get("response_id") or self._lanes[stream_id].response_id
        self._answers.find(str(response_id))
        self._answers.readings.cancel(str(response_id))

    async def _resume(self, message: Mapping[str, Any], stream_id: str | None) -> None:
        response_id, after = str(message.get("response_id")), message.get("starting_after", -1)
        plan = StreamPlan.from_id(response_id)
        if not isinstance(after, int):
            raise RefusedError("must be a number", code="invalid_type", param="starting_after")
        event = {"type": "penstock.recovered", "response_id": response_id}
        await self._tell({**event, "recovered": plan is not None}, stream_id)
        if plan is not None:
            self._start(self._play(plan, stream_id, after=after))

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _respond(self, body: Mapping[str, Any], stream_id: str | None) -> None:
        lane = self._lanes[stream_id]
        async with lane.turn:
            try:
                plan, asked = self._answers.plan(Endpoint.RESPONSES, body)
            except RefusedError as refusal:
                await self._refuse(refusal, stream_id)
                return
            lane.response_id = plan.response_id()
            await self._play(plan, stream_id, fault=self._answers.fault_for(asked))

    async def _play(
        self,
        plan: StreamPlan,
        stream_id: str | None,
        *,
        after: int = -1,
        fault: Fault | None = None,
    ) -> None:
        model = self._answers.settings.model
        frames = Events(plan, model, is_socket=True, stream_id=stream_id)
        readings = self._answers.readings
        player = Player(plan, frames, self._outlet, readings=readings, fault=fault)
        with readings.open(plan.response_id()) as reading:
            await player.play(reading, after=after)

    async def _refuse(self, refusal: RefusedError, stream_id: str | None) -> None:
        await self._tell({"type": "error", "status": refusal.status, **refusal.body()}, stream_id)

    async def _tell(self, event: Mapping[str, Any], stream_id: str | None) -> None:
        lane = {} if stream_id is None else {"stream_id": stream_id}
        await self._outlet.send([orjson.dumps({**event, **lane})])
