"""Reads many streams as cheaply as possible, each on its own connection.

The wire's syntax is not parsed: the token is one letter, so the text of a delta says how many
came, and the engine's clock file says how late each is. It runs as a separate process, so that
its CPU is not counted as the gateway's: `python -m penstock.load.gateway.readers '{"…": …}'`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import uvloop

MAX_FRAMES = 1 << 16
MAX_STREAMS = 1 << 14


class ClockFile:
    """What the stub engine did when, in a mapped file that the engine writes and readers read.

    `times[frame]` is the monotonic time at which a frame was sent, and `starts[stream]` the
    frame that held a stream's first token.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(8 * (MAX_FRAMES + MAX_STREAMS)))
        mapped = np.memmap(path, dtype=np.float64, mode="r+")
        self.times: npt.NDArray[np.float64] = mapped[:MAX_FRAMES]
        self.starts: npt.NDArray[np.float64] = mapped[MAX_FRAMES:]


# -- the readers --------------------------------------------------------------------------------

LETTER = "a"
IDLE = "idle"  # a WebSocket on which nothing is asked
_DELTA = re.compile(rb'"(?:delta|content)":"(a+)"')
_MAX_EVENT_BYTES = 2048
_CONNECTS_AT_ONCE = 64


@dataclass(slots=True)
class Tally:
    """What all streams saw within the window; `lateness_s` has one value per token."""

    begin_s: float
    end_s: float
    num_tokens: int = 0
    num_events: int = 0
    num_ended: int = 0
    lateness_s: list[float] = field(default_factory=list)


class Reader(asyncio.Protocol):
    """One stream."""

    def __init__(
        self, number: int, requests: Sequence[bytes], tally: Tally, clock: ClockFile
    ) -> None:
        self._number = number
        self._requests = deque(requests)  # each sent when the one before has an answer
        self._tally = tally
        self._clock = clock
        self._tail = b""
        self._num_tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._requests.popleft())

    def connection_lost(self, _: Exception | None) -> None:
        self._tally.num_ended += 1

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        if self._requests:
            self._transport.write(self._requests.popleft())
        text, end = self._tail + data, 0
        tally = self._tally
        is_counted = tally.begin_s <= now_s < tally.end_s
        for match in _DELTA.finditer(text):
            num_tokens, end = match.end(1) - match.start(1), match.end()
            if is_counted:
                tally.num_events += 1
                tally.num_tokens += num_tokens
                frame = int(self._clock.starts[self._number]) + self._num_tokens
                sent_s = self._clock.times[frame : frame + num_tokens]
                tally.lateness_s += (now_s - sent_s).tolist()
            self._num_tokens += num_tokens
        self._tail = text[end:][-_MAX_EVENT_BYTES:]


def requests_of(wire: str, number: int, settings: dict[str, Any]) -> list[bytes]:
    """The requests that open a stream; `wire` is chat, responses, websocket or idle."""
    model, num_tokens = settings["model"], settings["num_tokens"]
    shared = {"model": model, "seed": number, "ignore_eos": True, "stream": True}
    host = f"Host: 127.0.0.1:{settings['port']}\r\n"
    if wire == "chat":
        messages = [{"role": "user", "content": "Go on."}]
        body = json.dumps({**shared, "messages": messages, "max_tokens": num_tokens}).encode()
        return [_post("/v1/chat/completions", host, body)]
    asked = {**shared, "input": "Go on.", "max_output_tokens": num_tokens}
    if wire == "responses":
        return [_post("/v1/responses", host, json.dumps(asked).encode())]
    key = base64.b64encode(os.urandom(16)).decode()
    upgrade = (
        f"GET /v1/responses HTTP/1.1\r\n{host}Upgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    if wire == IDLE:
        return [upgrade.encode()]
    create = {"type": "response.create", **asked}
    payload = json.dumps(create).encode()
    assert 126 <= len(payload) < 1 << 16
    # Masked with zeros, as a client's must be masked (RFC 6455 §5.3).
    return [upgrade.encode(), struct.pack("!BBH4x", 0x81, 0x80 | 126, len(payload)) + payload]


def _post(path: str, host: str, body: bytes) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\n{host}Content-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def read_all(settings: dict[str, Any]) -> dict[str, Any]:
    """Open the streams, wait for the window, and return what was seen in it."""
    clock = ClockFile(Path(settings["clock_file"]))
    tally = Tally(begin_s=float("inf"), end_s=float("inf"))
    loop = asyncio.get_running_loop()
    slots = asyncio.Semaphore(_CONNECTS_AT_ONCE)

    async def connect(number: int) -> asyncio.BaseTransport:
        requests = requests_of(settings["wire"], number, settings)
        async with slots:
            transport, _ = await loop.create_connection(
                lambda: Reader(number, requests, tally, clock), "127.0.0.1", settings["port"]
            )
            return transport

    transports = await asyncio.gather(*map(connect, range(settings["num_streams"])))
    await asyncio.sleep(settings["warm_up_s"])
    tally.begin_s = time.monotonic()
    tally.end_s = tally.begin_s + settings["window_s"]
    print(json.dumps({"begin_s": tally.begin_s}), flush=True)
    await asyncio.sleep(settings["window_s"])
    cpu_s = time.process_time()
    num_lost = tally.num_ended
    for transport in transports:
        cast("asyncio.Transport", transport).abort()
    late = np.array(tally.lateness_s or [float("nan")])
    return {
        "num_tokens": tally.num_tokens,
        "num_events": tally.num_events,
        "num_lost": num_lost,
        "p50_ms": 1e3 * float(np.percentile(late, 50)),
        "p99_ms": 1e3 * float(np.percentile(late, 99)),
        "reader_cpu_s": cpu_s,
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(read_all(json.loads(sys.argv[1])))))
