"""Where the events of one response come from, for the state machine in `event_stream`.

`SseSource` uses HTTP: the first connection is the POST with the request, each later one a GET that
continues after the last event's number. `responses_socket.LaneSource` is one lane of a WebSocket.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from .errors import ConnectionLostError, ProtocolError
from .server import Server, error_of
from .sse import ServerSentEvent, SseParser
from .steps import Close, Steps, read_bytes
from .track import Track

Event = Mapping[str, Any]


class Source(Protocol):
    """Events of one response.

    Attributes:
        track: of the events received.
        is_open: there is a connection to read from.
        is_repeatable: the request may be sent again if it is unclear whether it arrived.
        is_kept: the server keeps the events, so the stream can be resumed.
    """

    track: Track
    server: Server
    is_repeatable: bool
    is_kept: bool

    @property
    def num_received(self) -> int:
        """Grows with everything received, to show that the connection works."""
        ...

    @property
    def is_open(self) -> bool: ...

    def open(self) -> Steps[None]:
        """Request the response, or resume it. Raises: PenstockError."""
        ...

    def next(self) -> Steps[Event]:
        """The next new event. Raises: PenstockError."""
        ...

    def give_up(self) -> Steps[None]:
        """Give up this connection: `is_open` is then false, unless another reader shares it."""
        ...

    def succeed(self, response_id: str) -> Steps[None]:
        """Go on with the successor of the response, which has ended."""
        ...

    def close(self) -> Steps[None]:
        """Stop reading for good."""
        ...

    def cancel(self) -> Steps[bool]:
        """Stop the response, whose id must be known. False: no more events will arrive."""
        ...


class SseSource:
    """Over HTTP.

    Args:
        body: of the request; None: the response exists already, and `track` has its id.
    """

    def __init__(self, server: Server, body: Mapping[str, Any] | None, track: Track) -> None:
        self.track = track
        self.is_repeatable = body is None or not leaves_a_turn(body)
        self.is_kept = body is None or body.get("store", True)
        self.server = self._server = server
        self._body = body
        self._stream: Any = None
        self._parser = SseParser()
        self._ready: deque[ServerSentEvent] = deque()

    @property
    def num_received(self) -> int:
        return self.track.last_number

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    def open(self) -> Steps[None]:
        self._parser = SseParser()
        self._ready.clear()
        if self.track.response_id is None:
            body = {**(self._body or {}), "stream": True}
            request = self._server.request("POST", "/responses", body=body)
        else:
            query: dict[str, str | int | None]
            query = {"stream": "true", "starting_after": self.track.last_number}
            path = f"/responses/{self.track.response_id}"
            request = self._server.request("GET", path, query=query)
        answer = yield from self._server.once(replace(request, is_stream=True))
        self._stream = answer.stream

    def next(self) -> Steps[Event]:
        while True:
            while not self._ready:
                data = yield from read_bytes(self._stream)
                if not data:
                    raise ConnectionLostError("the stream ended without a terminal event")
                self._ready += self._parser.feed(data)
            event = parse_event(self._ready.popleft().data)
            if event["type"] == "error":
                raise error_of(event)
            if self.track.take(event):
                return event

    def give_up(self) -> Steps[None]:
        stream, self._stream = self._stream, None
        if stream is not None:
            yield Close(stream)

    def succeed(self, response_id: str) -> Steps[None]:
        self.track = Track(response_id)
        yield from self.give_up()

    def close(self) -> Steps[None]:
        yield from self.give_up()

    def cancel(self) -> Steps[bool]:
        if not self.is_kept:  # it ends when its reader disconnects
            yield from self.close()
            return False
        path = f"/responses/{self.track.response_id}/cancel"
        yield from self._server.carry_through(self._server.request("POST", path))
        return True


def parse_event(text: str) -> Event:
    """Raises: ProtocolError."""
    event = parse_json(text)
    if not isinstance(event.get("type"), str):
        raise ProtocolError(f"this is no event: {text[:100]!r}")
    return event


def parse_json(text: str) -> dict[str, Any]:
    """An object. Raises: ProtocolError."""
    try:
        told = json.loads(text)
    except ValueError:
        told = None
    if not isinstance(told, dict):
        raise ProtocolError(f"this is no JSON object: {text[:100]!r}")
    return told


def leaves_a_turn(body: Mapping[str, Any]) -> bool:
    """Whether a repeated request would have an effect: a conversation would get the turn twice."""
    return body.get("conversation") is not None
