"""Engines that Ray places on its nodes: one is lost under many streams, and others come and go with
the queue."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.engine.config import TlsFiles

from ..certificate import Authority
from ..redis_server import RedisServer
from .endless_streams import EndlessStreams
from .processes import END_S, Served, serve, wait_until

pytest.importorskip("ray", reason="needs pip install 'penstock-llm[ray]'")

pytestmark = [
    pytest.mark.redis,
    pytest.mark.external,
    pytest.mark.process_kills,
    # Ray's own: files and sockets that it leaves to the collector, and names that it will change.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
_NAME = "engines.example"


@contextlib.contextmanager
def _cluster(num_nodes: int) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def _engines(served: Served) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        httpx.get(f"{served.base_url}/health", timeout=END_S).json().get("engines", [])
    )
    return found


def _options(cluster: Any, redis: RedisServer, files: TlsFiles) -> tuple[str, ...]:
    return (
        "--ray-address", cluster.address, "--discover", "--redis-url", redis.url,
        "--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca,
        "--tls-server-name", _NAME, "--dtype", "float32", "--num-threads", "1",
        "--num-blocks", "2048",
    )  # fmt: skip


async def test_a_node_is_lost_and_no_stream(long_model: tuple[str, ...], tmp_path: Path) -> None:
    files = Authority(tmp_path / "tls").certificate("node", names=f"DNS:{_NAME}")
    with RedisServer(tmp_path / "redis") as redis, _cluster(3) as cluster:
        options = ("--replicas", "3", "--swap-space", "0", *_options(cluster, redis, files))
        with serve(*long_model, *options, log=tmp_path / "log") as served:
            wait_until(lambda: [each["state"] for each in _engines(served)] == ["ready"] * 3)
            async with EndlessStreams(served.base_url, 30) as streams:
                await streams.grow(5)
                assert all(each["num_streams"] for each in _engines(served))
                await asyncio.to_thread(cluster.remove_node, cluster.worker_nodes.copy().pop())
                await streams.grow(20)
            await streams.check()
            wait_until(lambda: [each["state"] for each in _engines(served)].count("ready") == 2)
            assert "continue in another one" in (tmp_path / "log").read_text()


async def test_engines_come_and_go_with_the_queue(
    long_model: tuple[str, ...], tmp_path: Path
) -> None:
    files = Authority(tmp_path / "tls").certificate("node", names=f"DNS:{_NAME}")
    with RedisServer(tmp_path / "redis") as redis, _cluster(2) as cluster:
        options = (
            "--replicas", "1", "--max-replicas", "2", "--scale-up-queue-ms", "50",
            "--scale-down-after-s", "3", "--max-num-seqs", "4",
        )  # fmt: skip
        all_options = (*options, *_options(cluster, redis, files))
        with serve(*long_model, *all_options, log=tmp_path / "log") as served:
            wait_until(lambda: _num_ready(served) == 1)
            limits = httpx.Limits(max_connections=40)
            async with httpx.AsyncClient(
                base_url=served.base_url, timeout=300, limits=limits
            ) as client:
                numbers = itertools.count()
                flood = [asyncio.create_task(_flood(client, numbers, served)) for _ in range(30)]
                await asyncio.gather(*flood)
                assert await asyncio.to_thread(_num_ready, served) == 2
            async with EndlessStreams(served.base_url, 2) as streams:
                while await asyncio.to_thread(_num_ready, served) == 2:
                    await streams.grow(5)
                await streams.grow(5)
            await streams.check()
            wait_until(lambda: not _engines(served))
            log = (tmp_path / "log").read_text()
            assert "starting engine 2" in log
            assert "ending an engine of 2" in log


async def _flood(client: httpx.AsyncClient, numbers: Iterator[int], served: Served) -> None:
    """Long prompts, one after the other, until there are two engines."""
    while await asyncio.to_thread(_num_ready, served) < 2:
        prompt = f"{next(numbers)} " * 300
        body = {"model": "demo", "prompt": prompt, "max_tokens": 4}
        (await client.post("/v1/completions", json=body)).raise_for_status()


def _num_ready(served: Served) -> int:
    if engines := _engines(served):
        return [each["state"] for each in engines].count("ready")
    # One engine has no list.
    return int(served.is_ready())
