"""Tenants' limits: one suite for this process's own and for those in Redis."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.admission.quotas import Hold, LocalQuotas, Quotas, TokenBucket
from penstock.gateway.admission.redis_quotas import RedisQuotas
from penstock.gateway.admission.refusals import MAX_RETRY_S, NotAdmittedError, jittered
from penstock.gateway.auth.callers import Caller, TenantLimits
from penstock.gateway.storage.redis.link import RedisLink
from penstock.gateway.storage.redis.url import RedisAddress

from ...redis_server import RedisCluster, RedisServer
from ..conftest import PATIENCE_S, RedisPath, until

LEASE_S = 60.0


def caller(tenant: str = "acme", **limits: float) -> Caller:
    return Caller(tenant=tenant, limits=TenantLimits(**limits))  # type: ignore[arg-type]


@given(
    amounts=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 300)), max_size=60),
    per_minute=st.floats(1, 1000),
)
def test_a_bucket_gives_a_minutes_worth_and_what_flows_in(
    amounts: list[tuple[float, float]], per_minute: float
) -> None:
    bucket, now_s, taken = TokenBucket(per_minute, 0.0), 0.0, 0.0
    for elapsed_s, amount in amounts:
        now_s += elapsed_s
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s == 0.0:
            bucket.take(amount, now_s)
            taken += amount
            # What is more than a bucketful is let in by a full one.
            excess = max(0.0, amount - per_minute)
            assert taken - excess <= per_minute * (1 + now_s / 60) * (1 + 1e-6) + 1e-3
        else:
            assert bucket.wait_s(amount, now_s + wait_s + 1e-6) == 0.0
            return


@given(wait_s=st.floats(0, 1e9))
def test_waits_are_jittered_and_never_longer_than_two_minutes(wait_s: float) -> None:
    waits = {jittered(wait_s) for _ in range(20)}
    assert len(waits) > 10
    assert all(min(wait_s, 100) <= each <= MAX_RETRY_S for each in waits)


class Bed(Protocol):
    def quotas(self) -> Quotas: ...

    async def settled(self) -> None: ...


class LocalBed:
    def __init__(self) -> None:
        self.now_s = 0.0

    def quotas(self) -> Quotas:
        return LocalQuotas(lambda: self.now_s)

    async def settled(self) -> None:
        """At once."""


class RedisBed:
    def __init__(self, url: str) -> None:
        self.url = url
        self.links: list[RedisLink] = []
        self.made: list[RedisQuotas] = []

    def quotas(self, *, clock: Callable[[], float] = time.monotonic) -> RedisQuotas:
        link = RedisLink(RedisAddress.parse(self.url), timeout_s=PATIENCE_S)
        fallback = LocalQuotas(asyncio.get_running_loop().time, share=0.5)
        quotas = RedisQuotas(link, fallback, lease_s=LEASE_S, clock=clock)
        self.links.append(link)
        self.made.append(quotas)
        return quotas

    async def settled(self) -> None:
        await until(lambda: not any(quotas._owed for quotas in self.made))

    def leases(self, who: Caller, *, passed_s: float = 0.0) -> list[float]:
        """When they end, on Redis' clock in s, after so much of them has passed."""
        key = f"penstock:{{quota:{who.tenant}}}:running"
        with redis.Redis.from_url(self.url) as client:
            for hold in client.zrange(key, 0, -1):
                client.zincrby(key, -1e3 * passed_s, hold)
            return [score / 1e3 for _, score in client.zrange(key, 0, -1, withscores=True)]

    async def aclose(self) -> None:
        for quotas, link in zip(self.made, self.links, strict=True):
            await quotas.aclose()
            await link.aclose()


@pytest.fixture
async def redis_bed(redis_server: RedisServer) -> AsyncIterator[RedisBed]:
    bed = RedisBed(redis_server.url)
    yield bed
    await bed.aclose()


@pytest.fixture(params=["local", pytest.param("redis", marks=pytest.mark.redis)])
def bed(request: pytest.FixtureRequest) -> Bed:
    found: Bed = LocalBed() if request.param == "local" else request.getfixturevalue("redis_bed")
    return found


async def refused(quotas: Quotas, who: Caller, num_tokens: float = 1) -> NotAdmittedError:
    with pytest.raises(NotAdmittedError) as caught:
        await quotas.reserve(who, num_tokens)
    assert caught.value.status == 429
    assert caught.value.code == "rate_limit_exceeded"
    assert 0 < float(caught.value.headers["Retry-After"]) <= MAX_RETRY_S
    assert 0 < float(caught.value.headers["retry-after-ms"]) <= 1e3 * MAX_RETRY_S
    return caught.value


async def test_requests_per_minute(bed: Bed) -> None:
    quotas, who = bed.quotas(), caller(requests_per_minute=3)
    for _ in range(3):
        (await quotas.reserve(who, 1)).release(1)
    error = await refused(quotas, who)
    assert "requests per minute" in str(error)
    assert error.headers["x-ratelimit-limit-requests"] == "3"
    assert error.headers["x-ratelimit-remaining-requests"] == "0"
    # Full again in a minute, less what has flowed in since; this one is let in after 20 s of it.
    assert error.headers["x-ratelimit-reset-requests"] in (
        "1m0s",
        *(f"{s}s" for s in range(41, 60)),
    )
    assert error.headers["RateLimit-Policy"] == '"requests";q=3;w=60'
    await quotas.reserve(caller("another", requests_per_minute=3), 1)


async def test_tokens_are_reserved_and_settled(bed: Bed) -> None:
    quotas, who = bed.quotas(), caller(tokens_per_minute=1000)
    first = await quotas.reserve(who, 900)
    error = await refused(quotas, who, 800)
    assert "tokens per minute" in str(error)
    assert error.headers["x-ratelimit-limit-tokens"] == "1000"
    assert 100 <= int(error.headers["x-ratelimit-remaining-tokens"]) < 800
    first.release(100)
    await bed.settled()
    second = await quotas.reserve(who, 800)
    second.release(3000)  # more than was reserved: a debt
    await bed.settled()
    await refused(quotas, who, 1)
    assert quotas.levels(who).tokens < -1000


async def test_more_than_a_bucketful_needs_a_full_bucket(bed: Bed) -> None:
    quotas, who = bed.quotas(), caller(tokens_per_minute=100)
    hold = await quotas.reserve(who, 5000)
    await refused(quotas, who, 1)
    hold.release(0)
    await bed.settled()
    await quotas.reserve(who, 60)
    await refused(quotas, who, 5000)


async def test_requests_at_once(bed: Bed) -> None:
    quotas, who = bed.quotas(), caller(max_concurrent_requests=2)
    holds: list[Hold] = [await quotas.reserve(who, 5) for _ in range(2)]
    assert "concurrent" in str(await refused(quotas, who))
    holds[0].release(5)
    await bed.settled()
    await quotas.reserve(who, 5)
    await refused(quotas, who)


async def test_what_is_refused_takes_nothing(bed: Bed) -> None:
    quotas = bed.quotas()
    who = caller(requests_per_minute=2, tokens_per_minute=100)
    await quotas.reserve(who, 90)
    for _ in range(5):
        await refused(quotas, who, 80)
    await quotas.reserve(who, 10)
    levels = quotas.levels(who)
    assert -0.01 < levels.requests < 1  # what flows in meanwhile: one takes 30 s
    assert levels.num_running == 2


async def test_what_is_cancelled_counts_for_nothing(bed: Bed) -> None:
    quotas, who = bed.quotas(), caller(requests_per_minute=1, tokens_per_minute=10)
    for _ in range(3):
        (await quotas.reserve(who, 10)).cancel()
        await bed.settled()
    (await quotas.reserve(who, 10)).release(0)
    await bed.settled()
    await refused(quotas, who)


async def test_at_once_only_as_many_as_fit(bed: Bed) -> None:
    quotas, who = bed.quotas(), caller(tokens_per_minute=100)
    results = await asyncio.gather(
        *(quotas.reserve(who, 33) for _ in range(50)), return_exceptions=True
    )
    refusals = [each for each in results if isinstance(each, BaseException)]
    assert all(isinstance(each, NotAdmittedError) for each in refusals)
    assert len(refusals) == 50 - 3  # a fourth would have to wait for 19 s


async def test_without_limits_nothing_is_counted(bed: Bed) -> None:
    quotas, who = bed.quotas(), caller()
    for _ in range(100):
        (await quotas.reserve(who, 1e9)).release(1)
    assert quotas.levels(who).tokens == math.inf


async def test_a_changed_limit_keeps_what_was_used(bed: Bed) -> None:
    quotas, who = bed.quotas(), caller(tokens_per_minute=100)
    await quotas.reserve(who, 100)
    await refused(quotas, who, 50)
    more = dataclasses.replace(who, limits=TenantLimits(tokens_per_minute=1000))
    await quotas.reserve(more, 850)
    await refused(quotas, more, 900)


async def test_a_bucket_refills() -> None:
    bed = LocalBed()
    quotas, who = bed.quotas(), caller(requests_per_minute=60)
    for _ in range(60):
        await quotas.reserve(who, 1)
    await refused(quotas, who)
    bed.now_s += 10
    for _ in range(10):
        await quotas.reserve(who, 1)
    await refused(quotas, who)


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
