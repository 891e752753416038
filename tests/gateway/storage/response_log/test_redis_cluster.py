"""Response logs on a cluster: each depends on the node that its stream lies on, and on no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.record import LogHeader

from ....redis_server import RedisCluster, RedisServer
from .conftest import Gateway, Gateways
from .records import PATIENCE_S, TENANT, add_delta, add_end, header, read_to_end, seen, until
from .stored import beats, is_broken, lease_key, log_key, owned, owned_key

pytestmark = [pytest.mark.redis, pytest.mark.process_kills]

_NUM_OF_EACH = 3


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def cluster(shared_cluster: RedisCluster) -> RedisCluster:
    """Empty; all of its nodes serve."""
    for node in shared_cluster.nodes:
        if not node.runs:
            node.start()
        with node.client() as client:
            client.flushall()
    shared_cluster.wait_until_ok()
    return shared_cluster


def node_of(cluster: RedisCluster, made: LogHeader) -> RedisServer:
    return cluster.node_of(log_key(made.response_id))


def headers(cluster: RedisCluster) -> list[LogHeader]:
    """Some of each node."""
    found: dict[int, list[LogHeader]] = {node.port: [] for node in cluster.nodes}
    while any(len(some) < _NUM_OF_EACH for some in found.values()):
        made = header()
        found[node_of(cluster, made).port].append(made)
    return [made for some in found.values() for made in some[:_NUM_OF_EACH]]


async def two_gateways(
    gateways: Gateways, cluster: RedisCluster
) -> tuple[Gateway, Gateway, RedisServer]:
    """And a node that keeps nothing of theirs but streams."""
    while True:
        made = await gateways.make(cluster.url), await gateways.make(cluster.url)
        ids = [gateway.store.gateway_id for gateway in made]
        keys = [f"penstock:{what}:{each}" for each in ids for what in ("lease", "owned", "control")]
        busy = [cluster.node_of(key) for key in ("penstock:gateways", *keys)]
        free = [node for node in cluster.nodes if node not in busy]
        if free:
            return *made, free[0]
        for gateway in made:
            await gateway.store.close()


async def begun(gateway: Gateway, made: LogHeader) -> ResponseLog:
    log = await gateway.store.create(made)
    gateway.run(log)
    return log


async def test_a_node_that_stands_still_delays_no_stream_of_another(
    cluster: RedisCluster, gateways: Gateways
) -> None:
    here, there, still = await two_gateways(gateways, cluster)
    logs = [await begun(here, made) for made in headers(cluster)]
    replicas = [await there.store.find(TENANT, log.header.response_id) for log in logs]
    late = [log for log in logs if node_of(cluster, log.header) is still]
    with still.paused():
        for log in logs:
            add_delta(log)
        for log, replica in zip(logs, replicas, strict=True):
            if log not in late:
                await seen(log, 1)
                await seen(replica, 1)
        assert [log.replica.num_visible for log in late] == [0] * len(late)
    for log in logs:
        await seen(log, 1)
        add_end(log)
    for log, replica in zip(logs, replicas, strict=True):
        assert await read_to_end(replica) == await read_to_end(log)
        assert log.is_resumable


async def test_a_cancel_goes_to_the_owner(cluster: RedisCluster, gateways: Gateways) -> None:
    here, there, _ = await two_gateways(gateways, cluster)
    logs = [await begun(here, made) for made in headers(cluster)]
    for log in logs:
        await there.store.cancel(TENANT, log.header.response_id)
    await until(lambda: len(here.cancelled) == len(logs))
    assert set(here.cancelled) == {log.header.response_id for log in logs}


async def test_a_killed_node_costs_its_own_streams_and_no_others(
    cluster: RedisCluster, gateways: Gateways, caplog: pytest.LogCaptureFixture
) -> None:
    here, there, killed = await two_gateways(gateways, cluster)
    logs = [await begun(here, made) for made in headers(cluster)]
    lost = [log for log in logs if node_of(cluster, log.header) is killed]
    killed.kill()
    for log in logs:
        if log not in lost:
            add_delta(log)
            await seen(log, 1)
    with here.impatient():
        for log in lost:
            add_delta(log)
            await seen(log, 1)
    assert [log.is_resumable for log in logs] == [log not in lost for log in logs]
    wanted = headers(cluster)  # in one turn of the loop: they leave together
    made = await asyncio.gather(*(begun(here, each) for each in wanted), return_exceptions=True)
    for each, answer in zip(wanted, made, strict=True):
        if node_of(cluster, each) is killed:
            assert isinstance(answer, StoreUnavailableError)
        else:
            assert isinstance(answer, ResponseLog)
    killed.start()
    await asyncio.to_thread(cluster.wait_until_ok)
    for log in logs:
        add_end(log)
        await read_to_end(log)
    running = {log.header.response_id for log in made if isinstance(log, ResponseLog)}
    with cluster.node_of(owned_key(here.store)).client() as client:
        await until(lambda: owned(client, here.store).keys() == running)
    with killed.client() as client:
        await until(lambda: all(is_broken(client, log.header.response_id) for log in lost))
    assert not there.carried_on
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.exhaustive
async def test_what_can_be_taken_over_waits_for_no_killed_node(
    cluster: RedisCluster, gateways: Gateways
) -> None:
    here, there, killed = await two_gateways(gateways, cluster)
    logs = [await begun(here, made) for made in headers(cluster)]
    lost = {log.header.response_id for log in logs if node_of(cluster, log.header) is killed}
    killed.kill()
    with cluster.node_of(lease_key(here.store)).client() as client:
        await here.die(client)
    everything = {log.header.response_id for log in logs}
    await until(lambda: there.carried_on.keys() == everything - lost)
    killed.start()
    await until(lambda: there.carried_on.keys() == everything)


async def test_a_gateway_whose_lease_cannot_be_looked_at_is_not_dead(
    cluster: RedisCluster, gateways: Gateways
) -> None:
    """Its node comes back without the lease, as a replica may that is promoted."""
    while True:
        here, there = await gateways.make(cluster.url), await gateways.make(cluster.url)
        killed = cluster.node_of(lease_key(here.store))
        looking = cluster.node_of(lease_key(there.store))
        if killed not in (cluster.node_of("penstock:gateways"), looking):
            break
        for gateway in (here, there):
            await gateway.store.close()
    made = next(each for each in headers(cluster) if node_of(cluster, each) is not killed)
    log = await begun(here, made)
    here.settings.beat_s = PATIENCE_S  # it renews its lease when it is told to look around
    with looking.client() as client:
        killed.kill()
        await beats(client, there.store)  # there it looks for dead gateways at each
        killed.start()
        await asyncio.to_thread(cluster.wait_until_ok)
        with killed.client() as its_client:
            its_client.delete(lease_key(here.store))
            await beats(client, there.store)
            assert owned(its_client, here.store) == {log.header.response_id: 1}
            assert not there.carried_on
            its_client.xadd(f"penstock:control:{here.store.gateway_id}", {"look": ""})
        await here.is_known()
        await beats(client, there.store)
    assert not there.carried_on
    add_delta(log)
    await seen(log, 1)
    assert not here.lost
