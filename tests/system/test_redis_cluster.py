"""kill -9 of a node of a Redis Cluster while two gateways write streams to all three of its nodes.

Whoever reads a stream reads it to its end on the connection that it has: only streams whose log lay
on the killed node may lose their resumption. What is new is served or gets 503, never 500; with the
node back, or its replica promoted, everything works as before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.gateway.storage.response_log.redis_stream import log_key
from tests.redis_server import RedisCluster, RedisServer

from .processes import END_S, Served, serve, suspended
from .stream_checker import CheckedStream, ExpiredError, replay

# What one node's death costs is shown by the gateway's tests of clusters; here with whole servers.
pytestmark = [pytest.mark.redis, pytest.mark.process_kills, pytest.mark.exhaustive]

_NUM_TOKENS = 200
_NUM_AT_ONCE = 12  # streams begun
_LEAVES_AFTER = 20  # events
_TRANSPORTS = ("sse", "websocket")
_QUIET_S = 0.3
_HELLO = {"model": "demo", "input": "Hello", "max_output_tokens": 8, "temperature": 0}
_VISITED: dict[str, dict[str, Any]] = {"/v1/responses": _HELLO, "/v1/conversations": {}}
_PATIENCE_MS = "2000"  # a healthy node of a busy machine is not given up


def _stream(served: Served, transport: str, *, leaves_after: int = 0) -> CheckedStream:
    body = {
        "model": "demo",
        "input": "Tell me a story about a fox.",
        "max_output_tokens": _NUM_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    return CheckedStream(
        body=body,
        begins_at=served.base_url,
        resumes_at=served.base_url,
        transport=transport,
        leaves_after=leaves_after,
    )


def _key(response_id: str | None) -> str:
    assert response_id is not None
    key = log_key(response_id)
    assert key is not None
    return key


class _Streams:
    """Some on each node over each transport, amid their text while the engine stands still."""

    def __init__(self, cluster: RedisCluster, served: Served) -> None:
        self._cluster = cluster
        self._served = served
        self.streams: list[CheckedStream] = []
        self.reading: list[asyncio.Task[CheckedStream]] = []

    @contextlib.asynccontextmanager
    async def stopped_amid(self) -> AsyncIterator[None]:
        child = self._served.child("penstock-engine")
        with contextlib.ExitStack() as stack:
            while not self._is_spread():
                for transport in _TRANSPORTS * (_NUM_AT_ONCE // 2):
                    self.streams.append(_stream(self._served, transport))
                    self.reading.append(asyncio.create_task(self.streams[-1].read()))
                async with asyncio.timeout(END_S):
                    while not all(stream.text for stream in self.streams):  # noqa: ASYNC110
                        await asyncio.sleep(0.001)
            stack.enter_context(suspended(child))
            num_events = -1
            while num_events != (num_events := sum(len(s.events) for s in self.streams)):  # noqa: ASYNC110
                await asyncio.sleep(_QUIET_S)
            yield

    def _is_spread(self) -> bool:
        """Those that will not have ended before the engine is stopped."""
        found = {
            (self.node_of(stream).port, stream.transport)
            for stream in self.streams
            if stream.text and len(stream.events) < _NUM_TOKENS / 2
        }
        return len(found) == len(self._cluster.nodes) * len(_TRANSPORTS)

    def node_of(self, stream: CheckedStream) -> RedisServer:
        return self._cluster.node_of(_key(stream.response_id))


class _Visitor:
    """Asks again and again for what needs Redis, and counts what it gets."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.statuses: Counter[tuple[str, int]] = Counter()

    @contextlib.asynccontextmanager
    async def calling(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._call(path, body)) for path, body in _VISITED.items()]
            yield
            for task in tasks:
                task.cancel()

    async def is_refused(self) -> None:
        """Wait until something was, everywhere."""
        async with asyncio.timeout(END_S):
            while not all(self.statuses[path, 503] for path in _VISITED):  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _call(self, path: str, body: dict[str, Any]) -> None:
        async with httpx.AsyncClient(base_url=self._served.base_url, timeout=END_S) as client:
            while True:
                answer = await client.post(path, json=body)
                if answer.status_code != 200:
                    assert answer.status_code == 503, answer.text
                    assert answer.json()["error"]["code"] == "session_store_unavailable"
                self.statuses[path, answer.status_code] += 1
                await asyncio.sleep(0.05)


def _bystander(cluster: RedisCluster) -> RedisServer:
    """A node that keeps no gateway's lease and not the gateways' list."""
    key = "penstock:gateways"
    with cluster.node_of(key).client() as client:
        gateways = [gateway.decode() for gateway in client.smembers(key)]
    busy = [cluster.node_of(f"penstock:lease:{gateway}") for gateway in gateways]
    assert len(busy) == 2
    return next(node for node in cluster.nodes if node not in busy)


async def _check_everything_works(served: Served) -> None:
    """New conversations on every node, clients that leave and return included."""
    async with httpx.AsyncClient(base_url=served.base_url, timeout=END_S) as client:

        async def works() -> bool:
            turn = await client.post("/v1/responses", json=_HELLO)
            if turn.status_code != 200:
                assert turn.status_code == 503, turn.text
                return False
            again = {**_HELLO, "previous_response_id": turn.json()["id"]}
            turn = await client.post("/v1/responses", json=again)
            return turn.status_code == 200

        async with asyncio.timeout(END_S):
            num_in_a_row = 0
            while num_in_a_row < 9:  # of whatever node and gateway
                num_in_a_row = num_in_a_row + 1 if await works() else 0
    streams = [_stream(served, way, leaves_after=_LEAVES_AFTER) for way in _TRANSPORTS * 2]
    await asyncio.gather(*(stream.read() for stream in streams))
    for stream in streams:
        assert stream.num_connections > 1
        assert stream.response_id is not None
        assert await replay(served.base_url, stream.response_id) == stream.events


def _check_log(served: Served) -> None:
    log = served.log.read_text()
    assert "Traceback" not in log, log
    assert "never retrieved" not in log, log
    assert " ERROR " not in log, log


@contextlib.contextmanager
def _cluster_and_server(
    tmp_path: Path, *flags: str, has_replicas: bool = False
) -> Iterator[tuple[RedisCluster, Served]]:
    with (
        RedisCluster(tmp_path / "cluster", has_replicas=has_replicas) as cluster,
        serve(
            *("--redis-url", cluster.url, "--api-workers", "2", "--disconnect-grace-s", "600"),
            *("--dtype", "float32", *flags),
            log=tmp_path / "log",
        ) as served,
    ):
        yield cluster, served


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisCluster, Served]]:
    path = tmp_path_factory.mktemp("three")
    # A healthy node of a busy machine is not given up.
    with _cluster_and_server(path, "--redis-patience-ms", "2000") as both:
        yield both


@pytest.mark.parametrize("needs_all_slots", [False, True])
async def test_a_node_killed_and_back(
    three_nodes: tuple[RedisCluster, Served], needs_all_slots: bool
) -> None:
    cluster, served = three_nodes
    cluster.configure("cluster-require-full-coverage", "yes" if needs_all_slots else "no")
    ended = await _stream(served, "sse").read()
    killed = _bystander(cluster)
    crowd, visitor = _Streams(cluster, served), _Visitor(served)
    async with visitor.calling():
        async with crowd.stopped_amid():
            killed.kill()
        await asyncio.gather(*crowd.reading)
        for stream in crowd.streams:
            assert stream.outcome == ended.outcome
            assert stream.num_connections == 1
            assert stream.response_id is not None
            if not needs_all_slots and crowd.node_of(stream) is not killed:
                assert await replay(served.base_url, stream.response_id) == stream.events
        await visitor.is_refused()
        killed.start()
        await asyncio.to_thread(cluster.wait_until_ok)
        await _check_everything_works(served)
    print(visitor.statuses)
    for path in _VISITED:
        assert visitor.statuses[path, 200]
    for stream in (ended, *crowd.streams):
        assert stream.response_id is not None
        try:
            events = await replay(served.base_url, stream.response_id)
        except ExpiredError:
            assert stream is not ended
            assert needs_all_slots or crowd.node_of(stream) is killed
        else:
            assert events == stream.events
    _check_log(served)


async def test_a_node_killed_and_its_replica_promoted(tmp_path: Path) -> None:
    flags = ("--redis-patience-ms", "60000")
    with _cluster_and_server(tmp_path, *flags, has_replicas=True) as (cluster, served):
        killed = cluster.nodes[0]
        crowd, visitor = _Streams(cluster, served), _Visitor(served)
        async with visitor.calling():
            async with crowd.stopped_amid():
                killed.kill()
            await asyncio.to_thread(cluster.wait_until_promoted, killed)
            await asyncio.gather(*crowd.reading)
            for stream in crowd.streams:
                assert stream.num_connections == 1
                assert stream.response_id is not None
                assert await replay(served.base_url, stream.response_id) == stream.events
            await _check_everything_works(served)
            killed.start()  # a replica now
            await asyncio.to_thread(cluster.wait_until_ok)
            await _check_everything_works(served)
        print(visitor.statuses)
        _check_log(served)
