"""A machine, or a gateway, that stood still: leases ran out, answers are late, and nobody died."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import redis

from ....redis_server import RedisServer
from .conftest import PATIENT, Gateways, begin
from .records import PATIENCE_S, TENANT, add_delta, add_end, read_to_end, until
from .stored import beats, lapse, lease_key, log_key

pytestmark = pytest.mark.redis
LEASE_S = 12 * PATIENCE_S  # longer than a test: none runs out by itself


async def test_nobody_takes_another_for_dead_that_slept_as_long(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    now_s = 1000.0
    settings = dataclasses.replace(PATIENT, lease_s=LEASE_S)
    here, there = [
        await gateways.make(redis_server.url, settings, is_wired=True, clock=lambda: now_s)
        for _ in range(2)
    ]
    assert here.wire is not None
    log = await begin(here, 1)

    here.wire.stop()
    now_s += LEASE_S
    await beats(client, there.store)  # the first to wake up
    await lapse(client, here.store)
    await beats(client, there.store)
    assert not there.carried_on
    now_s += 1
    here.wire.go_on()
    await until(lambda: client.exists(lease_key(here.store)))
    now_s += LEASE_S / 2
    await beats(client, there.store)
    assert not there.carried_on
    assert not here.lost

    await here.freeze(client)
    now_s += 1
    await until(lambda: there.carried_on)
    assert list(there.carried_on) == [log.header.response_id]


async def test_nobody_takes_another_for_dead_that_could_not_reach_redis_either(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here, there = [await gateways.make(redis_server.url, is_wired=True) for _ in range(2)]
    assert here.wire is not None
    assert there.wire is not None
    await begin(here, 1)
    there.wire.refuse()
    await until(lambda: there.wire is not None and there.wire.num_refused > 12)
    await here.freeze(client)
    there.wire.accept()
    await beats(client, there.store)  # the first that reaches Redis again
    assert not there.carried_on
    here.wire.go_on()
    await until(lambda: client.exists(lease_key(here.store)))
    await beats(client, there.store)
    assert not there.carried_on
    assert not here.lost


async def test_who_stood_still_does_not_take_redis_for_gone(
    redis_server: RedisServer, gateways: Gateways
) -> None:
    """What it followed when it was frozen, it follows on, though its own wait for Redis was over
    when it woke."""
    now_s = 1000.0
    settings = dataclasses.replace(PATIENT, outage_s=10.0)
    here = await gateways.make(redis_server.url)
    there = await gateways.make(redis_server.url, settings, is_wired=True, clock=lambda: now_s)
    wire = there.wire
    assert wire is not None
    log = await begin(here, 1)
    reading = asyncio.create_task(
        read_to_end(await there.store.find(TENANT, log.header.response_id))
    )
    asks = wire.hold("XREAD", log_key(log.header.response_id))
    await asks.is_reached.wait()
    now_s += 100
    wire.refuse()
    await until(lambda: wire.num_refused > 12)
    wire.accept()
    add_delta(log)
    add_end(log)
    assert await reading == log.entries
