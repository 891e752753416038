"""A server without a model that speaks OpenAI's API: the stub engine's counterpart for routers that
pass HTTP through.

It writes one chunk of a chat completion with one letter per stream and frame, in vLLM's format, as
cheaply as it can. A stream goes on until its client leaves. A child process:
`python -m penstock.load.gateway.stub_server`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import uvloop

from penstock.engine.process import LISTEN_FD, Status, run_child
from penstock.load.gateway.readers import LETTER, ClockFile

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_CHUNK = {
    "id": "chatcmpl-0123456789abcdef0123456789abcdef",
    "object": "chat.completion.chunk",
    "created": 1_700_000_000,
    "model": "stub",
    "choices": [
        {
            "index": 0, "delta": {"content": LETTER}, "logprobs": None, "finish_reason": None,
            "token_ids": None,
        }
    ],
}  # fmt: skip
_PLAIN = json.dumps({"object": "list", "data": [{"id": "stub", "object": "model"}]}).encode()


class StubServer:
    """Sends `frames_per_s` frames a second, late ones at once.

    Args:
        first_frame: where this server's frames begin in the clock file.
    """

    def __init__(self, clock: ClockFile, *, frames_per_s: float, first_frame: int) -> None:
        event = b"data: " + json.dumps(_CHUNK, separators=(",", ":")).encode() + b"\n\n"
        self._chunk = b"%x\r\n%b\r\n" % (len(event), event)
        self._clock = clock
        self._period_s = 1.0 / frames_per_s
        self._num_frames = first_frame
        self._streams: set[asyncio.Transport] = set()

    def begin(self, transport: asyncio.Transport, body: bytes) -> None:
        self._clock.starts[json.loads(body)["seed"]] = self._num_frames
        transport.write(_HEAD)
        self._streams.add(transport)

    def leave(self, transport: asyncio.Transport) -> None:
        self._streams.discard(transport)

    async def run(self) -> None:
        next_s = time.monotonic()
        while True:
            next_s = max(next_s + self._period_s, time.monotonic() - 1.0)
            await asyncio.sleep(next_s - time.monotonic())
            self._clock.times[self._num_frames] = time.monotonic()
            self._num_frames += 1
            for transport in self._streams:
                transport.write(self._chunk)


class _Connection(asyncio.Protocol):
    """Reads requests; a POST begins a stream, and any other gets a plain answer."""

    def __init__(self, server: StubServer) -> None:
        self._server = server
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        num_bytes = int(length[1]) if length else 0
        if not blank or len(body) < num_bytes:
            return
        self._received = body[num_bytes:]
        if head.startswith(b"POST"):
            self._server.begin(self._transport, body[:num_bytes])
        else:
            kind = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
            self._transport.write(kind + b"content-length: %d\r\n\r\n" % len(_PLAIN) + _PLAIN)

    def connection_lost(self, _: Exception | None) -> None:
        self._server.leave(self._transport)


async def _serve(listener: socket.socket, settings: Mapping[str, Any], status: Status) -> None:
    server = StubServer(
        ClockFile(Path(settings["clock_file"])),
        frames_per_s=settings["frames_per_s"],
        first_frame=settings["first_frame"],
    )
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: _Connection(server), sock=listener)
    status.ready()
    await server.run()


def serve(settings: Mapping[str, Any], status: Status) -> None:
    """Run the process until it is killed."""
    listener = socket.socket(fileno=int(os.environ[LISTEN_FD]))
    uvloop.run(_serve(listener, settings, status))


if __name__ == "__main__":
    sys.exit(run_child("penstock-stub-server", serve))
