"""What a server must refuse, and how: invalid requests, garbage, broken frames.

A refusal is a status from 400 to 499 with OpenAI's error object; on a WebSocket, an error event
(the socket stays open) or a close code of RFC 6455. Anything else is a problem, as is any effect
on a stream beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import struct
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson

from penstock.load.client.websocket import socket_body
from penstock.load.soak.scene import (
    ANSWER_S,
    ERROR_FIELDS,
    LARGE_BYTES,
    Scene,
    open_lane,
    open_socket,
    post,
    raw_connection,
    unended,
)
from penstock.load.workloads.datasets import WORDS

_PROMPT_BYTES = 4_000_000  # just below the limit of a body
_CHAT, _COMPLETIONS, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_USER = [{"role": "user", "content": "hello"}]


def _json(**values: Any) -> bytes:
    return orjson.dumps(values)


# Path and body.
REQUESTS: tuple[tuple[str, bytes], ...] = (
    (_CHAT, b""),
    (_CHAT, b"{"),
    (_CHAT, b"[]"),
    (_CHAT, b"null"),
    (_CHAT, b'{"messages": "\xff\xfe"}'),
    (_CHAT, b"[" * 50_000),
    (_CHAT, b'{"a":' * 5_000),
    (_CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}'),
    (_CHAT, _json(messages=[])),
    (_CHAT, _json(messages="hello")),
    (_CHAT, _json(messages=["hello"])),
    (_CHAT, _json(messages=[{"role": 1, "content": "x"}])),
    (_CHAT, _json(messages=[{"role": "user", "content": 7}])),
    (_CHAT, _json(messages=_USER, model="no-such-model")),
    (_CHAT, _json(messages=_USER, model=7)),
    (_CHAT, _json(messages=_USER, max_tokens=0)),
    (_CHAT, _json(messages=_USER, max_tokens=1.5)),
    (_CHAT, _json(messages=_USER, max_tokens="many")),
    (_CHAT, _json(messages=_USER, temperature="hot")),
    (_CHAT, _json(messages=_USER, stream="yes")),
    (_COMPLETIONS, _json()),
    (_COMPLETIONS, _json(prompt=7)),
    (_COMPLETIONS, _json(prompt=[])),
    (_COMPLETIONS, _json(prompt=[-1])),
    (_COMPLETIONS, _json(prompt=["a", 1])),
    (_COMPLETIONS, _json(prompt="a", max_tokens=-2)),
    (_RESPONSES, _json()),
    (_RESPONSES, _json(input=7)),
    (_RESPONSES, _json(input="a", previous_response_id="resp_gone")),
    (_RESPONSES, _json(input="a", max_output_tokens=0)),
    ("/v1/no/such/path", _json()),
)
MESSAGES = (
    "",
    "{",
    "[]",
    "not JSON",
    '{"type": 7}',
    '{"type": "response.destroy"}',
    '{"type": "response.create"}',
    '{"type": "response.create", "input": 7}',
    '{"type": "response.create", "input": "x", "model": "no-such-model"}',
    '{"type": "response.create", "input": "x", "stream_id": 7}',
    '{"type": "response.create", "input": "x", "previous_response_id": "resp_gone"}',
    '{"type": "penstock.cancel", "response_id": "resp_gone"}',
)


async def ask_nonsense(scene: Scene, rng: random.Random) -> None:
    path, body = rng.choice(REQUESTS)
    await post(scene, path, body, actor="nonsense", what=f"{path} {body[:60]!r}")


async def ask_too_much(scene: Scene, rng: random.Random) -> None:
    """A prompt beyond the context, as text and as token ids, or a body far too large."""
    num = scene.max_model_len + 1
    bodies: tuple[tuple[str, str, Callable[[], bytes]], ...] = (
        ("too long a text", _COMPLETIONS, lambda: _json(prompt="word " * num)),
        ("too many token ids", _COMPLETIONS, lambda: _json(prompt=[1] * num)),
        ("too long a chat", _CHAT, lambda: _json(messages=_USER * num)),
        ("too long an input", _RESPONSES, lambda: _json(input="word " * num)),
        ("too large a body", _CHAT, lambda: _json(messages=_USER, user="x" * LARGE_BYTES)),
    )
    what, path, make = rng.choice(bodies)
    await post(scene, path, make(), actor="nonsense", what=what)


def large_prompts() -> list[tuple[str, bytes]]:
    """Path and body of prompts of 4 MB, in every shape that a prompt can have."""
    text = "".join(f"{word} " for word in random.Random(0).choices(WORDS, k=_PROMPT_BYTES // 4))
    text = text[:_PROMPT_BYTES]
    return [
        (_COMPLETIONS, _json(prompt=text)),
        (_CHAT, _json(messages=[{"role": "user", "content": text}])),
        (_RESPONSES, _json(input=text)),
        (_CHAT, _json(messages=_USER * (_PROMPT_BYTES // 34))),
        (_COMPLETIONS, _json(prompt=[1] * (_PROMPT_BYTES // 2))),
    ]


async def send_nonsense(scene: Scene, rng: random.Random) -> None:
    """Invalid messages on a socket beside a running stream."""
    call = scene.call(rng)
    async with open_socket(scene.http) as socket:
        with open_lane(scene, "beside nonsense", call) as lane:
            await socket.create("good", socket_body(call), lane)
            for message in rng.sample(MESSAGES, k=4):
                await socket.send(message)
                await _error_event(scene, socket.errors, message)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(lane.ended.wait(), ANSWER_S)
            unended(lane)


async def _error_event(scene: Scene, errors: asyncio.Queue[dict[str, Any]], message: str) -> None:
    try:
        event = await asyncio.wait_for(errors.get(), ANSWER_S)
    except TimeoutError:
        event = {"type": "nothing", "status": 0, "error": {}}
    is_refusal = event["type"] == "error" and 400 <= event.get("status", 0) < 500
    if not (is_refusal and set(event["error"]) >= ERROR_FIELDS):
        scene.journal.problem("nonsense", f"the message {message!r} was answered by {event}")


# -- below HTTP and JSON ----------------------------------------------------------------------


def _frame(
    opcode: int, payload: bytes = b"", *, first: int = 0x80, is_masked: bool = True
) -> bytes:
    """A short WebSocket frame, valid or not; its mask is zeros, which changes nothing."""
    mask = b"\0\0\0\0" if is_masked else b""
    size = 0x80 * is_masked | min(len(payload), 126)
    long_size = struct.pack("!H", len(payload)) if len(payload) >= 126 else b""
    return bytes([first | opcode, size]) + long_size + mask + payload


_TEXT, _CLOSE, _PING = 1, 8, 9
_HEAD_OF_LARGE = struct.pack("!BBQI", 0x80 | _TEXT, 0xFF, LARGE_BYTES, 0)
# What is wrong, the bytes, and the close code that answers them.
FRAMES = (
    ("no mask", _frame(_TEXT, b"{}", is_masked=False), 1002),
    ("a reserved opcode", _frame(3), 1002),
    ("a reserved bit", _frame(_TEXT, b"{}", first=0xC0), 1002),
    ("a ping in pieces", _frame(_PING, first=0), 1002),
    ("a ping too long", _frame(_PING, b"x" * 126), 1002),
    ("a continuation of nothing", _frame(0, b"x"), 1002),
    ("a close with half a code", _frame(_CLOSE, b"\3"), 1002),
    ("a close with a code of nobody", _frame(_CLOSE, b"\0\1"), 1002),
    ("text that is no UTF-8", _frame(_TEXT, b"\xff\xfe"), 1007),
    ("a message too large", _HEAD_OF_LARGE + b"x" * 1000, 1009),
)


async def send_bad_frames(scene: Scene, rng: random.Random) -> None:
    what, frames, right_code = rng.choice(FRAMES)
    code = 0
    with contextlib.suppress(TimeoutError, ConnectionError, aiohttp.ClientError):
        async with (
            asyncio.timeout(ANSWER_S),
            scene.http.ws_connect(_RESPONSES, max_msg_size=0, autoclose=False) as websocket,
        ):
            os.write(websocket.get_extra_info("socket").fileno(), frames)
            while (message := await websocket.receive()).type is aiohttp.WSMsgType.TEXT:
                pass
            code = message.data if message.type is aiohttp.WSMsgType.CLOSE else 0
    if code != right_code:
        scene.journal.problem("bad frames", f"{what}: closed with {code}, must be {right_code}")


async def send_garbage(scene: Scene, rng: random.Random) -> None:
    """Bytes that are not HTTP: expects an answer of 400, or the end of the connection."""
    data = rng.choice(
        (
            rng.randbytes(rng.randint(1, 4000)) + b"\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
            b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),  # TLS
        )
    )
    answer: bytes | None = b""
    async with raw_connection(scene) as (reader, writer):
        writer.write(data)
        try:
            answer = await asyncio.wait_for(reader.read(65536), ANSWER_S)
        except TimeoutError:
            answer = None
    if answer is None or (answer and not answer.startswith(b"HTTP/1.1 4")):
        scene.journal.problem("garbage", f"{data[:40]!r} was answered by {answer!r:.80}")
