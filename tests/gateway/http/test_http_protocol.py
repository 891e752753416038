"""Slow, large and too many requests, against uvicorn with our protocol on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
import websockets
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from penstock.gateway.http.event_stream import wait_disconnect
from penstock.gateway.http.http_protocol import (
    HttpLimits,
    LimitedHttpProtocol,
    RefuseConnections,
    limited_protocol,
)
from penstock.gateway.http.websocket_protocol import PatientWebSocketProtocol

from ..conftest import serving, until
from ..garbage import freed_without_collector, num_alive

_PATIENT_S = 60.0
_SHORT_S = 0.2
_GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


async def echo(request: Request) -> Response:
    try:
        return PlainTextResponse(await request.body())
    except ClientDisconnect:
        return Response(status_code=499)


async def tell_headers(request: Request) -> Response:
    await request.body()
    return JSONResponse([[name.decode(), value.decode()] for name, value in request.headers.raw])


class Gate:
    """An endpoint that answers when it is opened, and knows who left before."""

    def __init__(self) -> None:
        self.num_waiting = self.num_left = 0
        self._opened = asyncio.Event()

    def open(self) -> None:
        self._opened.set()

    async def wait(self, request: Request) -> Response:
        self.num_waiting += 1
        opened = asyncio.create_task(self._opened.wait())
        left = asyncio.create_task(wait_disconnect(request.receive))
        await request.body()
        await asyncio.wait({opened, left}, return_when=asyncio.FIRST_COMPLETED)
        self.num_left += left.done()
        opened.cancel()
        left.cancel()
        return PlainTextResponse("opened")


async def answer_early(_: Request) -> Response:
    return PlainTextResponse(b"enough")


async def echo_socket(web: WebSocket) -> None:
    await web.accept()
    with contextlib.suppress(Exception):
        while True:
            await web.send_text(await web.receive_text())


@contextlib.asynccontextmanager
async def served(
    *,
    max_connections: int = 100,
    header_timeout_s: float = _PATIENT_S,
    body_timeout_s: float = _PATIENT_S,
    gate: Gate | None = None,
) -> AsyncIterator[int]:
    """The port of a server."""
    limits = HttpLimits(
        max_connections=max_connections,
        header_timeout_s=header_timeout_s,
        body_timeout_s=body_timeout_s,
        max_header_bytes=4096,
    )
    app = Starlette(
        routes=[
            Route("/", echo, methods=["GET", "POST"]),
            Route("/headers", tell_headers, methods=["POST"]),
            Route("/wait", (gate or Gate()).wait, methods=["GET"]),
            Route("/early", answer_early, methods=["POST"]),
            WebSocketRoute("/ws", echo_socket),
        ]
    )
    config = uvicorn.Config(
        RefuseConnections(app),
        http=limited_protocol(limits),
        ws=PatientWebSocketProtocol,
        log_config=None,
        timeout_graceful_shutdown=1,
    )
    async with serving(config) as (_, port):
        yield port


class Client:
    """A connection of raw bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def dribble(self, data: bytes, *, pause_s: float = 0.01) -> None:
        """Byte by byte until the server has enough."""
        with contextlib.suppress(ConnectionError):
            for byte in data:
                if self.reader.at_eof():
                    return
                await self.send(bytes([byte]))
                await asyncio.sleep(pause_s)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.strip().split("\r\n")
        headers = {
            name.lower(): value for name, _, value in (line.partition(": ") for line in lines)
        }
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(status.split()[1]), headers, body

    async def rest(self) -> bytes:
        """Until the connection ends: it is reset where this client had sent more than was read."""
        blocks: list[bytes] = []
        with contextlib.suppress(ConnectionError):
            while block := await self.reader.read(1 << 16):
                blocks.append(block)
        return b"".join(blocks)

    async def error(self) -> tuple[int, str]:
        """Status and code of a refusal, after which the connection ends."""
        status, headers, body = await self.response()
        assert headers["content-type"] == "application/json"
        assert headers["connection"] == "close"
        error = json.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert await self.rest() == b""
        return status, error["code"]


@contextlib.asynccontextmanager
async def connected(port: int, greeting: bytes = b"") -> AsyncIterator[Client]:
    """The greeting is there when the server, on the same event loop, takes the connection: its time
    cannot run out between the two."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(greeting)
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        async with asyncio.timeout(_PATIENT_S):
            yield Client(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_header_that_does_not_end_is_answered_408() -> None:
    async with served(header_timeout_s=_SHORT_S) as port, connected(port, b"GET / HTTP") as client:
        dribble = asyncio.create_task(client.dribble(b"/1.1\r\nX: " + b"a" * 1000))
        assert await client.error() == (408, "request_timeout")
        await dribble


async def test_who_says_nothing_is_closed_without_a_word() -> None:
    async with served(header_timeout_s=_SHORT_S) as port, connected(port) as client:
        assert await client.reader.read() == b""


async def test_the_second_request_of_a_connection_has_its_time_too() -> None:
    async with served(header_timeout_s=_SHORT_S) as port, connected(port, _GET) as client:
        assert (await client.response())[0] == 200
        dribble = asyncio.create_task(client.dribble(b"\r\n" * 5 + b"GET / HTTP/1.1\r\nX: " * 100))
        assert await client.error() == (408, "request_timeout")
        await dribble


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"], ids=["length", "chunked"]
)
async def test_a_body_that_does_not_end_is_answered_408(framing: bytes) -> None:
    async with served(body_timeout_s=_SHORT_S) as port, connected(port) as client:
        await client.send(b"POST / HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n")
        piece = b"1\r\na\r\n" if b"chunked" in framing else b"a"
        dribble = asyncio.create_task(client.dribble(piece * 100))
        assert await client.error() == (408, "request_timeout")
        await dribble


async def test_a_request_is_answered_once_though_its_body_never_ends() -> None:
    async with served(body_timeout_s=_SHORT_S) as port, connected(port) as client:
        await client.send(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        dribble = asyncio.create_task(client.dribble(b"a" * 1000))
        assert (await client.response())[2] == b"enough"
        assert await client.rest() == b""
        await dribble


async def test_a_slow_request_in_time_and_a_slow_answer_are_served() -> None:
    async with served() as port, connected(port) as client:
        for _ in range(2):
            await client.dribble(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", pause_s=0)
            status, _, body = await client.response()
            assert (status, body) == (200, b"abc")


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with served() as port, connected(port) as client:
        post = b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
        await client.send(_GET + post + post[:-1])
        assert [(await client.response())[2] for _ in range(2)] == [b"", b"abc"]
        await client.send(b"c")
        assert (await client.response())[2] == b"abc"


async def test_a_pipelined_body_that_does_not_end_is_answered_408() -> None:
    async with served(body_timeout_s=_SHORT_S) as port, connected(port) as client:
        await client.send(_GET + b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nab")
        assert (await client.response())[0] == 200
        assert await client.error() == (408, "request_timeout")


@pytest.mark.parametrize("pieces", [1, 40], ids=["at once", "in pieces"])
async def test_a_large_header_is_answered_431(pieces: int) -> None:
    header = b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 8000 + b"\r\n\r\n"
    size = -(-len(header) // pieces)
    async with served() as port, connected(port) as client:
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(header), size):
                await client.send(header[start : start + size])
        assert await client.error() == (431, "header_too_large")


_CHUNKED = b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


async def test_trailers_are_dropped() -> None:
    async with served() as port, connected(port) as client:
        trailers = b"Host: evil\r\nX-Request-Id: evil\r\n"
        chunked = _CHUNKED % b"/headers" + b"1\r\na\r\n0\r\n" + trailers + b"\r\n"
        await client.send(chunked + chunked)
        for _ in range(2):
            status, _, body = await client.response()
            assert status == 200
            assert json.loads(body) == [["host", "x"], ["transfer-encoding", "chunked"]]


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        pytest.param(b"0\r\n", b"X: %b\r\n" % (b"a" * 100), id="many trailers"),
        pytest.param(b"0\r\nX: ", b"a" * 100, id="a trailer without end"),
        pytest.param(b"1;x=", b"a" * 100, id="an extension without end"),
        pytest.param(b"", b"1;%b\r\na\r\n" % (b"x" * 100), id="many extensions"),
    ],
)
async def test_trailers_and_chunk_extensions_have_a_limit(start: bytes, piece: bytes) -> None:
    async with served() as port, connected(port) as client:
        # In one read of the server's, so that its close does not reset the connection.
        await client.send(_CHUNKED % b"/" + start + piece * 100)
        assert await client.error() == (431, "header_too_large")


async def test_a_body_of_small_chunks_with_a_few_trailers_is_served() -> None:
    async with served() as port, connected(port) as client:
        num = 20_000
        end = b"0\r\nX-Checksum: 1\r\n\r\n"
        await client.send(_CHUNKED % b"/" + b"1\r\na\r\n" * num + end)
        status, _, body = await client.response()
        assert (status, len(body)) == (200, num)


_WAIT = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_requests_sent_ahead_are_not_read_while_many_wait() -> None:
    gate, num = Gate(), 1000
    async with served(gate=gate) as port, connected(port) as client:
        before = num_alive(RequestResponseCycle)
        client.writer.write(_WAIT + _GET * num)
        await until(lambda: gate.num_waiting == 1)
        await until(lambda: len(_with_pipeline()) == 1)
        (connection,) = _with_pipeline()
        await until(lambda: not connection.transport.is_reading())
        await asyncio.sleep(0.05)  # were it read on, it would be so now
        assert not connection.transport.is_reading()
        assert num_alive(RequestResponseCycle) - before < 200
        gate.open()
        assert (await client.response())[2] == b"opened"
        for _ in range(num):
            assert (await client.response())[0] == 200


async def test_a_connection_that_is_lost_leaves_none_of_the_requests_sent_ahead() -> None:
    gate = Gate()
    kinds = (LimitedHttpProtocol, RequestResponseCycle)
    async with served(gate=gate) as port, freed_without_collector(*kinds):
        for num in (3, 5000):  # in the second, nothing is read any more
            async with connected(port) as client:
                client.writer.write(_WAIT + _GET * num)
                await until(lambda: gate.num_waiting > 0)
                client.writer.transport.abort()
            gate.open()


async def test_the_request_that_runs_hears_that_its_client_left_those_behind_it() -> None:
    gate = Gate()
    async with served(gate=gate) as port:
        async with connected(port) as client:
            await client.send(_WAIT + _GET * 3)
            await until(lambda: gate.num_waiting == 1)
        await until(lambda: gate.num_left == 1)


async def test_a_header_that_is_sent_behind_a_request_has_its_limit_too() -> None:
    gate = Gate()
    async with served(gate=gate) as port, connected(port) as client:
        await client.send(_WAIT)
        await until(lambda: gate.num_waiting == 1)
        with contextlib.suppress(ConnectionError):
            await client.send(b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000)
        await client.rest()
        await until(lambda: gate.num_left == 1)


def _with_pipeline() -> list[LimitedHttpProtocol]:
    """The connections on which a request waits for the answer to another."""
    every = [each for each in gc.get_objects() if issubclass(type(each), LimitedHttpProtocol)]
    return [each for each in every if each.pipeline]


_UPGRADE = b"Host: x\r\nConnection: keep-alive, Upgrade\r\n"
_WEBSOCKET = _UPGRADE + b"Upgrade: websocket\r\n"
_VERSION = b"Sec-WebSocket-Version: 13\r\n"
_KEY = b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
_HANDSHAKE = _WEBSOCKET + _VERSION + _KEY
_H2C = _UPGRADE + b"Upgrade: h2c\r\n"
_LENGTH = b"Content-Length: 3\r\n"
_CODING = b"Transfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("start", "fields", "body", "status", "code"),
    [
        # no handshake for a WebSocket
        ("GET /ws 1.1", _HANDSHAKE + _LENGTH, b"abc", 400, "invalid_upgrade"),
        ("GET /ws 1.1", _HANDSHAKE + _LENGTH, b"", 400, "invalid_upgrade"),
        ("GET /ws 1.1", _HANDSHAKE + _CODING, b"3\r\nabc\r\n0\r\n\r\n", 400, "invalid_upgrade"),
        ("GET /ws 1.1", _HANDSHAKE + _CODING, b"", 400, "invalid_upgrade"),
        ("GET /ws 1.1", _HANDSHAKE + _LENGTH + b"Expect: 100-continue\r\n", b"", 400,
         "invalid_upgrade"),
        ("POST /ws 1.1", _HANDSHAKE + _LENGTH, b"abc", 400, "invalid_upgrade"),
        ("POST /ws 1.1", _HANDSHAKE, b"", 400, "invalid_upgrade"),
        ("GET /ws 1.1", _WEBSOCKET + _VERSION, b"", 400, "invalid_upgrade"),
        ("GET /ws 1.1", _WEBSOCKET + _VERSION + b"Sec-WebSocket-Key: a\r\n", b"", 400,
         "invalid_upgrade"),
        ("GET /ws 1.1", _HANDSHAKE + _KEY, b"", 400, "invalid_upgrade"),
        ("GET /ws 1.1", _WEBSOCKET + _KEY, b"", 426, "invalid_upgrade"),
        ("GET /ws 1.1", _WEBSOCKET + _KEY + b"Sec-WebSocket-Version: 8\r\n", b"", 426,
         "invalid_upgrade"),
        ("GET /ws 1.1", _HANDSHAKE + b"X: y\r\n" * 200, b"", 431, "header_too_large"),
        ("GET /ws 1.1", _UPGRADE + b"Upgrade: h2c\r\nUpgrade: websocket\r\n" + _VERSION + _KEY,
         b"", 426, None),
        ("CONNECT x:80 1.1", b"Host: x\r\n", b"", 405, "method_not_allowed"),
        # handshakes
        ("GET /ws 1.1", _HANDSHAKE, b"", 101, None),
        ("GET /ws 1.1", _HANDSHAKE + b"Content-Length: 0\r\n", b"", 101, None),
        ("GET /ws 1.1", _HANDSHAKE + b"Expect: 100-continue\r\n", b"", 101, None),
        # upgrades that are ignored
        ("POST / 1.0", _HANDSHAKE + _LENGTH, b"abc", 200, None),
        ("GET / 1.1", _H2C, b"", 200, None),
        ("POST / 1.1", _H2C + _LENGTH, b"abc", 200, None),
        ("POST / 1.1", _H2C + _CODING, b"3\r\nabc\r\n0\r\n\r\n", 200, None),
        ("POST / 1.1", _UPGRADE + _LENGTH, b"abc", 200, None),
        ("POST / 1.1", b"Host: x\r\nUpgrade: websocket\r\n" + _LENGTH, b"abc", 200, None),
    ],
)  # fmt: skip
async def test_every_upgrade_is_answered_at_once(
    start: str, fields: bytes, body: bytes, status: int, code: str | None,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO", logger="penstock")
    method, path, version = start.split()
    request = f"{method} {path} HTTP/{version}\r\n".encode() + fields + b"\r\n" + body
    async with served() as port, connected(port, request) as client:
        if code is not None:
            assert await client.error() == (status, code)
            assert f"refused a connection: {status} {code}" in caplog.text
        elif status == 200:
            for _ in range(2 if version == "1.1" else 1):  # it stays usable
                answered, _, echoed = await client.response()
                assert (answered, echoed) == (200, b"abc" if body else b"")
                await client.send(request)
        else:
            head = await client.reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)


async def test_what_is_no_http_is_answered_400() -> None:
    async with served() as port, connected(port) as client:
        await client.send(b"\x16\x03\x01 no http\r\n\r\n")
        assert await client.error() == (400, "invalid_http")


async def test_connections_beyond_the_limit_are_answered_503() -> None:
    async with served(max_connections=2) as port, connected(port) as first, connected(port):
        await first.send(_GET)
        assert (await first.response())[0] == 200
        async with connected(port) as beyond:
            await beyond.send(_GET)
            status, headers, body = await beyond.response()
            assert status == 503
            assert json.loads(body)["error"]["code"] == "too_many_connections"
            assert 1 <= int(headers["retry-after"]) <= 120
            assert 1000 <= int(headers["retry-after-ms"]) <= 120_000
            assert await beyond.reader.read() == b""
        with pytest.raises(websockets.InvalidStatus) as refused:
            await _websocket(port)
        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["retry-after"]
        await first.send(_GET)
        assert (await first.response())[0] == 200, "who is in stays in"
        first.writer.close()
        await first.writer.wait_closed()
        async with asyncio.timeout(_PATIENT_S), await _let_in(port) as web:
            await web.send("hello")
            assert await web.recv() == "hello", "and a place that is free is given away"


def _websocket(port: int) -> websockets.connect:
    return websockets.connect(f"ws://127.0.0.1:{port}/ws", open_timeout=_PATIENT_S)


async def _let_in(port: int) -> websockets.ClientConnection:
    """Connect as soon as there is a place."""
    while True:
        with contextlib.suppress(websockets.InvalidStatus):
            return await _websocket(port)
        await asyncio.sleep(0.05)


async def test_a_websocket_outlives_the_time_for_headers() -> None:
    handshake = (
        b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    async with (
        served(header_timeout_s=_SHORT_S, body_timeout_s=_SHORT_S) as port,
        connected(port, handshake) as client,
    ):
        assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        await asyncio.sleep(3 * _SHORT_S)
        await client.send(b"\x81\x8a" + bytes(4) + b"still here")  # a text message, its mask 0
        assert await client.reader.readexactly(12) == b"\x81\x0astill here"


async def test_an_ended_connection_leaves_nothing_to_the_garbage_collector() -> None:
    async with served() as port, freed_without_collector(LimitedHttpProtocol):
        async with connected(port) as client:
            await client.send(_GET)
            assert (await client.response())[0] == 200
        async with connected(port) as client:
            await client.send(b"no http\r\n\r\n")
            await client.error()
        async with _websocket(port) as web:
            await web.send("hello")
            assert await web.recv() == "hello"
