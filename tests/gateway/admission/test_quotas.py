"""Tenants' limits: one suite for this process's own and for those in Redis."""

from __future__ import annotations

import asyncio
import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.admission.quotas import Hold, TokenBucket
from penstock.gateway.admission.refusals import MAX_RETRY_S, NotAdmittedError, jittered
from penstock.gateway.auth.callers import TenantLimits

from .beds import Bed, LocalBed, caller, refused


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
