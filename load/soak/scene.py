"""What all actors of a soak share: the server, ways to speak to it, and prompts."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from penstock.engine.errors import ConfigError
from penstock.load.client.integrity import ResponseCheck
from penstock.load.client.records import (
    Address,
    Call,
    Endpoint,
    Fault,
    Message,
    StreamRecord,
    body_of,
)
from penstock.load.client.transport import Transport, TransportKind, open_transport
from penstock.load.soak.journal import Journal
from penstock.load.workloads.datasets import WORDS

# The names of the four ways to stream.
TRANSPORTS: Mapping[str, tuple[TransportKind, Endpoint]] = {
    "completions": ("sse", "completions"),
    "chat": ("sse", "chat"),
    "responses": ("sse", "responses"),
    "websocket": ("websocket", "responses"),
}
# Silence that is a fault; far below the duration of a soak.
STALL_S = 60.0
_SLOW_BYTES_PER_S, _SLOW_PIECE_BYTES, _FAST_PIECE_BYTES = 32_000, 640, 32 << 10
_SOCKET_BUFFER_BYTES = 64 << 10  # small, so that a server notices a slow reader
_PROMPT_WORDS = (3, 60)
_OUTPUT_TOKENS = (8, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    base_url: str
    address: Address
    authorization: str  # a line of an HTTP head, or nothing
    model: str
    max_model_len: int  # the longest context, as the server says
    journal: Journal
    transports: Mapping[str, Transport]  # the four ways to stream, by name
    slow_port: int  # of a `slow_line` to the server
    http: aiohttp.ClientSession  # for everything but the streams of a transport
    api_key: str | None

    def slow_transport(self, name: str) -> Transport:
        """A transport over the slow line, for one stream: a server counts a connection as idle
        long before such a client has read everything, and may close it when it is reused."""
        return _transport(name, f"http://127.0.0.1:{self.slow_port}", self.api_key)

    def call(self, rng: random.Random, **values: Any) -> Call:
        """A turn of some words, with a random length."""
        text = " ".join(rng.choices(WORDS, k=rng.randint(*_PROMPT_WORDS)))
        defaults: dict[str, Any] = {
            "model": self.model,
            "messages": (Message(role="user", content=text),),
            "max_tokens": rng.randint(*_OUTPUT_TOKENS),
            "ignore_eos": True,
            "extra": {"temperature": 0.8},
        }
        return Call(**{**defaults, **values})


@contextlib.asynccontextmanager
async def open_scene(
    base_url: str, journal: Journal, *, api_key: str | None
) -> AsyncIterator[Scene]:
    """Ask the server for its model, and open the transports. Raises ConfigError if it does not
    answer as an OpenAI-compatible server does."""
    address = Address.parse(base_url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(
                base_url,
                headers=headers,
                # A server may close a kept connection just when it is used again.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=STALL_S),
            )
        )
        card = await _model_card(http)
        slow_port = await stack.enter_async_context(slow_line(address))
        yield Scene(
            base_url=base_url,
            address=address,
            authorization=f"Authorization: Bearer {api_key}\r\n" if api_key else "",
            model=card["id"],
            max_model_len=card.get("max_model_len") or 32_768,
            journal=journal,
            transports={
                name: await stack.enter_async_context(_transport(name, base_url, api_key))
                for name in TRANSPORTS
            },
            slow_port=slow_port,
            http=http,
            api_key=api_key,
        )


async def _model_card(http: aiohttp.ClientSession) -> dict[str, Any]:
    try:
        async with http.get("/v1/models") as response:
            card: dict[str, Any] = orjson.loads(await response.read())["data"][0]
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"GET /v1/models lists no model: {error!r}") from error
    return card


def _transport(name: str, base_url: str, api_key: str | None) -> Transport:
    kind, endpoint = TRANSPORTS[name]
    return open_transport(kind, endpoint, base_url, api_key=api_key, stall_s=STALL_S)


@contextlib.asynccontextmanager
async def slow_line(address: Address) -> AsyncIterator[int]:
    """A local port that leads to the server over a slow connection."""
    relays: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        relays.add(task)
        writers = [writer]
        try:
            from_server, to_server = await asyncio.open_connection(address.host, address.port)
            writers.append(to_server)
            connection: socket.socket = to_server.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(_pour(reader, to_server, _FAST_PIECE_BYTES))
                ways.create_task(
                    _pour(from_server, writer, _SLOW_PIECE_BYTES, bytes_per_s=_SLOW_BYTES_PER_S)
                )
        except* OSError:  # one end is gone, so is the other
            for each in writers:
                each.transport.abort()
        finally:
            for each in writers:
                each.close()
            relays.discard(task)

    server = await asyncio.start_server(
        relay, "127.0.0.1", 0, limit=_SLOW_PIECE_BYTES, family=socket.AF_INET
    )
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(relays):
            task.cancel()
        await asyncio.gather(*relays, return_exceptions=True)


async def _pour(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    piece_bytes: int,
    *,
    bytes_per_s: float = math.inf,
) -> None:
    """Forward everything up to the end."""
    while piece := await reader.read(piece_bytes):
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(len(piece) / bytes_per_s)
    writer.write_eof()


# -- a WebSocket whose lanes an actor drives by hand: create, cancel, resume, send nonsense -------

# The possible ends of a stream that was cancelled, perhaps too late.
ENDS = ("cancelled", "max_output_tokens")
_CLOSE_S = 1.0


class Lane:
    """One stream on a lane.

    `heard` is set whenever an event has come; `ended` at the terminal event, or when the socket
    is lost. `recovered` is the server's answer to a resume; None before it.
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
    """A WebSocket whose lanes an actor controls: create, cancel, resume, send invalid messages.

    `errors` has the error events of no lane of ours; `is_lost`: the connection has ended.
    """

    def __init__(self, websocket: aiohttp.ClientWebSocketResponse[bool]) -> None:
        self.errors: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.is_lost = False
        self._websocket = websocket
        self._lanes: dict[str, Lane] = {}
        self._reader: asyncio.Task[None] | None = None

    def read(self) -> None:
        """Start to read; before, nothing is taken from the socket."""
        self._reader = asyncio.create_task(self._read())

    async def create(self, name: str, body: dict[str, Any], lane: Lane) -> None:
        self._lanes[name] = lane
        lane.record.sent_s = time.perf_counter()
        await self.send({**body, "type": "response.create", "stream_id": name})

    async def resume(self, name: str, response_id: str, lane: Lane) -> None:
        """Continue a stream of another socket here."""
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
        with contextlib.suppress(aiohttp.ClientError, OSError):  # the reader reports it
            await self._websocket.send_str(text)

    def drop(self) -> None:
        """Break the connection."""
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
async def open_socket(
    http: aiohttp.ClientSession, *, is_read: bool = True
) -> AsyncIterator[LaneSocket]:
    """A socket. Raises aiohttp.ClientError if the server refuses it."""
    websocket = await http.ws_connect(
        "/v1/responses", timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S), max_msg_size=0
    )
    lanes = LaneSocket(websocket)
    if is_read:
        lanes.read()
    try:
        yield lanes
    finally:
        await lanes.close()


def socket_body(call: Call) -> dict[str, Any]:
    """The fields of `response.create` except its type."""
    body = body_of("responses", call)
    del body["stream"]
    return body


@contextlib.contextmanager
def open_lane(
    scene: Scene, actor: str, call: Call, *, is_whole: bool = True, is_resumable: bool = False
) -> Iterator[Lane]:
    """The lane of a stream while it runs, which the journal notes.

    Args:
        is_whole: it must get all its tokens, since its client does not cancel it.
    """
    with scene.journal.stream(actor, is_resumable=is_resumable) as record:
        record.expected_tokens = call.max_tokens if is_whole else -1
        yield Lane(ResponseCheck(record))


def unended(lane: Lane) -> None:
    """Note in its record that a stream never came to its end."""
    if not lane.check.is_ended:
        lane.check.fail(Fault.CUT, "the socket ended before the stream", time.perf_counter())
