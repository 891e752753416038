"""Engines that register in Redis, and a gateway that finds them: one drains, Redis goes away."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ..certificate import Authority
from ..redis_server import RedisServer
from .processes import PENSTOCK, Served, read_line, serve, wait_until
from .test_engine_pool import Stream, read_all

pytestmark = [pytest.mark.redis, pytest.mark.exhaustive]
_AWAY_S = 10.0  # longer than a lease, and than the time after which all records are read again


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
            process.wait(timeout=60)
        assert process.stdout is not None
        process.stdout.close()


def _engines(served: Served) -> dict[str, str]:
    health = httpx.get(f"{served.base_url}/health").json()
    return {each["name"]: each["state"] for each in health.get("engines", ())}


async def test_engines_are_found_and_lost_and_redis_too(
    long_model: tuple[str, ...], tmp_path: Path
) -> None:
    with RedisServer(tmp_path / "redis") as redis, contextlib.ExitStack() as stack:
        files = Authority(tmp_path / "tls").certificate("node")
        common = (
            *long_model, "--redis-url", redis.url, "--tls-cert", files.cert, "--tls-key", files.key,
            "--tls-ca", files.ca,
        )  # fmt: skip
        options = (*common, "--dtype", "float32", "--num-threads", "1")
        engines = [
            stack.enter_context(_engine(tmp_path / f"engine-{index}", *options))
            for index in range(2)
        ]
        served = stack.enter_context(
            serve(*common, "--replicas", "0", "--discover", log=tmp_path / "log")
        )
        lines = [read_line(engine) for engine in engines]
        assert all(line.startswith("penstock engine is ready at 127.0.0.1:") for line in lines)
        wait_until(lambda: list(_engines(served).values()) == ["ready"] * 2)
        _send_plainly(lines[0].split()[5])
        async with httpx.AsyncClient(
            base_url=served.base_url, timeout=120, limits=httpx.Limits(max_connections=50)
        ) as client:
            expected, reading = await read_all(client)
            await reading

            streams, reading = await read_all(client)
            while any(not stream.tokens for stream in streams):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            assert all(_streams(served).values())
            engines[0].send_signal(signal.SIGTERM)
            await reading
            assert streams == expected
            assert await asyncio.to_thread(engines[0].wait, 60) == 0
            wait_until(lambda: list(_engines(served)) == [])  # a single one needs no list

            with redis.paused():
                streams, reading = await read_all(client)
                await asyncio.sleep(_AWAY_S)
                late: list[Stream]
                late, reading_late = await read_all(client)
                await asyncio.gather(reading, reading_late)
            assert streams == late == expected
        _check_is_registered(redis)


def _streams(served: Served) -> dict[str, int]:
    health = httpx.get(f"{served.base_url}/health").json()
    return {each["name"]: each["num_streams"] for each in health["engines"]}


def _send_plainly(address: str) -> None:
    """A peer without TLS is hung up on."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as peer:
        peer.sendall(b"\x00\x00\x00\x09\x92\xa5hello\x0e")
        with contextlib.suppress(ConnectionError):
            assert peer.recv(4096)[:1] in (b"", b"\x15")  # TLS' alert


def _check_is_registered(redis: RedisServer) -> None:
    with redis.client() as client:
        wait_until(lambda: len(client.keys("penstock:engines:*:127.0.0.1:*")) == 1)
