"""Engines that Ray places on three nodes, of which one is lost under many streams."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..certificate import Authority
from ..redis_server import RedisServer
from .processes import Served, serve, wait_until
from .test_engine_pool import read_all

pytest.importorskip("ray", reason="needs pip install 'penstock-llm[ray]'")

pytestmark = [
    pytest.mark.redis,
    pytest.mark.slow,
    # Ray's own: files and sockets that it leaves to the collector, and names that it will change.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
_NAME = "engines.example"


@contextlib.contextmanager
def _cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        yield cluster
    finally:
        cluster.shutdown()


def _engines(served: Served) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        httpx.get(f"{served.base_url}/health", timeout=30).json().get("engines", [])
    )
    return found


async def test_a_node_is_lost_and_no_stream(
    long_model: tuple[str, ...], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    files = Authority(tmp_path / "tls").certificate("node", names=f"DNS:{_NAME}")
    with RedisServer(tmp_path / "redis") as redis, _cluster() as cluster:
        options = (
            "--replicas", "3", "--ray-address", cluster.address, "--discover",
            "--redis-url", redis.url, "--tls-cert", files.cert, "--tls-key", files.key,
            "--tls-ca", files.ca, "--tls-server-name", _NAME, "--dtype", "float32",
            "--num-threads", "1", "--num-blocks", "2048", "--swap-space", "0",
        )  # fmt: skip
        with serve(*long_model, *options, log=tmp_path / "log") as served:
            wait_until(lambda: [each["state"] for each in _engines(served)] == ["ready"] * 3)
            async with httpx.AsyncClient(
                base_url=served.base_url, timeout=120, limits=httpx.Limits(max_connections=50)
            ) as client:
                expected, reading = await read_all(client)
                await reading
                streams, reading = await read_all(client)
                while any(not stream.tokens for stream in streams):  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
                before = _engines(served)
                assert all(each["num_streams"] for each in before)
                lost_s = time.monotonic()
                await asyncio.to_thread(cluster.remove_node, cluster.worker_nodes.copy().pop())
                await reading
            assert streams == expected
            record_property("longest_wait_s", max(each.wait_s(lost_s) for each in streams))
            wait_until(lambda: [each["state"] for each in _engines(served)].count("ready") == 2)
            assert "continue in another one" in (tmp_path / "log").read_text()
