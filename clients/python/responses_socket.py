"""Many responses side by side on one WebSocket, for both clients.

    with client.connect() as socket:
        first = socket.create(model="demo", input="One.")
        second = socket.create(model="demo", input="Two.")
        print(first.final(), second.final())

`Link` knows whose event one is, and what becomes of all when the connection breaks. Any reader that
has no event of its own receives one message for everybody, under the socket's lock, and files it
under its lane. After a break the first reader that notices dials again, and has every response that
is still under way resumed behind the last event that came of it. Nothing is lost of those that
nobody reads just now; their events wait here, at most one response's worth each.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, Self, Unpack

from .errors import ConnectionLostError, PenstockError, ProtocolError, refused
from .event_stream import EventStream
from .operation import AsyncRunner, R, Resource, SyncRunner, operation
from .parameters import Messages, ResponseParams, body_of
from .server import Server, error_of, json_text
from .sources import Event, leaves_a_turn, parse_event
from .steps import Close, Locked, Send, Steps, read_text
from .track import Track


class ResponsesSocket(Resource[R], Generic[R]):
    """A WebSocket that connects when it is needed, and again when it was lost.

    The server runs at most 16 responses of one at a time, and 16 more wait there. Further ones wait
    here: `create` returns when one of those has ended.
    Its streams may be read by different threads or tasks.
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
        **params: Unpack[ResponseParams],
    ) -> Steps[EventStream[R]]:
        """Ask for a response. Its events come as the result is read.

        Args:
            generate: false prepares the prompt and answers nothing.
        """
        body = body_of(params, model=model, input=input, generate=generate)
        return (yield from self._stream(body, Track()).begin())

    @operation
    def follow(self, response_id: str, *, starting_after: int = -1) -> Steps[EventStream[R]]:
        """The events of a response that is there already, from behind a number."""
        track = Track(response_id, starting_after=starting_after)
        return (yield from self._stream(None, track).begin())

    @operation
    def close(self) -> Steps[None]:
        """Its streams end with `ConnectionLostError` then."""
        yield from self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self: ResponsesSocket[SyncRunner], *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self: ResponsesSocket[AsyncRunner], *_: object) -> None:
        await self.close()

    def _stream(self, body: Mapping[str, Any] | None, track: Track) -> EventStream[R]:
        return EventStream(self._runner, self._link.lane(body, track), self._server.retries)


# The server's limits (`PROTOCOL.md`).
MAX_LANES = 32
MAX_MESSAGE_BYTES = 1 << 20


class Link:
    """The connection, whichever it is just now.

    Args:
        lock: of the runner's; whoever reads the socket or makes another has it.
    """

    def __init__(self, server: Server, lock: object) -> None:
        self.lock = lock
        self.generation = 0  # how many connections there were
        self.is_closed = False
        self.num_received = 0
        self._server = server
        self._socket: Any = None
        self._lanes: dict[str, LaneSource] = {}

    @property
    def is_up(self) -> bool:
        return self._socket is not None

    def lane(self, body: Mapping[str, Any] | None, track: Track) -> LaneSource:
        """A lane for a response; see `LaneSource`."""
        return LaneSource(self, body, track)

    def free(self, lane: LaneSource) -> None:
        """Its name may be used again: the server is done with it."""
        if self._lanes.get(lane.name) is lane:
            del self._lanes[lane.name]

    def join(self, lane: LaneSource) -> Steps[bool]:
        """Under the lock: have the lane's response asked for, or resumed, on a connection that
        is up.

        Returns:
            Whether it is; else all lanes are taken, and one message more has come of them.
        """
        if self.is_closed:
            raise ConnectionLostError("the socket was closed")
        if self._socket is None:
            self._socket = yield from self._server.dial()
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
        """Under the lock: receive one message, unless another reader has brought the lane's or
        lost the connection meanwhile."""
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
        if len(text.encode()) > MAX_MESSAGE_BYTES:  # it would cost all others their connection
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
        # Anything else is about the connection, which is about to be closed then.


class LaneSource:
    """Events of one response, on a lane of a link: a `Source`.

    Args:
        body: of the question; None: the response is there already, and `track` says which.
    """

    def __init__(self, link: Link, body: Mapping[str, Any] | None, track: Track) -> None:
        self.track = track
        self.is_repeatable = body is None or not leaves_a_turn(body)
        self.is_kept = body is None or body.get("store", True)
        self.generation = 0  # of the connection on which it was begun; 0: none
        self.is_abandoned = False
        self._link = link
        self.name = ""  # none yet
        self._body = body
        self._ready: deque[Event | PenstockError] = deque()

    @property
    def num_received(self) -> int:
        """By all that share the connection."""
        return self._link.num_received

    @property
    def is_open(self) -> bool:
        """Also when its connection has gone, but what came over it was not read yet."""
        is_current = self.generation == self._link.generation and self._link.is_up
        return self.has_some or (self.generation > 0 and is_current)

    @property
    def has_some(self) -> bool:
        return bool(self._ready)

    @property
    def is_under_way(self) -> bool:
        """Whether a new connection should bring the rest, unasked."""
        has_begun = self.track.response_id is not None and self.is_kept
        is_refused = any(isinstance(item, PenstockError) for item in self._ready)
        return has_begun and not (self.track.is_ended or self.is_abandoned or is_refused)

    def opening(self) -> dict[str, Any]:
        """The message that begins it, or goes on."""
        if self.track.response_id is None:
            return {"type": "response.create", **(self._body or {}), "stream_id": self.name}
        return {
            "type": "penstock.resume",
            "response_id": self.track.response_id,
            "starting_after": self.track.last_number,
            "stream_id": self.name,
        }

    def take(self, event: Event) -> None:
        """An event of this lane has come."""
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
        except ProtocolError as error:  # its own reader is to know, not the one that received it
            self._refuse(error)
            return
        if is_new and not self.is_abandoned:
            self._ready.append(event)
        if self.track.is_ended:
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
        """The link sees to its connection; others read from it."""
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
