"""A machine, or a gateway, that stood still: leases ran out, answers are late, and nobody died."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest

from penstock.gateway.sources import next_of
from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.redis_errors import RedisAwayError
from penstock.gateway.storage.response_log import log as response_log
from penstock.gateway.storage.response_log import redis_ownership, redis_reader
from penstock.gateway.storage.response_log.log import ResponseLog, ResponseMovedError

from ....redis_server import RedisServer
from .conftest import PATIENT, Gateway, Gateways, begin
from .records import PATIENCE_S, TENANT, add_delta, add_end, header, read_to_end, until

pytestmark = pytest.mark.redis
# Longer than a test: a turn comes when somebody is told to hurry, and no lease runs out by itself.
LEASE_S = 12 * PATIENCE_S


async def looks_around(gateway: Gateway) -> None:
    """A turn at this time of the clock, and what it takes over."""
    ownership = gateway.store._ownership
    ownership.hurry()
    await until(lambda: ownership._last_beat_s == redis_ownership.time.monotonic())
    await until(lambda: ownership._adopting is None or ownership._adopting.done())


async def test_nobody_takes_another_for_dead_that_slept_as_long(
    redis_server: RedisServer, gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(redis_ownership, "time", SimpleNamespace(monotonic=lambda: now_s))
    settings = dataclasses.replace(PATIENT, lease_s=LEASE_S)
    here, there = [await gateways.make(redis_server.url, settings) for _ in range(2)]
    for each in (here, there):
        await looks_around(each)
    log = await begin(here, 1)

    with redis_server.client() as client:
        client.delete(f"penstock:lease:{here.store.gateway_id}")
    now_s += LEASE_S
    await looks_around(there)  # the first to wake up
    assert not there.carried_on
    now_s += 1
    await looks_around(here)
    now_s += LEASE_S / 2
    await looks_around(there)
    assert not there.carried_on
    assert not here.lost

    await here.die()
    with redis_server.client() as client:
        client.delete(f"penstock:lease:{here.store.gateway_id}")
    now_s += 1
    await looks_around(there)
    assert list(there.carried_on) == [log.header.response_id]


async def test_who_stood_still_does_not_take_redis_for_gone(
    redis_server: RedisServer, gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it followed when it was frozen, it follows on, though its own wait for Redis was over
    when it woke."""
    here, there = [await gateways.make(redis_server.url) for _ in range(2)]
    log = await begin(here, 1)
    reading = asyncio.create_task(
        read_to_end(await there.store.find(TENANT, log.header.response_id))
    )
    now_s, has_slept = 1000.0, False
    monkeypatch.setattr(redis_reader, "time", SimpleNamespace(monotonic=lambda: now_s))
    follower = there.store._follower
    block = follower._block

    async def sleep_first(positions: dict[bytes, bytes]) -> object:
        nonlocal now_s, has_slept
        if has_slept:
            return await block(positions)
        now_s, has_slept = now_s + 100, True
        raise RedisAwayError

    monkeypatch.setattr(follower, "_block", sleep_first)
    await until(lambda: has_slept)
    add_delta(log)
    add_end(log)
    assert await reading == log.entries


async def test_a_reader_finds_its_log_again_when_storage_answers_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(response_log, "_TRY_AGAIN_S", 0.0)
    lost, found = ResponseLog(header()), ResponseLog(header())
    add_end(found)
    num_tries = 0

    async def find_again() -> ResponseLog:
        nonlocal num_tries
        num_tries += 1
        if num_tries < 5:
            raise StoreUnavailableError("late", code="session_store_unavailable", status=503)
        return found

    with lost.read(find_again=find_again) as reader:
        lost.fail(ResponseMovedError(lost.header.response_id))
        assert await next_of(reader) == found.entries
