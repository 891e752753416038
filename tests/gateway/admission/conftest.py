"""Quotas in memory and in Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from ...redis_server import RedisServer
from .beds import Bed, LocalBed, RedisBed


@pytest.fixture
async def redis_bed(redis_server: RedisServer) -> AsyncIterator[RedisBed]:
    bed = RedisBed(redis_server.url)
    yield bed
    await bed.aclose()


@pytest.fixture(params=["local", pytest.param("redis", marks=pytest.mark.redis)])
def bed(request: pytest.FixtureRequest) -> Bed:
    found: Bed = LocalBed() if request.param == "local" else request.getfixturevalue("redis_bed")
    return found
