"""Engines that register in Redis, a gateway that finds them, and TLS between them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from ..certificate import Authority
from ..redis_server import RedisServer
from .endless_streams import EndlessStreams
from .processes import END_S, PENSTOCK, Served, read_line, serve, wait_until

pytestmark = pytest.mark.redis


@dataclass
class Remote:
    """A gateway without an engine of its own, and one elsewhere.

    Attributes:
        options: of further engines.
    """

    redis: RedisServer
    served: Served
    engine: subprocess.Popen[str]
    address: str
    options: tuple[str, ...]


@contextlib.contextmanager
def _engine(log: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [PENSTOCK, "engine", "--listen", "127.0.0.1:0", *options],
            stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=END_S)
        assert process.stdout is not None
        process.stdout.close()


def _address(engine: subprocess.Popen[str]) -> str:
    line = read_line(engine)
    assert line.startswith("penstock engine is ready at 127.0.0.1:")
    return line.split()[5]


@pytest.fixture(scope="module")
def remote(
    long_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Remote]:
    path = tmp_path_factory.mktemp("remote")
    files = Authority(path / "tls").certificate("node")
    with RedisServer(path / "redis", appends=False) as redis, contextlib.ExitStack() as stack:
        common = (
            *long_model, "--redis-url", redis.url, "--tls-cert", files.cert, "--tls-key", files.key,
            "--tls-ca", files.ca,
        )  # fmt: skip
        options = (*common, "--dtype", "float32", "--num-threads", "1")
        engine = stack.enter_context(_engine(path / "engine", *options))
        gateway = serve(*common, "--replicas", "0", "--discover", log=path / "log")
        served = stack.enter_context(gateway)
        yield Remote(redis, served, engine, _address(engine), options)


def _engines(served: Served) -> dict[str, int]:
    """Those that are ready, by name, and how many streams each has; a single one has no list."""
    health = httpx.get(f"{served.base_url}/health", timeout=END_S).json()
    told = health.get("engines", ())
    return {each["name"]: each["num_streams"] for each in told if each["state"] == "ready"}


def _num_registered(redis: RedisServer) -> int:
    with redis.client() as client:
        return len(client.keys("penstock:engines:*:127.0.0.1:*"))


@pytest.mark.exhaustive
async def test_an_engine_elsewhere_is_found_and_serves(remote: Remote) -> None:
    await asyncio.to_thread(wait_until, remote.served.is_ready)
    assert _num_registered(remote.redis) == 1
    _send_plainly(remote.address)
    async with EndlessStreams(remote.served.base_url, 2) as streams:
        await streams.grow(5)
    await streams.check()


def _send_plainly(address: str) -> None:
    """A peer without TLS is hung up on."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=END_S) as peer:
        peer.sendall(b"\x00\x00\x00\x09\x92\xa5hello\x0e")
        with contextlib.suppress(ConnectionError):
            assert peer.recv(4096)[:1] in (b"", b"\x15")  # TLS' alert


@pytest.mark.process_kills
@pytest.mark.exhaustive
async def test_known_engines_serve_while_redis_is_away(remote: Remote) -> None:
    await asyncio.to_thread(wait_until, remote.served.is_ready)
    with remote.redis.paused():
        async with EndlessStreams(remote.served.base_url, 4) as streams:
            await streams.grow(5)
        await streams.check()


@pytest.mark.process_kills
@pytest.mark.exhaustive
async def test_streams_leave_an_engine_that_is_told_to_end(remote: Remote, tmp_path: Path) -> None:
    with _engine(tmp_path / "engine", *remote.options) as other:
        _address(other)
        await asyncio.to_thread(wait_until, lambda: len(_engines(remote.served)) == 2)
        async with EndlessStreams(remote.served.base_url, 20) as streams:
            await streams.grow(5)
            assert all(_engines(remote.served).values())
            remote.engine.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(remote.engine.wait, END_S) == 0
            await streams.grow(5)
        await asyncio.to_thread(wait_until, lambda: not _engines(remote.served))
        await streams.check()
        await asyncio.to_thread(wait_until, lambda: _num_registered(remote.redis) == 1)
