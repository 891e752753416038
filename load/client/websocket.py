"""Calls over our WebSocket mode of `/v1/responses`: many streams on few sockets."""

from __future__ import annotations

import asyncio
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


class WebSocketTransport:
    """Runs calls on sockets to one server.

    A call takes the socket with the fewest streams; if all lanes are in use, another socket is
    opened. The streams of a lost socket are cut, and it is not used again. `num_sockets` are
    opened at the start, so that their calls need not wait for a handshake; `stall_s` of silence
    is a fault.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        num_sockets: int = 1,
        stall_s: float = 60.0,
    ) -> None:
        address = Address.parse(base_url)
        scheme = "wss" if address.is_tls else "ws"
        self._url = f"{scheme}://{address.netloc}{address.prefix}{PATHS['responses']}"
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._num_sockets = num_sockets
        self._stall_s = stall_s
        self._sockets: list[_Socket] = []
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=None)
        )
        sockets = [self._open() for _ in range(self._num_sockets)]
        # Calls report errors.
        await asyncio.gather(*(socket.opening for socket in sockets), return_exceptions=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await asyncio.gather(*(socket.close() for socket in self._sockets))
        await self._session.close()

    async def stream(self, call: Call, record: StreamRecord) -> None:
        """Send a call and read its whole answer; if cancelled, cancel the response, since others
        share the socket. Raises ConfigError if the endpoint cannot take the call."""
        body = body_of("responses", call)
        del body["stream"]
        record.sent_s = time.perf_counter()
        socket = self._take_socket()
        await socket.stream(body, record)

    def _take_socket(self) -> _Socket:
        self._sockets = [socket for socket in self._sockets if not socket.is_lost]
        best = max(self._sockets, key=lambda socket: socket.num_free, default=None)
        return best if best is not None and best.num_free else self._open()

    def _open(self) -> _Socket:
        assert self._session is not None, "used outside of its context"
        socket = _Socket(self._session, self._url, stall_s=self._stall_s)
        self._sockets.append(socket)
        return socket


class _Lane:
    """Runs one stream after the other.

    `check` and `done` belong to the running stream; afterwards `check` still sees late events.
    `is_free`: the server has ended everything sent on it.
    """

    def __init__(self, stream_id: str) -> None:
        self.stream_id = stream_id
        self.check: ResponseCheck | None = None
        self.done: asyncio.Future[None] | None = None
        self.is_free = True

    def begin(self, check: ResponseCheck) -> asyncio.Future[None]:
        self.check = check
        self.done = asyncio.get_running_loop().create_future()
        self.is_free = False
        return self.done

    def finish(self) -> None:
        """Wake the waiting call, if any."""
        if self.done is not None and not self.done.done():
            self.done.set_result(None)
        self.done = None

    def abandon(self) -> None:
        """Leave the record as it is: no call waits any more, but the server still has to end the
        stream."""
        self.finish()
        self.check = ResponseCheck(StreamRecord(scheduled_s=0.0))


class _Socket:
    """One connection and its streams; `opening` is done when the socket can be used or is lost."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, stall_s: float) -> None:
        self.is_lost = False
        self._stall_s = stall_s
        self._websocket: aiohttp.ClientWebSocketResponse[bool] | None = None
        self._reading: asyncio.Task[None] | None = None
        names = [f"lane-{number}" for number in range(LANES_PER_SOCKET)]
        self._lanes = {name: _Lane(name) for name in names}
        self._free = deque(self._lanes.values())  # the longest idle first
        self._cancels: set[asyncio.Task[None]] = set()
        self.opening = asyncio.create_task(self._connect(session, url))

    @property
    def num_free(self) -> int:
        return len(self._free)

    async def stream(self, body: dict[str, Any], record: StreamRecord) -> None:
        lane = self._free.popleft()
        check = ResponseCheck(record)
        done = lane.begin(check)
        timer = None
        try:
            if not self.opening.done():
                await asyncio.shield(self.opening)
            if not self.is_lost:
                record.status = int(HTTPStatus.SWITCHING_PROTOCOLS)
                timer = StallTimer(
                    check, stall_s=self._stall_s, on_stall=lambda: self._stall(lane, check)
                )
                create = {**body, "type": "response.create", "stream_id": lane.stream_id}
                await self._send(create)
            await done
        except asyncio.CancelledError:
            if lane.done is done:  # it still runs
                self._stop(lane, is_sent=timer is not None)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            check.settle()

    async def close(self) -> None:
        self.opening.cancel()
        await asyncio.gather(self.opening, return_exceptions=True)
        if self._websocket is not None and self._reading is not None:
            await self._websocket.close()
            await self._reading

    # -- one socket -------------------------------------------------------------------------------

    async def _connect(self, session: aiohttp.ClientSession, url: str) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                self._websocket = await session.ws_connect(
                    url,
                    timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
                    max_msg_size=0,
                    decode_text=False,
                )
        except aiohttp.WSServerHandshakeError as error:
            self._lose(Fault.REFUSED, error.message, status=error.status)
        except (aiohttp.ClientError, OSError) as error:
            self._lose(Fault.UNREACHABLE, str(error) or repr(error))
        else:
            self._reading = asyncio.create_task(self._read(self._websocket))

    async def _read(self, websocket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        while True:
            message = await websocket.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                self._take(message.data, time.perf_counter())
            elif message.type is aiohttp.WSMsgType.ERROR:
                self._lose(Fault.MALFORMED, f"not WebSocket: {message.data}")
                return
            else:
                self._lose(Fault.CUT, f"the socket was lost, code {websocket.close_code}")
                return

    async def _send(self, event: dict[str, Any]) -> None:
        assert self._websocket is not None
        try:
            await self._websocket.send_frame(orjson.dumps(event), aiohttp.WSMsgType.TEXT)
        except (aiohttp.ClientError, OSError) as error:
            self._lose(Fault.CUT, f"the socket was lost: {error}")

    def _lose(self, fault: Fault, detail: str, *, status: int = 0) -> None:
        self.is_lost = True
        now_s = time.perf_counter()
        for lane in self._lanes.values():
            if lane.done is not None and lane.check is not None:
                lane.check.record.status = status or lane.check.record.status
                lane.check.fail(fault, detail, now_s)
                lane.finish()

    # -- its streams ------------------------------------------------------------------------------

    def _take(self, data: bytes, now_s: float) -> None:
        try:
            event = orjson.loads(data)
            lane = self._lanes[event["stream_id"]]
        except (KeyError, TypeError, ValueError):
            self._take_stray(data, now_s)
            return
        check = lane.check
        if check is None:
            self._take_stray(data, now_s)
            return
        check.take_event(event, now_s)
        if check.is_ended and not lane.is_free:
            self._release(lane)

    def _take_stray(self, data: bytes, now_s: float) -> None:
        """An event that belongs to none of our streams is a fault of them all."""
        for lane in self._lanes.values():
            if not lane.is_free and lane.check is not None:
                lane.check.take_stray(data, now_s)

    def _release(self, lane: _Lane) -> None:
        lane.finish()
        lane.is_free = True
        self._free.append(lane)

    def _stall(self, lane: _Lane, check: ResponseCheck) -> None:
        check.fail(Fault.STALLED, f"no event for {self._stall_s:g} s", time.perf_counter())
        self._stop(lane, is_sent=True)

    def _stop(self, lane: _Lane, *, is_sent: bool) -> None:
        """Leave the running stream."""
        if not is_sent:
            self._release(lane)
            return
        lane.abandon()
        cancel = {"type": "penstock.cancel", "stream_id": lane.stream_id}
        task = asyncio.create_task(self._send(cancel))
        self._cancels.add(task)
        task.add_done_callback(self._cancels.discard)
