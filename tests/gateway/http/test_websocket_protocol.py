"""Frames that RFC 6455 does not allow, or allows only so, byte by byte at a gateway on a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from websockets.frames import Frame, Opcode

from penstock.gateway.http import websocket_protocol
from penstock.gateway.http.websocket_protocol import frame_head

from ..conftest import ANSWER, Serve, Served
from ..sockets import send, until_end

CONT, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
_PATIENCE_S = 60.0
_HELLO = json.dumps({"type": "penstock.ping"}).encode()


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, is_masked: bool = True
) -> bytes:
    """One frame (RFC 6455 §5.2)."""
    first = fin << 7 | rsv << 4 | opcode
    size = len(payload)
    if size < 126:
        length, extension = size, b""
    elif size < 1 << 16:
        length, extension = 126, struct.pack("!H", size)
    else:
        length, extension = 127, struct.pack("!Q", size)
    head = bytes([first, is_masked << 7 | length]) + extension
    if not is_masked:
        return head + payload
    mask = os.urandom(4)
    key = int.from_bytes((mask * (size // 4 + 1))[:size])
    return head + mask + (int.from_bytes(payload) ^ key).to_bytes(size)


def close(code: int, reason: bytes = b"") -> bytes:
    return frame(CLOSE, struct.pack("!H", code) + reason)


@dataclass
class Wire:
    """A WebSocket whose frames are made by hand."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))
        await self.writer.drain()

    async def receive(self) -> tuple[int, bytes]:
        """Opcode and payload of the next frame."""
        async with asyncio.timeout(_PATIENCE_S):
            first, second = await self.reader.readexactly(2)
            assert first & 0x70 == 0
            assert second & 0x80 == 0  # a server does not mask
            size = second & 0x7F
            if size >= 126:
                extension = await self.reader.readexactly(2 if size == 126 else 8)
                size = int.from_bytes(extension)
            return first & 0x0F, await self.reader.readexactly(size)

    async def close_code(self) -> int | None:
        """Of the last frame (None: it names no code)."""
        while True:
            opcode, payload = await self.receive()
            if opcode == CLOSE:
                break
        payload[2:].decode()
        async with asyncio.timeout(_PATIENCE_S):
            assert await self.reader.read() == b""  # then the server closes
        return struct.unpack("!H", payload[:2])[0] if payload else None


@contextlib.asynccontextmanager
async def opened(served: Served) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(
        b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\n"
        b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    try:
        async with asyncio.timeout(_PATIENCE_S):
            answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 101 ")
        yield Wire(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


_BROKEN = b"\xce\xba\xed\xa0\x80"  # a surrogate
MALFORMED: dict[str, tuple[bytes, int]] = {
    **{f"reserved bit {rsv}": (frame(TEXT, _HELLO, rsv=rsv), 1002) for rsv in (1, 2, 4)},
    **{f"opcode {code}": (frame(code), 1002) for code in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)},
    "reserved bit of a ping": (frame(PING, rsv=4), 1002),
    "unmasked": (frame(TEXT, _HELLO, is_masked=False), 1002),
    "unmasked ping": (frame(PING, b"x", is_masked=False), 1002),
    "fragmented ping": (frame(PING, b"x", fin=False), 1002),
    "fragmented close": (frame(CLOSE, b"\x03\xe8", fin=False), 1002),
    "long ping": (frame(PING, bytes(126)), 1002),
    "long close": (frame(CLOSE, struct.pack("!H", 1000) + bytes(124)), 1002),
    "continuation of nothing": (frame(CONT, _HELLO), 1002),
    "unfinished continuation of nothing": (frame(CONT, _HELLO, fin=False), 1002),
    "message in a message": (frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"), 1002),
    "continuation after the end": (frame(TEXT, _HELLO) + frame(CONT, b"x"), 1002),
    "text that is not UTF-8": (frame(TEXT, b'"' + _BROKEN + b'"'), 1007),
    "text that is not UTF-8, in parts": (
        frame(TEXT, _BROKEN[:3], fin=False) + frame(CONT, _BROKEN[3:]),
        1007,
    ),
    "twice text that is not UTF-8, then a ping": (
        2 * frame(TEXT, _BROKEN) + frame(PING, b"x") + frame(TEXT, _HELLO),
        1007,
    ),
    "text that ends within a character": (frame(TEXT, "€".encode()[:2]), 1007),
    "close of one byte": (frame(CLOSE, b"\x03"), 1002),
    "close reason that is not UTF-8": (close(1000, _BROKEN), 1007),
    **{
        f"close code {code}": (close(code), 1002)
        for code in (0, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535)
    },
    "large": (frame(TEXT, bytes((1 << 20) + 1)), 1009),
    "large, in parts": (
        frame(TEXT, bytes(1 << 19), fin=False) + frame(CONT, bytes((1 << 19) + 1)),
        1009,
    ),
    # Nothing of it has come yet: its length alone is enough.
    "huge by its length": (bytes([0x81, 0xFF]) + struct.pack("!Q", 1 << 62) + bytes(4), 1009),
    "length with its highest bit": (bytes([0x81, 0xFF]) + bytes([0xFF] * 8) + bytes(4), 1009),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_what_is_malformed_ends_its_connection_alone(
    served: Served, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sent, code = MALFORMED[name]
    served.engine.may_speak.clear()
    async with served.connect() as neighbour, opened(served) as wire:
        await send(neighbour, type="response.create", input="hi")
        await served.submitted()
        await wire.send(sent)
        assert await wire.close_code() == code
        served.engine.may_speak.set()
        text = "".join(event.get("delta", "") for event in await until_end(neighbour))
    assert text == ANSWER
    loud = [record for record in caplog.records if record.levelno > logging.INFO]
    assert len(loud) <= 1
    assert not [record for record in loud if record.exc_info]


async def test_the_code_is_heard_by_who_is_still_sending(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket_protocol, "_CLOSE_S", _PATIENCE_S)
    async with opened(served) as wire:
        wire.writer.write(frame(TEXT, bytes(16 << 20)))  # more than buffers on the way hold
        assert await wire.close_code() == 1009


async def test_who_does_not_leave_is_cut_off(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket_protocol, "_CLOSE_S", 0.1)
    async with opened(served) as wire:
        await wire.send(frame(3))
        assert await wire.close_code() == 1002
        with pytest.raises(ConnectionError):
            await flood(wire)


async def flood(wire: Wire) -> None:
    async with asyncio.timeout(_PATIENCE_S):
        while True:
            await wire.send(bytes(1 << 16))


@pytest.mark.parametrize("code", [1000, 1001, 1003, 1007, 1011, 1014, 3000, 4999])
async def test_a_close_is_answered_with_its_code(served: Served, code: int) -> None:
    async with opened(served) as wire:
        await wire.send(close(code, "wörd".encode()))
        assert await wire.close_code() == code


async def test_a_close_without_a_code_is_answered(served: Served) -> None:
    async with opened(served) as wire:
        await wire.send(frame(CLOSE))
        assert await wire.close_code() in (None, 1000)


async def test_nothing_counts_after_a_close(served: Served) -> None:
    async with opened(served) as wire:
        await wire.send(close(1000), frame(TEXT, _HELLO), frame(CONT, b"x"), b"\xff" * 40)
        assert await wire.close_code() == 1000


async def test_a_ping_within_a_message_is_answered_at_once(served: Served) -> None:
    async with opened(served) as wire:
        await wire.send(frame(TEXT, _HELLO[:5], fin=False), frame(PING, b"are you there"))
        assert await wire.receive() == (PONG, b"are you there")
        await wire.send(frame(PONG, b"unasked"), frame(CONT, b"", fin=False))
        await wire.send(frame(CONT, _HELLO[5:]))
        opcode, payload = await wire.receive()
        assert (opcode, json.loads(payload)["type"]) == (TEXT, "penstock.pong")


async def test_the_longest_control_frame_and_message(served: Served) -> None:
    async with opened(served) as wire:
        await wire.send(frame(PING, bytes(range(125))))
        assert await wire.receive() == (PONG, bytes(range(125)))
        message = json.dumps({"type": "penstock.ping", "pad": ""}).encode()
        padded = message[:-2] + b"x" * ((1 << 20) - len(message)) + message[-2:]
        assert len(padded) == 1 << 20
        await wire.send(frame(TEXT, padded))
        assert (await wire.receive())[0] == TEXT


async def test_a_character_split_over_fragments_and_segments(served: Served) -> None:
    message = json.dumps({"type": "nö €😀"}, ensure_ascii=False).encode()
    async with opened(served) as wire:
        parts = [frame(TEXT, message[:1], fin=False)]
        parts += [frame(CONT, message[i : i + 1], fin=False) for i in range(1, len(message))]
        for byte in b"".join([*parts, frame(CONT)]):  # and every byte in a write of its own
            await wire.send(bytes([byte]))
        opcode, payload = await wire.receive()
        assert opcode == TEXT
        assert "nö €😀" in json.loads(payload)["error"]["message"]


async def test_a_cut_within_a_frame_is_a_reader_that_left(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(step_s=0.01) as served:
        async with opened(served) as wire:
            body = {"type": "response.create", "input": "hi", "store": False, "ignore_eos": True}
            await wire.send(frame(TEXT, json.dumps(body).encode()), frame(TEXT, _HELLO)[:7])
            await served.submitted()
            await wire.receive()
        await served.aborted()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


@pytest.mark.parametrize("size", [0, 1, 125, 126, (1 << 16) - 1, 1 << 16])
def test_frames_that_we_write_ourselves(size: int) -> None:
    payload = b"x" * size
    assert frame_head(size) + payload == Frame(Opcode.TEXT, payload).serialize(mask=False)
