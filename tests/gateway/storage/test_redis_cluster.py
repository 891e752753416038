"""A link to a cluster of three nodes that are killed, stand still, and hand slots on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from redis import exceptions

from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.redis.link import Script

from ...redis_server import RedisCluster, RedisServer, slot_of
from ..conftest import PATIENCE_S
from .test_redis_link import linked

pytestmark = pytest.mark.redis

_SCRIPT = Script("return redis.call('INCR', KEYS[1])")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


def keys_at(cluster: RedisCluster, node: RedisServer, num: int) -> list[str]:
    names = (f"key-{number}" for number in range(1000))
    return [name for name in names if cluster.node_of(name) is node][:num]


async def test_a_slot_moves_to_another_node(cluster: RedisCluster) -> None:
    source, target = cluster.nodes[:2]
    tag = keys_at(cluster, source, 60)[-1]  # of a slot that no other test needs
    here, gone = f"{{{tag}}}a", f"{{{tag}}}b"
    slot = slot_of(here)
    async with linked(cluster.url) as link:
        assert await link.run(_SCRIPT, [here], []) == 1
        with source.client() as old, target.client() as new:
            old_id, new_id = (each.execute_command("CLUSTER MYID") for each in (old, new))
            new.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", old_id)
            old.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", new_id)
            assert await link.run(_SCRIPT, [gone], []) == 1  # made where the slot goes to
            assert await link.run(_SCRIPT, [here], []) == 2
            old.execute_command("MIGRATE", "127.0.0.1", target.port, here, 0, 60_000)
            for client in (new, old):
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", new_id)
            assert await link.run(_SCRIPT, [here], []) == 3
            assert await link.run(_SCRIPT, [gone], []) == 2
            assert new.get(here) == b"3"


@pytest.mark.exhaustive
@pytest.mark.process_kills
async def test_a_killed_node_costs_its_own_keys_and_no_others(cluster: RedisCluster) -> None:
    killed, *others = cluster.nodes
    (lost,) = keys_at(cluster, killed, 1)
    async with linked(cluster.url) as link:
        assert await link.run(_SCRIPT, [lost], []) == 1
        killed.kill()
        for node in others:
            for key in keys_at(cluster, node, 5):
                with pytest.raises(StoreUnavailableError):
                    await link.run(_SCRIPT, [lost], [])
                await link.run(_SCRIPT, [key], [])
        assert await link.is_up()
        killed.start()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    assert await link.run(_SCRIPT, [lost], []) == 2
                    break
                except StoreUnavailableError:
                    await asyncio.sleep(0.02)
    cluster.wait_until_ok()


@pytest.mark.exhaustive
@pytest.mark.process_kills
async def test_a_node_that_stands_still_delays_no_other(cluster: RedisCluster) -> None:
    still, *others = cluster.nodes
    async with linked(cluster.url) as link:
        assert await link.is_up()
        with still.paused():
            waiting = [
                asyncio.create_task(link.run(_SCRIPT, [key], []))
                for key in keys_at(cluster, still, 50)
            ]
            async with asyncio.timeout(PATIENCE_S / 2):
                for node in others:
                    for key in keys_at(cluster, node, 5):
                        await link.run(_SCRIPT, [key], [])
            assert not any(task.done() for task in waiting)
        await asyncio.gather(*waiting, return_exceptions=True)
    cluster.wait_until_ok()


async def test_keys_of_several_slots_are_our_mistake(cluster: RedisCluster) -> None:
    keys = [keys_at(cluster, node, 1)[0] for node in cluster.nodes]
    async with linked(cluster.url) as link:
        with pytest.raises(exceptions.ClusterCrossSlotError):
            await link.run(_SCRIPT, keys, [])


async def test_a_server_without_a_cluster_is_named_in_the_log(
    shared_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(f"redis+cluster://127.0.0.1:{shared_server.port}") as link:
        with pytest.raises(StoreUnavailableError):
            await link.run(_SCRIPT, ["key"], [])
    assert "cluster support disabled" in caplog.text
