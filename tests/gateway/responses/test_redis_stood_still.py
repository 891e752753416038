"""A machine that stood still: all gateways of it lost their leases, and nobody died."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from penstock.gateway.responses import redis_ownership

from ...redis_server import RedisServer
from .conftest import PATIENT, Gateway, Gateways, begin
from .records import PATIENCE_S, until

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
