"""A WebSocket whose lanes an actor drives by hand: create, cancel, resume, and send nonsense.

Not known here: what an actor wants with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from penstock.load.client.bodies import body_of
from penstock.load.client.integrity import ResponseCheck
from penstock.load.client.records import Call, Fault, StreamRecord

# How a stream may end that was cancelled, perhaps too late.
ENDS = ("cancelled", "max_output_tokens")
_CLOSE_S = 1.0


class Lane:
    """One stream on a lane.

    Attributes:
        heard: set whenever an event has come.
        ended: set at the terminal event, or when the socket is lost.
        num_events: that have come.
        last_number: the highest sequence number that came.
        recovered: what the server answered to a resume; None: nothing yet.
    """

    def __init__(self, check: ResponseCheck) -> None:
        self.check = check
        self.heard = asyncio.Event()
        self.ended = asyncio.Event()
        self.num_events = 0
        self.last_number = -1
        self.recovered: bool | None = None

    @property
    def record(self) -> StreamRecord:
        return self.check.record

    def take(self, event: dict[str, Any]) -> None:
        if "recovered" in event:
            self.recovered = event["recovered"]
        else:
            self.num_events += 1
            self.last_number = max(self.last_number, event.get("sequence_number", -1))
            self.check.take_event(event, time.perf_counter())
        self.heard.set()
        if self.check.is_ended:
            self.ended.set()


class LaneSocket:
    """
    Attributes:
        errors: error events that name no lane of ours.
        is_lost: the connection has ended.
    """

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        self.errors: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.is_lost = False
        self._websocket = websocket
        self._lanes: dict[str, Lane] = {}
        self._reader: asyncio.Task[None] | None = None

    def read(self) -> None:
        """Begin to read. Until then nothing is taken from the socket."""
        self._reader = asyncio.create_task(self._read())

    async def create(self, name: str, body: dict[str, Any], lane: Lane) -> None:
        self._lanes[name] = lane
        lane.record.sent_s = time.perf_counter()
        await self.send({**body, "type": "response.create", "stream_id": name})

    async def resume(self, name: str, response_id: str, lane: Lane) -> None:
        """Have a stream that another socket carried go on here."""
        self._lanes[name] = lane
        await self.send(
            {
                "type": "penstock.resume",
                "response_id": response_id,
                "starting_after": lane.last_number,
                "stream_id": name,
            }
        )

    async def send(self, message: dict[str, Any] | str) -> None:
        text = message if isinstance(message, str) else orjson.dumps(message).decode()
        with contextlib.suppress(aiohttp.ClientError, OSError):  # the reader tells of it
            await self._websocket.send_str(text)

    def drop(self) -> None:
        """Leave without a word."""
        connection: socket.socket | None = self._websocket.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError):  # it has gone already
                connection.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        await self._websocket.close()
        if self._reader is not None:
            await self._reader

    async def _read(self) -> None:
        async for message in self._websocket:
            if message.type is aiohttp.WSMsgType.TEXT:
                event = orjson.loads(message.data)
                lane = self._lanes.get(event.get("stream_id"))
                if lane is None:
                    self.errors.put_nowait(event)
                else:
                    lane.take(event)
        self.is_lost = True
        for lane in self._lanes.values():
            lane.heard.set()
            lane.ended.set()


@contextlib.asynccontextmanager
async def open_socket(http: aiohttp.ClientSession) -> AsyncIterator[LaneSocket]:
    """A socket that is not read yet.

    Raises:
        aiohttp.ClientError: the server does not take it.
    """
    websocket = await http.ws_connect(
        "/v1/responses", timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S), max_msg_size=0
    )
    lanes = LaneSocket(websocket)
    try:
        yield lanes
    finally:
        await lanes.close()


def socket_body(call: Call) -> dict[str, Any]:
    """What `response.create` says beside its type."""
    body = body_of("responses", call)
    del body["stream"]
    return body


def unended(lane: Lane) -> None:
    """Note in its record that a stream never came to its end."""
    if not lane.check.is_ended:
        lane.check.fail(Fault.CUT, "the socket ended before the stream", time.perf_counter())
