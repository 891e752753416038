"""Gateways on one Redis that begin a response of the same id, even with the same header."""

from __future__ import annotations

import pytest
import redis

from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.log_store import LogExistsError

from ....redis_server import RedisServer
from .conftest import Gateway, Gateways
from .records import TENANT, add_delta, add_end, header, read_to_end, seen, until
from .stored import beats, log_key, owned

pytestmark = pytest.mark.redis


async def is_whole_elsewhere(log: ResponseLog, gateway: Gateway) -> bool:
    """Whether it is stored, and read there, as it was written."""
    add_end(log)
    await seen(log, len(log.entries))
    found = await gateway.store.find(TENANT, log.header.response_id)
    return await read_to_end(found) == log.entries


async def test_the_first_one_runs_it(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    first, second = [await gateways.make(redis_server.url) for _ in range(2)]
    log = await first.store.create(header())
    first.run(log)
    add_delta(log)
    for gateway in (second, first):
        with pytest.raises(LogExistsError):
            await gateway.store.create(log.header)
    assert owned(client, second.store) == {}  # or others would carry it on after its death
    assert owned(client, first.store) == {log.header.response_id: 1}
    assert await is_whole_elsewhere(log, second)


async def test_who_could_not_begin_does_not_break_what_another_began(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    """It does not know whether Redis has its header or the other's."""
    first = await gateways.make(redis_server.url)
    second = await gateways.make(redis_server.url, is_wired=True)
    log = await first.store.create(header())
    first.run(log)
    add_delta(log)
    assert second.wire is not None
    hold = second.wire.hold("XADD", log_key(log.header.response_id), "h")
    with second.impatient(), pytest.raises(StoreUnavailableError):
        await second.store.create(log.header)
    assert hold.is_reached.is_set()
    hold.end()
    await beats(client, second.store)
    await until(lambda: owned(client, second.store) == {})
    add_delta(log)
    assert await is_whole_elsewhere(log, second)
