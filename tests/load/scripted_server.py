"""A server that answers with exact bytes, and the events that streams are made of."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson

from penstock.load.client.records import Call, Endpoint, Message, StreamRecord
from penstock.load.client.sse import SseTransport

from ..support.stream_server import stream_server

# Bytes to write, seconds to wait, an event to wait for, or None: close the connection.
Script: TypeAlias = Sequence[bytes | float | asyncio.Event | None]

DONE = b"data: [DONE]\n\n"
CLOSE = None
FOREVER = 60.0
CALL = Call(
    model="m", max_tokens=3, ignore_eos=True, messages=(Message(role="user", content="hello"),)
)


@dataclass(slots=True, kw_only=True)
class Scripted:
    """A running server: the first request gets the first script, and so on, and those after the
    last one the last script again.

    Attributes:
        heads, bodies: of the requests that came.
        hung_up: a client closed a connection.
    """

    scripts: Sequence[Script]
    base_url: str = ""
    heads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_connections: int = 0
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hung_up.set()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request; whether there may be another."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
        assert length is not None
        body = await reader.readexactly(int(length[1]))
        self.heads.append(head)
        self.bodies.append(orjson.loads(body))
        for step in self.scripts[min(len(self.bodies), len(self.scripts)) - 1]:
            if step is None:
                return False
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, asyncio.Event):
                await step.wait()
            else:
                await _wait(reader, step)
        return True


async def _wait(reader: asyncio.StreamReader, duration_s: float) -> None:
    """Let time pass, but notice a client that leaves."""
    try:
        async with asyncio.timeout(duration_s):
            await reader.readexactly(1)
    except TimeoutError:
        pass


@asynccontextmanager
async def scripted(*scripts: Script) -> AsyncIterator[Scripted]:
    served = Scripted(scripts=scripts)
    async with stream_server(served.serve) as port:
        served.base_url = f"http://127.0.0.1:{port}"
        yield served


def record_of(*, expected_tokens: int = -1) -> StreamRecord:
    return StreamRecord(scheduled_s=0.0, expected_tokens=expected_tokens)


@asynccontextmanager
async def connected(
    *scripts: Script, endpoint: Endpoint = "chat", **settings: Any
) -> AsyncIterator[tuple[Scripted, SseTransport]]:
    """A server and a transport to it."""
    async with (
        scripted(*scripts) as server,
        SseTransport(server.base_url, endpoint, **settings) as transport,
    ):
        yield server, transport


async def record_from(
    script: Script, endpoint: Endpoint = "chat", *, expected_tokens: int = 3, stall_s: float = 60.0
) -> StreamRecord:
    """What the client notes of a stream."""
    record = record_of(expected_tokens=expected_tokens)
    async with connected(script, endpoint=endpoint, stall_s=stall_s) as (_, transport):
        await asyncio.wait_for(transport.stream(CALL, record), 60)
    return record


# -- HTTP -----------------------------------------------------------------------------------------


def head(status: str = "200 OK", kind: str = "text/event-stream") -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    )


def framed(piece: bytes) -> bytes:
    """A piece of a chunked body; of nothing, the body's end."""
    return b"%x\r\n%s\r\n" % (len(piece), piece)


def whole(*pieces: bytes) -> Script:
    """A stream that ends as it should."""
    return [head(), *map(framed, pieces), framed(b"")]


def gated(*pieces: bytes) -> tuple[list[asyncio.Event], Script]:
    """A stream that ends as it should, and the events that its pieces wait for."""
    gates = [asyncio.Event() for _ in pieces]
    pairs = zip(gates, map(framed, pieces), strict=True)
    return gates, [head(), *(step for pair in pairs for step in pair), framed(b"")]


def cut(*pieces: bytes) -> Script:
    """A stream whose connection is lost."""
    return [head(), *map(framed, pieces), CLOSE]


def answer(status: str, kind: str, body: bytes) -> Script:
    return [head(status, kind), framed(body), framed(b"")]


# -- events ---------------------------------------------------------------------------------------


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def chunk(
    text: str = "", *, count: int | None = None, finish: str | None = None, endpoint: str = "chat"
) -> bytes:
    """A chunk of a choice; `count` is the running count of tokens."""
    said = {"delta": {"content": text}} if endpoint == "chat" else {"text": text}
    choice = {"index": 0, **said, "finish_reason": finish}
    return event({"id": "cmpl-1", "choices": [choice], "usage": _usage(count)})


def usage(count: int) -> bytes:
    """The usage chunk at the end."""
    return event({"id": "cmpl-1", "choices": [], "usage": _usage(count)})


def _usage(count: int | None) -> dict[str, Any] | None:
    if count is None:
        return None
    details = {"cached_tokens": 5}
    return {"prompt_tokens": 9, "completion_tokens": count, "prompt_tokens_details": details}


def chat(*, endpoint: str = "chat") -> list[bytes]:
    """A good stream of three tokens."""
    pieces = [
        chunk(text, count=number, endpoint=endpoint)
        for number, text in enumerate(["on", "e t", "wo"], start=1)
    ]
    return [*pieces, chunk(finish="length", count=3, endpoint=endpoint), usage(3), DONE]


def response(
    *texts: str, stated: str | None = None, num_tokens: int = 3, status: str = "incomplete"
) -> list[dict[str, Any]]:
    """The events of a response; `stated` is the text at its end, if not that of the deltas."""
    stated = "".join(texts) if stated is None else stated
    item = {"type": "message", "content": [{"type": "output_text", "text": stated}]}
    counted = {
        "input_tokens": 9,
        "output_tokens": num_tokens,
        "input_tokens_details": {"cached_tokens": 5},
    }
    end = {"id": "resp_1", "status": status, "output": [item], "usage": counted}
    if status == "incomplete":
        end["incomplete_details"] = {"reason": "max_output_tokens"}
    if status == "failed":
        end["error"] = {"code": "server_error", "message": "out of luck"}
    events = [
        {"type": "response.created", "response": {"id": "resp_1"}},
        *({"type": "response.output_text.delta", "delta": text} for text in texts),
        {"type": "response.output_text.done", "text": stated},
        {"type": f"response.{status}", "response": end},
    ]
    return [{**each, "sequence_number": number} for number, each in enumerate(events)]


def response_stream(*texts: str, **settings: Any) -> list[bytes]:
    return [event(each) for each in response(*texts, **settings)]
