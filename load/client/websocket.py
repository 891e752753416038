"""Calls over our WebSocket mode of `/v1/responses`: many streams on few sockets."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections import deque
from http import HTTPStatus
from typing import Any, Self

import aiohttp
import orjson

from penstock.load.client.integrity import ResponseCheck, StallTimer
from penstock.load.client.records import PATHS, Address, Call, Fault, StreamRecord, body_of

# A server allows 16 responses in flight on a socket. We use half, because a response that just
# ended may still count there.
LANES_PER_SOCKET = 8
_CLOSE_S = 1.0


class Lane:
    """One stream of a socket, or of several in turn if it is resumed.

    `heard` is set whenever an event has come; `ended` at the terminal event, or when the socket
    is lost. `recovered` is the server's answer to a resume; None before it.
    """

    def __init__(self, record: StreamRecord) -> None:
        self.check = ResponseCheck(record)
        self.heard = asyncio.Event()
        self.ended = asyncio.Event()
        self.num_events = 0
        self.last_number = -1
        self.recovered: bool | None = None

    @property
    def record(self) -> StreamRecord:
        return self.check.record

    def take(self, event: dict[str, Any], now_s: float) -> None:
        if "recovered" in event:
            self.recovered = event["recovered"]
        else:
            self.num_events += 1
            self.last_number = max(self.last_number, event.get("sequence_number", -1))
            self.check.take_event(event, now_s)
        self.heard.set()
        if self.check.is_ended:
            self.ended.set()


def socket_body(call: Call) -> dict[str, Any]:
    """The fields of `response.create` except its type. Raises ConfigError if it cannot be sent."""
    body = body_of("responses", call)
    del body["stream"]
    return body


class LaneSocket:
    """A WebSocket whose lanes tell its streams apart.

    `lost`: why the connection has ended; None while it is open. `errors` has the events of no
    lane of ours. `bytes_per_s`: it is not read faster.
    """

    def __init__(self, *, bytes_per_s: float = math.inf) -> None:
        self.lost: tuple[Fault, str] | None = None
        self.errors: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._bytes_per_s = bytes_per_s
        self._lanes: dict[str, Lane] = {}
        self._websocket: aiohttp.ClientWebSocketResponse[bool] | None = None
        self._reader: asyncio.Task[None] | None = None

    async def connect(self, session: aiohttp.ClientSession, url: str) -> None:
        """Raises aiohttp.ClientError if the server refuses it."""
        self._websocket = await session.ws_connect(
            url,
            timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
            max_msg_size=0,
            decode_text=False,
        )

    def read(self) -> None:
        """Start to read; before, nothing is taken from the socket."""
        self._reader = asyncio.create_task(self._read())

    async def create(self, name: str, body: dict[str, Any], lane: Lane) -> None:
        """Begin a stream on the lane of this name."""
        self._lanes[name] = lane
        lane.record.sent_s = lane.record.sent_s or time.perf_counter()
        await self.send({**body, "type": "response.create", "stream_id": name})

    async def resume(self, name: str, response_id: str, lane: Lane) -> None:
        """Continue a stream of another socket here."""
        self._lanes[name] = lane
        after = {"response_id": response_id, "starting_after": lane.last_number}
        await self.send({"type": "penstock.resume", **after, "stream_id": name})

    async def send(self, message: dict[str, Any] | str) -> None:
        assert self._websocket is not None
        data = message.encode() if isinstance(message, str) else orjson.dumps(message)
        with contextlib.suppress(aiohttp.ClientError, OSError):  # the reader notices
            await self._websocket.send_frame(data, aiohttp.WSMsgType.TEXT)

    def drop(self) -> None:
        """Break the connection."""
        assert self._websocket is not None
        connection: socket.socket | None = self._websocket.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError):  # it has gone already
                connection.shutdown(socket.SHUT_RDWR)

    async def close(self) -> None:
        if self._websocket is not None:
            await self._websocket.close()
        if self._reader is not None:
            await self._reader

    def lose(self, fault: Fault, detail: str) -> None:
        self.lost = fault, detail
        for lane in self._lanes.values():
            lane.heard.set()
            lane.ended.set()

    async def _read(self) -> None:
        assert self._websocket is not None
        while not self.lost:
            message = await self._websocket.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                self._take(message.data, time.perf_counter())
                if self._bytes_per_s < math.inf:
                    await asyncio.sleep(len(message.data) / self._bytes_per_s)
            elif message.type is aiohttp.WSMsgType.ERROR:
                self.lose(Fault.MALFORMED, f"not WebSocket: {message.data}")
            else:
                code = self._websocket.close_code
                self.lose(Fault.CUT, f"the socket was lost, code {code}")

    def _take(self, data: bytes, now_s: float) -> None:
        try:
            event = orjson.loads(data)
            lane = self._lanes[event["stream_id"]]
        except (KeyError, TypeError, ValueError):
            self._take_stray(data, now_s)
        else:
            lane.take(event, now_s)

    def _take_stray(self, data: bytes, _: float) -> None:
        self.errors.put_nowait(orjson.loads(data))


# -- a pool of them -------------------------------------------------------------------------------


class WebSocketTransport:
    """Runs calls on sockets to one server.

    A call takes the socket with the fewest streams; if all lanes are in use, another socket is
    opened. The streams of a lost socket are cut, and it is not used again. `stall_s` of silence is
    a fault.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None, stall_s: float = 60.0) -> None:
        address = Address.parse(base_url)
        scheme = "wss" if address.is_tls else "ws"
        self._url = f"{scheme}://{address.netloc}{address.prefix}{PATHS['responses']}"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._stall_s = stall_s
        self._sockets: list[_Socket] = []
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=None)
        )
        await self._open().opening  # calls report errors
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await asyncio.gather(*(socket.close() for socket in self._sockets))
        await self._session.close()

    async def stream(self, call: Call, record: StreamRecord) -> None:
        """Send a call and read its whole answer; if cancelled, cancel the response, since others
        share the socket. Raises ConfigError if the endpoint cannot take the call."""
        body = socket_body(call)
        record.sent_s = time.perf_counter()
        self._sockets = [socket for socket in self._sockets if not socket.lost]
        best = max(self._sockets, key=lambda socket: len(socket.free), default=None)
        await (best if best is not None and best.free else self._open()).stream(body, Lane(record))

    def _open(self) -> _Socket:
        assert self._session is not None, "used outside of its context"
        socket = _Socket(self._session, self._url, stall_s=self._stall_s)
        self._sockets.append(socket)
        return socket


class _Socket(LaneSocket):
    """One connection and its free lanes, the longest idle first; `opening` is done when it can be
    used or is lost."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, stall_s: float) -> None:
        super().__init__()
        self.free = deque(f"lane-{number}" for number in range(LANES_PER_SOCKET))
        self.opening = asyncio.create_task(self._open(session, url))
        self._status = int(HTTPStatus.SWITCHING_PROTOCOLS)
        self._stall_s = stall_s
        self._leaving: set[asyncio.Task[None]] = set()

    async def stream(self, body: dict[str, Any], lane: Lane) -> None:
        name, check = self.free.popleft(), lane.check

        def stall() -> None:
            check.fail(Fault.STALLED, f"no event for {self._stall_s:g} s", time.perf_counter())
            lane.ended.set()

        try:
            await asyncio.shield(self.opening)
        except asyncio.CancelledError:
            self.free.append(name)
            raise
        lane.record.status = self._status
        timer = StallTimer(check, stall_s=self._stall_s, on_stall=stall)
        try:
            if not self.lost:
                await self.create(name, body, lane)
                await lane.ended.wait()
            if self.lost and not check.is_ended:
                check.fail(*self.lost, time.perf_counter())
        finally:
            timer.cancel()
            check.settle()
            if check.is_ended and Fault.STALLED not in lane.record.faults:
                self.free.append(name)
            elif not self.lost:
                task = asyncio.create_task(self._leave(name))
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        self.opening.cancel()
        await asyncio.gather(self.opening, return_exceptions=True)
        await super().close()

    async def _open(self, session: aiohttp.ClientSession, url: str) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self.connect(session, url)
        except aiohttp.WSServerHandshakeError as error:
            self._status = error.status
            self.lose(Fault.REFUSED, error.message)
        except (aiohttp.ClientError, OSError) as error:
            self.lose(Fault.UNREACHABLE, str(error) or repr(error))
        else:
            self.read()

    async def _leave(self, name: str) -> None:
        """Cancel a stream; its lane is free once the server has ended it. Its record stays as it
        is."""
        lane = self._lanes[name] = Lane(StreamRecord(scheduled_s=0.0))
        await self.send({"type": "penstock.cancel", "stream_id": name})
        await lane.ended.wait()
        self.free.append(name)

    def _take_stray(self, data: bytes, now_s: float) -> None:
        """It is a fault of all streams that run."""
        for name, lane in self._lanes.items():
            if name not in self.free:
                lane.check.take_stray(data, now_s)
