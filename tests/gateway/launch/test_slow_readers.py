"""Clients that ask and never read: they cost little, disturb nobody, and are let go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.engine.text import Tokenizer

from ...system.processes import metric
from ..conftest import ANSWER, PATIENCE_S, until
from ..fake_engine import FakeEngine
from . import gateway_for_slow_readers
from .test_process import client_of, launched

# What they all ask for: more than all buffers between hold.
_NUM_TOKENS, _MIN_BYTES = 900, 800_000
_MUCH: dict[str, Any] = {
    "input": "Tell me a story.",
    "background": True,
    "ignore_eos": True,
    "max_output_tokens": _NUM_TOKENS,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 20,
}
_NUM_READERS, _NUM_ROUNDS = 3, 5  # of streams that are read, and one after the other
_FOREVER_S = 20 * PATIENCE_S
_KIB_PER_CLIENT = 512  # the transport's 64, a batch of events with logprobs, the connection


@dataclass
class Gateway:
    """One with a response of `_MUCH`, and clients that do not read it."""

    process: psutil.Process
    port: int
    http: httpx.AsyncClient
    response_id: str
    clients: contextlib.ExitStack

    def join(self, num: int) -> None:
        """So many clients ask, half of them over WebSockets."""
        for number in range(num):
            client = self.clients.enter_context(_connected(self.port))
            _ask(client, self.response_id, over_websocket=number % 2 == 1)

    @property
    def num_clients(self) -> int:
        found = self.process.net_connections("tcp")
        return sum(each.status == psutil.CONN_ESTABLISHED for each in found)

    @property
    def num_bytes(self) -> int:
        return int(self.process.memory_info().rss)

    async def num_let_go(self) -> float:
        return await metric(self.http, "slow_readers_closed_total")


@contextlib.asynccontextmanager
async def _gateway(
    model_path: Path, tokenizer: Tokenizer, folder: Path, *, max_stall_s: float
) -> AsyncIterator[Gateway]:
    address = f"{folder}/engine.sock"
    module = gateway_for_slow_readers.__name__
    flags = {"module": module, "log": folder / "log", "ping_interval_s": _FOREVER_S}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as clients:
        patch.setenv(gateway_for_slow_readers.PATIENCE, str(max_stall_s))
        process, port, status_fd = clients.enter_context(
            launched(str(model_path), address, **flags)
        )
        async with (
            FakeEngine(address, tokenizer.encode(ANSWER), step_s=0.001) as engine,
            client_of(port) as http,
        ):
            engine.others = tuple(range(10, 30))
            assert b"ready" in await asyncio.to_thread(os.read, status_fd, 1000)
            made = await http.post("/v1/responses", json=_MUCH)
            assert made.status_code == 200, made.text
            response_id = made.json()["id"]
            async with asyncio.timeout(PATIENCE_S):
                while await _status(http, response_id) != "incomplete":  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            of_process = psutil.Process(process.pid)
            yield Gateway(of_process, port, http, response_id, clients)


async def _status(http: httpx.AsyncClient, response_id: str) -> str:
    return str((await http.get(f"/v1/responses/{response_id}")).json()["status"])


def _connected(port: int) -> socket.socket:
    """As over a network, with little room: on loopback a segment has 64 KiB, and buffers many."""
    client = socket.socket()
    client.settimeout(PATIENCE_S)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1400)
    client.connect(("127.0.0.1", port))
    return client


def _ask(client: socket.socket, response_id: str, *, over_websocket: bool) -> None:
    """Ask for all events of a response."""
    if not over_websocket:
        path = f"/v1/responses/{response_id}?stream=true"
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        return
    client.sendall(
        b"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
        b"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    assert client.recv(1024).startswith(b"HTTP/1.1 101")
    message = json.dumps({"type": "penstock.resume", "response_id": response_id}).encode()
    assert len(message) < 126
    # A masked text frame; a mask of zeros leaves the bytes as they are.
    client.sendall(bytes([0x81, 0x80 | len(message), 0, 0, 0, 0]) + message)


async def _check_stream(http: httpx.AsyncClient) -> None:
    """One that is read has all its events."""
    body = {"input": "hello", "stream": True, "store": False}
    text = (await http.post("/v1/responses", json=body)).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["type"] == "response.completed"
    assert "".join(e["delta"] for e in events if e["type"].endswith(".delta")) == ANSWER


@pytest.mark.parametrize("num", [100, pytest.param(1000, marks=pytest.mark.exhaustive)])
async def test_they_cost_little_and_disturb_nobody(
    model_path: Path, tokenizer: Tokenizer, tmp_path: Path, num: int
) -> None:
    async with _gateway(model_path, tokenizer, tmp_path, max_stall_s=_FOREVER_S) as gateway:
        await _check_stream(gateway.http)
        before = gateway.num_bytes
        await asyncio.to_thread(gateway.join, num)
        in_rounds = []
        for _ in range(_NUM_ROUNDS):
            await asyncio.gather(*(_check_stream(gateway.http) for _ in range(_NUM_READERS)))
            in_rounds.append(gateway.num_bytes)
        assert gateway.num_clients >= num
        assert await gateway.num_let_go() == 0
        asked_for = await gateway.http.get(f"/v1/responses/{gateway.response_id}")
        assert len(asked_for.content) > _MIN_BYTES
        print(f"\n{num} clients: {before >> 20} → {max(in_rounds) >> 20} MiB")
        assert (max(in_rounds) - before) / num < _KIB_PER_CLIENT << 10
        assert in_rounds[-1] - in_rounds[0] < 16 << 20, "it grows while they do not read"


@pytest.mark.exhaustive
async def test_they_are_let_go(model_path: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    num = 20
    async with _gateway(model_path, tokenizer, tmp_path, max_stall_s=0.3) as gateway:
        # None leaves by itself: whoever is gone was let go.
        await asyncio.to_thread(gateway.join, num)
        await until(lambda: not gateway.num_clients)
        assert await gateway.num_let_go() == num
        await _check_stream(gateway.http)
