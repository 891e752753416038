"""Limits that gateways share."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from penstock.gateway.admission.quotas import Hold, LocalQuotas
from penstock.gateway.admission.redis_quotas import RedisQuotas
from penstock.gateway.auth.callers import Caller
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress

from ...redis_server import RedisCluster, RedisServer
from ..conftest import PATIENCE_S, RedisPath, until
from .beds import LEASE_S, RedisBed, caller, refused


@pytest.mark.redis
async def test_gateways_share_limits(redis_bed: RedisBed) -> None:
    one, other, who = redis_bed.quotas(), redis_bed.quotas(), caller(max_concurrent_requests=2)
    first = await one.reserve(who, 1)
    await other.reserve(who, 1)
    await refused(one, who)
    await refused(other, who)
    first.release(1)
    await redis_bed.settled()
    await other.reserve(who, 1)


@pytest.mark.redis
async def test_what_a_dead_gateway_held_is_free_after_its_lease(redis_bed: RedisBed) -> None:
    who = caller(max_concurrent_requests=1)
    living, dead = redis_bed.quotas(), redis_bed.quotas()
    await dead.reserve(who, 1)
    assert dead._keeper is not None
    dead._keeper.cancel()
    redis_bed.leases(who, passed_s=LEASE_S / 2)
    await refused(living, who)
    redis_bed.leases(who, passed_s=LEASE_S / 2)
    await living.reserve(who, 1)


@pytest.mark.redis
async def test_a_gateway_that_lives_renews_its_leases(redis_bed: RedisBed) -> None:
    now_s, who = 0.0, caller(max_concurrent_requests=1)
    quotas = redis_bed.quotas(clock=lambda: now_s)
    await quotas.reserve(who, 1)
    [before] = redis_bed.leases(who, passed_s=LEASE_S / 2)
    now_s = LEASE_S / 2
    (await quotas.reserve(caller("another", tokens_per_minute=1), 1)).release(1)  # wakes its keeper
    await until(lambda: redis_bed.leases(who) > [before + LEASE_S / 4])
    await refused(redis_bed.quotas(), who)


@pytest.mark.redis
async def test_scripts_survive_their_loss_and_limits_the_absence_of_redis(
    redis_server: RedisServer,
) -> None:
    async with (
        RedisPath(redis_server) as path,
        contextlib.aclosing(RedisBed(path.url)) as bed,
    ):
        now_s = 0.0
        quotas, who = bed.quotas(clock=lambda: now_s), caller(tokens_per_minute=100)
        await quotas.reserve(who, 100)
        await path.lose()
        await quotas.reserve(who, 50)  # this gateway's share is a half
        await refused(quotas, who, 45)
        with redis_server.client() as client:
            client.script_flush()
        path.find()
        now_s = 1.1  # when Redis is asked again
        # It knows no script, but still what was used.
        await refused(quotas, who, 95)
        await quotas.reserve(caller("another", requests_per_minute=1), 1)


@pytest.mark.redis
async def test_all_of_a_tenants_keys_lie_in_one_slot(cluster_node: RedisServer) -> None:
    async with contextlib.aclosing(RedisBed(cluster_node.url)) as bed:
        quotas, who = bed.quotas(), caller(tokens_per_minute=10, max_concurrent_requests=1)
        (await quotas.reserve(who, 10)).release(5)
        await bed.settled()
        await quotas.reserve(who, 5)
        await refused(quotas, who)


@pytest.mark.redis
@pytest.mark.exhaustive
@pytest.mark.process_kills
async def test_a_killed_node_of_a_cluster_costs_its_own_tenants_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisCluster(tmp_path / "cluster") as cluster:
        link = RedisLink(RedisAddress.parse(cluster.url), timeout_s=PATIENCE_S)
        fallback = LocalQuotas(asyncio.get_running_loop().time, share=0.5)
        quotas = RedisQuotas(link, fallback, lease_s=LEASE_S)
        killed, *others = cluster.nodes

        def at(nodes: list[RedisServer]) -> Caller:
            names = (f"tenant-{number}" for number in range(1000))
            found = (name for name in names if cluster.node_of(f"{{quota:{name}}}") in nodes)
            return caller(next(found), tokens_per_minute=100, max_concurrent_requests=1)

        lost, well = at([killed]), at(others)
        holds = [await quotas.reserve(who, 10) for who in (lost, well)]
        asked_here: list[str] = []
        reserve_now = fallback.reserve_now

        def noted(who: Caller, num_tokens: float) -> Hold:
            asked_here.append(who.tenant)
            return reserve_now(who, num_tokens)

        monkeypatch.setattr(fallback, "reserve_now", noted)
        killed.kill()
        for hold in holds:  # what is owed there is in front
            hold.release(5)
        await until(lambda: [owed.caller for owed in quotas._owed] == [lost])
        (await quotas.reserve(lost, 10)).release(10)
        hold = await quotas.reserve(well, 10)
        await refused(quotas, well)
        hold.release(10)
        assert asked_here == [lost.tenant]
        killed.start()
        await until(lambda: not quotas._owed)
        await quotas.aclose()
        await link.aclose()
