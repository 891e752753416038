"""Hostile actors of a soak against servers that get it wrong, and one that gets it right."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
from collections.abc import AsyncIterator
from hashlib import sha1

import pytest

from penstock.load.soak import hostile
from penstock.load.soak.journal import Journal
from penstock.load.soak.scene import open_scene

from ..support.stream_server import stream_server
from ..support.synthetic.server import serve

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455


@contextlib.asynccontextmanager
async def wrong_server(answer: bytes) -> AsyncIterator[str]:
    """Answers every request alike; its models are in order."""
    models = b'{"data": [{"id": "m", "max_model_len": 100}]}'

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
        await reader.readexactly(int(length) if length.isdigit() else 0)
        key = head.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r")[0]
        accept = base64.b64encode(sha1(key + _GUID).digest())
        body = models if b"/v1/models" in head else answer.replace(b"ACCEPT", accept)
        status = b"200 OK" if body is models else b"400 Bad Request"
        if not answer.startswith(b"HTTP") or body is models:
            size = b"%d" % len(body)
            body = b"HTTP/1.1 %s\r\nConnection: close\r\nContent-Length: %s\r\n\r\n%s" % (
                status,
                size,
                body,
            )
        writer.write(body)

    async with stream_server(serve) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        (b'{"error": {"message": "no", "type": "x", "param": null, "code": "y"}}', True),
        (b'{"error": {"message": "no"}}', False),
        (b'{"error": "no"}', False),
        (b'{"detail": "no"}', False),
        (b"[]", False),
        (b"Bad Request", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", False),
        (b"HTTP/1.1 500 Oh\r\nContent-Length: 28\r\n\r\n" + b'{"error": {"message": "no"}}', False),
        (b"HTTP/1.1 ", False),
    ],
)
async def test_a_wrong_refusal_is_a_problem(answer: bytes, is_right: bool) -> None:
    journal = Journal()
    async with (
        wrong_server(answer) as url,
        open_scene(url, journal, api_key=None) as scene,
    ):
        await hostile.ask_nonsense(scene, random.Random(0))
        assert (journal.problems == []) == is_right, journal.problems
        await hostile.ask_too_much(scene, random.Random(0))
        assert (journal.problems == []) == is_right, journal.problems


async def test_a_socket_that_does_not_mind_broken_frames_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upgraded = (
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
        b"Sec-WebSocket-Accept: ACCEPT\r\n\r\n"
    )
    answers = {b"": False, b"\x88\x02\x03\xe8": False, b"\x88\x02\x03\xea": True}  # 1000, 1002
    for frames, is_right in answers.items():
        journal = Journal()
        async with (
            wrong_server(upgraded + frames) as url,
            contextlib.AsyncExitStack() as stack,
        ):
            scene = await stack.enter_async_context(open_scene(url, journal, api_key=None))
            monkeypatch.setattr(hostile, "FRAMES", hostile.FRAMES[:1])
            await hostile.send_bad_frames(scene, random.Random(0))
        assert (journal.problems == []) == is_right, journal.problems


async def test_garbage_must_not_be_taken_for_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal()
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    async with wrong_server(answer) as url, open_scene(url, journal, api_key=None) as scene:
        await hostile.send_garbage(scene, random.Random(0))
    assert [problem.actor for problem in journal.problems] == ["garbage"]


@pytest.mark.exhaustive
async def test_a_right_server_is_found_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of nonsense once, against the synthetic server."""
    journal = Journal()
    with serve() as server:
        async with open_scene(server.base_url, journal, api_key=None) as scene:
            for request in hostile.REQUESTS:
                monkeypatch.setattr(hostile, "REQUESTS", (request,))
                await hostile.ask_nonsense(scene, random.Random(0))
            for case in hostile.FRAMES:
                monkeypatch.setattr(hostile, "FRAMES", (case,))
                await hostile.send_bad_frames(scene, random.Random(0))
            for seed in range(12):
                await hostile.send_nonsense(scene, random.Random(seed))
                await hostile.send_garbage(scene, random.Random(seed))
                await hostile.ask_too_much(scene, random.Random(seed))
    assert journal.problems == []
    assert [outcome.faults for outcome in journal.outcomes] == [()] * 12
