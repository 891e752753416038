"""The demands of a large pool, from costs that are made up."""

from __future__ import annotations

import random

import pytest

from penstock.load.pool_arithmetic import Costs, Pool, simulate

_COSTS = Costs(
    heartbeat_s=1e-6, key_s=1e-7, key_bytes=10.0, frame_s=5e-6, route_s=1e-6, hash_s=1e-4,
    renew_s=1e-5, version_s=1e-5, change_s=2e-5, read_s=1e-6, record_bytes=100.0,
)  # fmt: skip
_POOL = Pool(
    num_gateways=100, num_engines=1000, joins_per_s=0.0, requests_per_s=20.0, keys_per_s=100.0
)


def test_a_pool_that_stays_as_it_is() -> None:
    demand = simulate(_POOL, _COSTS, random.Random(0))
    # 1,000 leases and 100 questions a second, and each gateway reads all records every 50 s.
    mean = sum(demand.redis_cores) / len(demand.redis_cores)
    assert mean == pytest.approx(0.01 + 0.001 + 2 * 1000 * 1e-6, rel=0.1)
    assert demand.key_bytes == 1000 * 50_000 * 10.0
    assert demand.engine_cores == pytest.approx(100 * 11 * 5e-6)
    # 1,000 heartbeats, 100,000 keys, and 20 requests that look at 1,000 engines each.
    mean = sum(demand.gateway_cores) / len(demand.gateway_cores)
    assert mean == pytest.approx(0.001 + 0.01 + 20 * (1e-4 + 1e-3), rel=0.1)


def test_only_who_joins_is_read_by_all() -> None:
    busy = Pool(
        num_gateways=100, num_engines=1000, joins_per_s=5.0, requests_per_s=0.0, keys_per_s=0.0
    )
    demand = simulate(busy, _COSTS, random.Random(0))
    # Of 100 gateways hardly ever ten read all 1,000 records in the same second.
    assert 100 * 100.0 < max(demand.redis_bytes) < 10 * 1000 * 100.0
    assert 0.01 + 0.002 <= max(demand.redis_cores) < 0.012 + 10 * 1000 * 1e-6
