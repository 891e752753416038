"""Many responses at once on one WebSocket, for both clients.

    with client.connect() as socket:
        first = socket.create(model="demo", input="One.")
        second = socket.create(model="demo", input="Two.")
        print(first.final(), second.final())

`Link` assigns events to lanes, one per response, and reconnects. A reader without an event receives
one message under the socket's lock and files it under its lane, whichever that is. After a lost
connection the first reader that notices reconnects, and resumes every unfinished response after its
last event. Responses that are not being read lose nothing: their events are kept here, at most one
response's worth each.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, Self, Unpack

from .errors import ConnectionLostError, PenstockError, ProtocolError, refused
from .event_stream import EventStream
from .operation import AsyncRunner, R, Resource, SyncRunner, operation
from .output_format import OutputFormat, OutputType
from .parameters import Messages, ToolResponseParams, body_of
from .server import Server, error_of, json_text
from .sources import Event, leaves_a_turn, parse_event
from .steps import Close, Locked, Send, Steps, read_text
from .track import Track, successor_of


class ResponsesSocket(Resource[R], Generic[R]):
    """A WebSocket that connects on first use, and reconnects after a lost connection.

    The server runs at most 16 responses of a WebSocket at a time and queues 16 more. Further ones
    wait here: `create` returns when one of those has ended. Different threads or tasks may read
    its streams.
    """

    def __init__(self, runner: R, server: Server) -> None:
        super().__init__(runner)
        self._server = server
        self._link = Link(server, runner.new_lock())

    @operation
    def create(
        self,
        *,
        model: str,
        input: str | Messages | None = None,  # noqa: A002 (OpenAI's name)
        generate: bool | None = None,
        text_format: OutputType | None = None,
        **params: Unpack[ToolResponseParams],
    ) -> Steps[EventStream[R]]:
        """Request a response, and return its stream.

        Args:
            generate: false only computes the prompt, without an answer.
            text_format: what the stream's `final` parses its output as.
        """
        body = body_of(params, model=model, input=input, generate=generate)
        output_format = None if text_format is None else OutputFormat(text_format)
        if output_format is not None:
            body["text"] = output_format.text(body.get("text"))
        return (yield from self._stream(body, Track(), output_format).begin())

    @operation
    def follow(
        self, response_id: str, *, starting_after: int = -1, text_format: OutputType | None = None
    ) -> Steps[EventStream[R]]:
        """The events of an existing response, after an event's number. `text_format` is the one
        that was requested."""
        output_format = None if text_format is None else OutputFormat(text_format)
        track = Track(response_id, starting_after=starting_after)
        return (yield from self._stream(None, track, output_format).begin())

    @operation
    def close(self) -> Steps[None]:
        """Close the socket; its streams then end with `ConnectionLostError`."""
        yield from self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self: ResponsesSocket[SyncRunner], *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self: ResponsesSocket[AsyncRunner], *_: object) -> None:
        await self.close()

    def _stream(
        self, body: Mapping[str, Any] | None, track: Track, output_format: OutputFormat | None
    ) -> EventStream[R]:
        lane = self._link.lane(body, track)
        return EventStream(self._runner, lane, self._server.retries, output_format)


# The server's limits (`PROTOCOL.md`).
MAX_LANES = 32
_LATE = ("response.steer.pending", "response.steer.failed")  # after the terminal event
MAX_MESSAGE_BYTES = 1 << 20


class Link:
    """The current connection, with its lanes.

    Args:
        lock: from the runner; held while reading the socket or reconnecting.
    """

    def __init__(self, server: Server, lock: object) -> None:
        self.lock = lock
        self.generation = 0  # number of connections so far
        self.is_closed = False
        self.num_received = 0
        self.server = server
        self._socket: Any = None
        self._lanes: dict[str, LaneSource] = {}

    @property
    def is_up(self) -> bool:
        return self._socket is not None

    def lane(self, body: Mapping[str, Any] | None, track: Track) -> LaneSource:
        """A lane for a response; see `LaneSource`."""
        return LaneSource(self, body, track)

    def free(self, lane: LaneSource) -> None:
        """Release the lane's name for reuse: the server has finished with it."""
        if self._lanes.get(lane.name) is lane:
            del self._lanes[lane.name]

    def join(self, lane: LaneSource) -> Steps[bool]:
        """Under the lock: request or resume the lane's response, connecting if necessary.

        Returns:
            Whether that is done; else all lanes are in use, and one more message was received.
        """
        if self.is_closed:
            raise ConnectionLostError("the socket was closed")
        if self._socket is None:
            self._socket = yield from self.server.dial()
            self.generation += 1
            for other in list(self._lanes.values()):
                if other is not lane and other.is_under_way:
                    yield from self._begin(other)
        if lane.generation != self.generation:
            if len(self._lanes) >= MAX_LANES and self._lanes.get(lane.name) is not lane:
                yield from self._receive()
                return False
            yield from self._begin(lane)
        return True

    def pump(self, lane: LaneSource) -> Steps[None]:
        """Under the lock: receive one message, unless another reader has meanwhile received one
        for this lane or lost the connection."""
        if lane.has_some or self._socket is None or lane.generation != self.generation:
            return
        yield from self._receive()

    def send(self, text: str) -> Steps[None]:
        if self._socket is None:
            raise ConnectionLostError("the socket is not connected")
        yield Send(self._socket, text)

    def close(self) -> Steps[None]:
        self.is_closed = True
        yield from self._drop()

    def _begin(self, lane: LaneSource) -> Steps[None]:
        if self._lanes.get(lane.name) is not lane:
            names = (f"r{number}" for number in itertools.count())
            lane.name = next(name for name in names if name not in self._lanes)
        text = json_text(lane.opening())
        if len(text.encode()) > MAX_MESSAGE_BYTES:  # the server would close the connection of all
            message = f"the message is larger than {MAX_MESSAGE_BYTES} bytes"
            raise refused(413, {"message": message, "code": "request_too_large"})
        self._lanes[lane.name] = lane
        lane.generation = self.generation
        try:
            yield from self.send(text)
        except ConnectionLostError:
            yield from self._drop()
            raise

    def _drop(self) -> Steps[None]:
        socket, self._socket = self._socket, None
        for lane in list(self._lanes.values()):
            if not lane.is_under_way:
                self.free(lane)
        if socket is not None:
            yield Close(socket)

    def _receive(self) -> Steps[None]:
        try:
            text = yield from read_text(self._socket)
        except ConnectionLostError:
            yield from self._drop()
            raise
        self._file(parse_event(text))

    def _file(self, event: Event) -> None:
        self.num_received += "sequence_number" in event
        lane = self._lanes.get(event.get("stream_id", ""))
        if lane is not None:
            lane.take(event)
        # Any other event concerns the connection, which the server is about to close.


class LaneSource:
    """Events of one response, on a lane of a link: a `Source`.

    Args:
        body: of the request; None: the response exists already, and `track` has its id.
    """

    def __init__(self, link: Link, body: Mapping[str, Any] | None, track: Track) -> None:
        self.track = track
        self.is_repeatable = body is None or not leaves_a_turn(body)
        self.is_kept = body is None or body.get("store", True)
        self.generation = 0  # of the connection on which it was requested; 0: none
        self.is_abandoned = False
        self._link = link
        self.server = link.server
        self.name = ""  # none yet
        self._body = body
        self._ready: deque[Event | PenstockError] = deque()

    @property
    def num_received(self) -> int:
        """Events received on all lanes of the connection."""
        return self._link.num_received

    @property
    def is_open(self) -> bool:
        """Whether events may still come, such as unread ones of a lost connection."""
        return self.has_some or self._is_current

    @property
    def _is_current(self) -> bool:
        """Whether its connection is up."""
        return 0 < self.generation == self._link.generation and self._link.is_up

    @property
    def has_some(self) -> bool:
        return bool(self._ready)

    @property
    def is_under_way(self) -> bool:
        """Whether to resume it on a new connection."""
        can_resume = self.is_kept and self.track.is_resumable
        has_begun = self.track.response_id is not None and can_resume
        is_refused = any(isinstance(item, PenstockError) for item in self._ready)
        return has_begun and not (self.track.is_ended or self.is_abandoned or is_refused)

    def opening(self) -> dict[str, Any]:
        """The message that requests or resumes the response."""
        if self.track.response_id is None:
            return {"type": "response.create", **(self._body or {}), "stream_id": self.name}
        return {
            "type": "penstock.resume",
            "response_id": self.track.response_id,
            "starting_after": self.track.last_number,
            "stream_id": self.name,
        }

    def take(self, event: Event) -> None:
        """Process an event of this lane."""
        if event["type"] in _LATE and event["sequence_number"] != self.track.last_number + 1:
            return  # of the response that had this lane before
        if event["type"] == "error":
            if self.track.response_id is None:
                self._link.free(self)
            self._refuse(error_of(event))
        elif event["type"] == "penstock.recovered":
            if not event["recovered"]:
                self._link.free(self)
                self._refuse(refused(404, event.get("error")))
        else:
            self._take_own(event)

    def _take_own(self, event: Event) -> None:
        try:
            is_new = self.track.take(event)
        except ProtocolError as error:  # for its own reader, not for the one that received it
            self._refuse(error)
            return
        if is_new and not self.is_abandoned:
            self._ready.append(event)
        if is_new and (successor := successor_of(event)) is not None:
            self.track = Track(successor)  # the server goes on with it on this lane
        elif self.track.is_ended:
            self._link.free(self)

    def open(self) -> Steps[None]:
        while not (yield Locked(self._link.lock, self._link.join(self))):
            pass

    def next(self) -> Steps[Event]:
        while not self._ready:
            if not self.is_open:
                raise ConnectionLostError("the connection to the server broke")
            yield Locked(self._link.lock, self._link.pump(self))
        item = self._ready.popleft()
        if isinstance(item, PenstockError):
            self.generation = 0
            raise item
        return item

    def give_up(self) -> Steps[None]:
        """Does nothing: the link handles its connection, which others share."""
        yield from ()

    def succeed(self, response_id: str) -> Steps[None]:  # noqa: ARG002 (it was told before)
        """Does nothing: the lane has gone on already."""
        yield from ()

    def close(self) -> Steps[None]:
        self._ready.clear()
        self.is_abandoned = True
        if self.track.is_ended or self.generation == 0 or not self._link.is_up:
            self._link.free(self)
        yield from ()

    def cancel(self) -> Steps[bool]:
        message = {"type": "penstock.cancel", "response_id": self.track.response_id}
        for is_last in (False, True):
            try:
                if not self._is_current:  # else a reader may hold the lock until the next event
                    yield from self.open()
                yield from self._link.send(json_text(message))
            except ConnectionLostError:
                if is_last:
                    raise
            else:
                break
        return True

    def _refuse(self, error: PenstockError) -> None:
        if self.is_abandoned:
            self._link.free(self)
        else:
            self._ready.append(error)
