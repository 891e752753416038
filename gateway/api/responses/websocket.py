"""The Responses WebSocket mode: many responses on one socket, one JSON event per message.

    client → response.create {…, stream_id?} · response.steer {previous_response_id, input} ·
             penstock.resume {response_id, starting_after?, stream_id?} ·
             penstock.cancel {response_id | stream_id} · penstock.drop_prefix {response_id} ·
             penstock.ping
    server → the events of `events`, with `stream_id` where one was given ·
             penstock.recovered · penstock.prefix_dropped · penstock.pong · error

`PROTOCOL.md` specifies them. Responses of one lane (`stream_id`) run one after the other; different
lanes run in parallel, up to a limit. One task always receives, so a cancel is read while tokens are
sent. Nothing is queued for a slow reader: each lane waits for the socket, then continues from its
position in the log. After a response that was steered a lane goes on with its successor.
"""

from __future__ import annotations

import asyncio
import enum
import re
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import orjson
from starlette.websockets import WebSocket, WebSocketDisconnect

from penstock.gateway.api.responses.events import Event
from penstock.gateway.api.responses.prompt import LaneMemory
from penstock.gateway.api.responses.schema import SocketRequest
from penstock.gateway.api.responses.service import ResponseService
from penstock.gateway.api.responses.steering import new_steer_id, steer_error
from penstock.gateway.api.responses.subscriber import Subscriber, check_start, starting_after_of
from penstock.gateway.api.schema.parsing import parse_json, parse_request
from penstock.gateway.api.shared.json_api import parsed
from penstock.gateway.auth.callers import caller_of
from penstock.gateway.auth.guard import KEY_SUBPROTOCOL
from penstock.gateway.errors import RequestRefusedError, failure_of
from penstock.gateway.http.raw_writer import raw_writer_of
from penstock.gateway.storage.conversations.records import StoredTurn
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.telemetry.request_record import told

MAX_IN_FLIGHT = 16
MAX_OPEN = 64  # in flight and waiting
MAX_LANES = 32  # with a name (`stream_id`)
MAX_AGE_S = 3600.0
_Message = Mapping[str, Any]
_STEER_FIELDS = frozenset({"type", "previous_response_id", "input"})
_LANE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,256}")


class ResponsesSocket:
    """The endpoint; makes a `Connection` per WebSocket."""

    def __init__(self, service: ResponseService, *, max_age_s: float = MAX_AGE_S) -> None:
        self._service = service
        self._max_age_s = max_age_s

    async def serve(self, websocket: WebSocket) -> None:
        await websocket.accept(subprotocol=accepted_subprotocol(websocket.scope["subprotocols"]))
        connection = Connection(websocket, self._service)
        try:
            async with asyncio.timeout(self._max_age_s):
                await connection.run()
        except WebSocketDisconnect:
            pass
        except TimeoutError:
            await connection.expire()
        finally:
            await connection.close()


def accepted_subprotocol(offered: list[str]) -> str | None:
    """The subprotocol to accept, preferably one that carries no key. A browser closes the
    connection unless the server accepts one that it offered."""
    return next((name for name in offered if not name.startswith(KEY_SUBPROTOCOL)), None) or next(
        iter(offered), None
    )


class Connection:
    """One client's socket and the responses on it."""

    __slots__ = (
        "_lanes",
        "_remembered_turns",
        "_service",
        "_steers",
        "_websocket",
        "caller",
        "in_flight",
        "writer",
    )

    def __init__(self, websocket: WebSocket, service: ResponseService) -> None:
        self.caller = caller_of(websocket.scope)
        self._websocket = websocket
        writer = raw_writer_of(websocket.scope)
        assert writer is not None, "the server has no RawWriter"
        self.writer = writer
        self._service = service
        self._lanes: dict[str | None, Lane] = {}
        self._remembered_turns: dict[str | None, StoredTurn] = {}  # `store: false`, by lane
        self.in_flight = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._steers: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Handle messages until the client disconnects."""
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                return
            await self._handle(message.get("text") or message.get("bytes") or b"")

    async def close(self) -> None:
        """The client is gone: stop reading. Stored responses continue for their grace time."""
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        tasks += self._steers  # what was asked for may still be accepted
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Lane and task refer to each other; break the cycle instead of waiting for the collector.
        for lane in self._lanes.values():
            lane.task = None
        self._lanes.clear()

    async def expire(self) -> None:
        """The connection has reached its age limit; its streams can be resumed on another."""
        limit = RequestRefusedError(
            "this connection has reached its age limit; open a new one",
            code="websocket_connection_limit_reached",
        )
        await self.send(_error_event(limit))
        await self._websocket.close(1000)

    async def send(self, event: _Message) -> None:
        await self.send_text(orjson.dumps(event))

    async def send_text(self, text: bytes) -> None:
        if not self.writer.write(text):
            await self.writer.drained()

    async def _handle(self, data: str | bytes) -> None:
        stream_id = None
        try:
            message = parse_json(data)
            stream_id = _stream_id_of(message)
            kind = message.get("type")
            handler = _HANDLERS.get(kind) if isinstance(kind, str) else None
            if handler is None:
                raise RequestRefusedError(
                    f"unknown event type {kind!r}; supported: {', '.join(_HANDLERS)}",
                    code="unknown_event_type",
                    param="type",
                )
            await handler(self, message, stream_id)
        except WebSocketDisconnect:
            raise
        except Exception as error:  # one bad message must not end the connection's other streams
            await self.send(_error_event(error, stream_id))

    async def _create(self, message: _Message, stream_id: str | None) -> None:
        body = {k: v for k, v in message.items() if k not in ("type", "stream_id")}
        lane = self._lane(stream_id)
        lane.add(lambda: self._begin(lane, body))

    async def _begin(self, lane: Lane, body: dict[str, Any]) -> Subscriber:
        continued = body.get("previous_response_id")
        memory = LaneMemory(self._remembered_turns, lane.stream_id, continued)
        try:
            request = await parsed(self._service.paced_work, SocketRequest, body, parse_request)
            task = await self._service.create(request, self.caller, memory=memory, body=body)
        except Exception:
            memory.forget_continued()
            raise
        lane.log = task.log
        lane.notices = request.penstock.events
        return Subscriber(task.log, notices=lane.notices)

    async def _resume(self, message: _Message, stream_id: str | None) -> None:
        response_id = _response_id_of(message, "penstock.resume")
        after = _starting_after_of(message)
        lane = self._lane(stream_id)
        lane.add(lambda: self._follow(lane, response_id, after=after))

    async def _follow(self, lane: Lane, response_id: str, *, after: int) -> Subscriber | None:
        event = {"type": "penstock.recovered", "response_id": response_id}
        try:
            lane.log = await self._service.resume(self.caller, response_id)
        except RequestRefusedError as error:
            failed = {"recovered": False, "error": told(failure_of(error))["error"]}
            await self.send(_on_lane({**event, **failed}, lane.stream_id))
            return None
        lane.notices = ()
        check_start(after, lane.log)
        await self.send(_on_lane({**event, "recovered": True}, lane.stream_id))
        return Subscriber(lane.log, after=after)

    def _lane(self, stream_id: str | None) -> Lane:
        """The lane for another response.

        Raises:
            RequestRefusedError: the connection has reached its limit.
        """
        if sum(lane.num_open for lane in self._lanes.values()) >= MAX_OPEN:
            raise _limit_reached(
                f"a connection may have at most {MAX_OPEN} running and queued responses"
            )
        if stream_id not in self._lanes:
            if stream_id is not None and len(self._lanes.keys() - {None}) >= MAX_LANES:
                raise _limit_reached(f"a connection may use at most {MAX_LANES} stream ids")
            self._lanes[stream_id] = Lane(self, stream_id=stream_id)
        return self._lanes[stream_id]

    async def _cancel(self, message: _Message, stream_id: str | None) -> None:
        if message.get("response_id") is None and stream_id is not None:
            lane = self._lanes.get(stream_id)
            if lane is None:
                return  # the response may have ended while the cancel was on its way
        else:
            response_id = _response_id_of(message, "penstock.cancel")
            lane = next((lane for lane in self._lanes.values() if lane.reads(response_id)), None)
            if lane is None:
                await self._service.cancel(self.caller, response_id)
                return
        if lane.log is None or lane.log.run is not None:
            lane.cancel()
        elif not lane.log.is_ended:  # it runs on another gateway
            await self._service.cancel(self.caller, lane.log.header.response_id)

    async def successor(self, log: ResponseLog) -> ResponseLog | None:
        """See `ResponseService.successor`."""
        return await self._service.successor(self.caller, log)

    async def _drop_prefix(self, message: _Message, stream_id: str | None) -> None:
        response_id = _response_id_of(message, "penstock.drop_prefix")
        await self._service.drop_prefix(self.caller, response_id)
        event = {"type": "penstock.prefix_dropped", "response_id": response_id}
        await self.send(_on_lane(event, stream_id))

    async def _ping(self, _: _Message, stream_id: str | None) -> None:
        await self.send(_on_lane({"type": "penstock.pong"}, stream_id))

    async def _steer(self, message: _Message, _: str | None) -> None:
        """Steer a response in a task of its own: it may take until another gateway has it."""
        if len(self._steers) >= MAX_OPEN:
            raise _limit_reached(f"a connection may have at most {MAX_OPEN} unanswered steers")
        task = asyncio.create_task(self._steer_now(message))
        self._steers.add(task)
        task.add_done_callback(self._steers.discard)

    async def _steer_now(self, message: _Message) -> None:
        response_id = message.get("previous_response_id")
        lane = next((lane for lane in self._lanes.values() if lane.reads(response_id)), None)
        steer_id = new_steer_id()
        try:
            for name in message:
                if name not in _STEER_FIELDS:
                    raise RequestRefusedError(
                        f"response.steer has no field {name!r}", code="invalid_input", param=name
                    )
            if not isinstance(response_id, str):
                raise RequestRefusedError(
                    "response.steer needs a previous_response_id",
                    code="invalid_input",
                    param="previous_response_id",
                )
            log = None if lane is None else lane.log
            value = message.get("input")
            told = await self._service.steer(self.caller, response_id, steer_id, value, log=log)
        except Exception as error:
            failed = {
                "type": "response.steer.failed",
                "sequence_number": 0,
                "error": steer_error(failure_of(error)),
                "steer": {
                    "input": message.get("input"),
                    "previous_response_id": response_id,
                },
            }
            await self.send(_on_lane(failed, None if lane is None else lane.stream_id))
            return
        if lane is None or not lane.has_read(response_id):  # otherwise its reader gets the event
            steer = {"id": told["id"], "previous_response_id": response_id}
            event = {"type": "response.steer.accepted", "sequence_number": 0, "steer": steer}
            await self.send(event)


_Begin = Callable[[], Awaitable[Subscriber | None]]
_Handler = Callable[[Connection, _Message, str | None], Awaitable[None]]
_HANDLERS: Mapping[str, _Handler] = {
    "response.create": Connection._create,
    "response.steer": Connection._steer,
    "penstock.resume": Connection._resume,
    "penstock.cancel": Connection._cancel,
    "penstock.drop_prefix": Connection._drop_prefix,
    "penstock.ping": Connection._ping,
}


class _Work(enum.Enum):
    """What a lane does."""

    NOTHING = "nothing"
    PREPARING = "preparing"  # its response has no log yet
    CANCELLED = "cancelled"  # while it was still being prepared
    READING = "reading"


class Lane:
    """A sequence of responses that run one after the other. It has a task while it has work.

    Attributes:
        log: of the response that is being read.
        notices: kinds of `penstock.*` events that its request asked for.
        last_id: of the response that was read before.
    """

    def __init__(self, connection: Connection, *, stream_id: str | None) -> None:
        self.stream_id = stream_id
        self.log: ResponseLog | None = None
        self.notices: Collection[str] = ()
        self.last_id = ""
        self.task: asyncio.Task[None] | None = None
        self._connection = connection
        self._waiting: deque[_Begin] = deque()
        self._work = _Work.NOTHING
        self._suffix = (
            None if stream_id is None else b',"stream_id":' + orjson.dumps(stream_id) + b"}"
        )

    @property
    def num_open(self) -> int:
        return len(self._waiting) + (self._work is not _Work.NOTHING)

    def add(self, begin: _Begin) -> None:
        """Queue a response. It begins only when the one before it has ended, as it may continue
        it."""
        if self._work is _Work.NOTHING:
            self._work = _Work.PREPARING
            self.task = asyncio.create_task(self._run(begin))
        else:
            self._waiting.append(begin)

    def has_read(self, response_id: object) -> bool:
        """Whether the lane reads a response, or has read it."""
        return response_id == self.last_id or self.reads(response_id)

    def reads(self, response_id: object) -> bool:
        return self.log is not None and self.log.header.response_id == response_id

    def cancel(self) -> None:
        """Stop the response that is running or about to; those queued behind it are kept."""
        if self.log is not None:
            self.log.cancel()
        elif self._work is _Work.PREPARING:
            self._work = _Work.CANCELLED

    async def _run(self, begin: _Begin | None) -> None:
        while begin is not None:
            try:
                async with self._connection.in_flight:
                    await self._send_response(begin)
            except WebSocketDisconnect:
                return
            except Exception as error:
                await self._connection.send(_error_event(error, self.stream_id))
            finally:
                self.log = None
                begin = self._waiting.popleft() if self._waiting else None
                self._work = _Work.NOTHING if begin is None else _Work.PREPARING

    async def _send_response(self, begin: _Begin) -> None:
        subscriber = await begin()
        if subscriber is None:
            return
        is_cancelled, self._work = self._work is _Work.CANCELLED, _Work.READING
        if is_cancelled:
            self.cancel()
        writer = self._connection.writer
        await subscriber.write_to(writer, self._labelled)
        while self.log is not None:
            self.last_id = self.log.response_id
            self.log = await self._connection.successor(self.log)
            if self.log is not None:
                await Subscriber(self.log, notices=self.notices).write_to(writer, self._labelled)

    def _labelled(self, events: Sequence[Event]) -> list[bytes]:
        """One message per event, with the `stream_id` if there is one."""
        if self._suffix is None:
            return [event.json for event in events]
        return [event.json[:-1] + self._suffix for event in events]


# -- fields of messages -----------------------------------------------------------------------


def _response_id_of(message: _Message, kind: str) -> str:
    response_id = message.get("response_id")
    if not isinstance(response_id, str):
        raise RequestRefusedError(
            f"{kind} needs a response_id",
            code="missing_required_parameter",
            param="response_id",
        )
    return response_id


def _starting_after_of(message: _Message) -> int:
    after = message.get("starting_after")
    return -1 if after is None else starting_after_of(after)


def _stream_id_of(message: _Message) -> str | None:
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


def _error_event(error: Exception, stream_id: str | None = None) -> dict[str, Any]:
    failure = failure_of(error)
    return _on_lane({"type": "error", "status": failure.status, **told(failure)}, stream_id)


def _on_lane(event: dict[str, Any], stream_id: str | None) -> dict[str, Any]:
    return event if stream_id is None else {**event, "stream_id": stream_id}


def _limit_reached(message: str) -> RequestRefusedError:
    return RequestRefusedError(message, code="websocket_stream_limit_reached", param="stream_id")
