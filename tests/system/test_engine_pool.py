"""Two engines on one machine: one is killed, or told to end, under many streams, and each stream is
what it would have been, to the token."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .endless_streams import EndlessStreams
from .processes import END_S, Served, children, serve, suspended, wait_until

pytestmark = pytest.mark.process_kills

_BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def pool(long_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("pool") / "log"
    options = (
        "--replicas", "2", "--dtype", "float32", "--log-level", "info", "--kv-transfer", "always",
    )  # fmt: skip
    with serve(*long_model, *options, log=log) as served:
        wait_until(lambda: _are_ready(served))  # a server is with its first engine
        yield served


def _engines(served: Served) -> list[psutil.Process]:
    return children(served.process, "penstock-engine")


def _told(served: Served) -> list[dict[str, object]]:
    """What `/health` says of each engine."""
    health = httpx.get(f"{served.base_url}/health", timeout=END_S).json()
    engines: list[dict[str, object]] = health["engines"]
    return engines


def _are_ready(served: Served) -> bool:
    return [each["state"] for each in _told(served)] == ["ready", "ready"]


def _counted(served: Served, name: str, **labels: str) -> float:
    """Of all engines, since their start."""
    told = httpx.get(f"{served.base_url}/metrics", timeout=END_S).text
    families = text_string_to_metric_families(told)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"penstock:{name}_total" and labels.items() <= sample.labels.items()
    )


async def test_streams_of_a_killed_engine_go_on_at_once_in_the_other(pool: Served) -> None:
    async with EndlessStreams(pool.base_url, 8) as streams:
        await streams.grow(10)
        assert all(each["num_streams"] for each in _told(pool))
        victim = _engines(pool)[0]
        with suspended(psutil.Process(pool.process.pid)):  # no other is started meanwhile
            victim.kill()
            await streams.grow(30)
    assert "continue in another one" in pool.log.read_text()
    await asyncio.to_thread(wait_until, lambda: _are_ready(pool))
    await streams.check()


@pytest.mark.exhaustive
async def test_streams_of_a_draining_engine_leave_it_with_their_kv(pool: Served) -> None:
    async with EndlessStreams(pool.base_url, 50, more=" And about a hen." * 60) as streams:
        await streams.grow(10)
        told = _told(pool)
        assert all(each["num_streams"] for each in told)
        victim = min(_engines(pool), key=lambda each: each.create_time())
        victim.send_signal(signal.SIGTERM)
        await asyncio.to_thread(victim.wait, END_S)
        await streams.grow(30)
    assert "open streams leave it" in pool.log.read_text()
    await asyncio.to_thread(wait_until, lambda: _are_ready(pool))
    await streams.check()
    assert not _counted(pool, "kv_blocks_transferred", direction="refused")
    num_blocks = _counted(pool, "kv_blocks_transferred", direction="received")
    num_left = told[0]["num_streams"]
    assert isinstance(num_left, int)
    assert num_blocks >= 10 * num_left > 0
    assert _counted(pool, "prefix_cache_host_hits") >= num_blocks * _BLOCK_SIZE / 2
