"""Many responses that begin at once, on a gateway that is busy with them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator

import pytest
import redis

from penstock.gateway.storage.conversations.store import StoreUnavailableError

from ....redis_server import RedisServer
from .conftest import PATIENT, Gateways
from .records import PATIENCE_S, TENANT, add_end, expired, header, read_to_end, run_of, until
from .stored import beats, entries, log_key, owned

pytestmark = pytest.mark.redis
NUM = 300
TURN_S = 0.03
USUAL = dataclasses.replace(PATIENT, request_timeout_s=1.0)


@contextlib.asynccontextmanager
async def slow_loop(turn_s: float = TURN_S) -> AsyncIterator[None]:
    """Every turn of the event loop takes that long."""

    async def hog() -> None:
        while True:
            time.sleep(turn_s)  # noqa: ASYNC251  (that is the point)
            await asyncio.sleep(0)

    task = asyncio.create_task(hog())
    try:
        yield
    finally:
        task.cancel()


async def test_a_busy_loop_is_not_taken_for_a_silent_redis(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here = await gateways.make(redis_server.url, USUAL)
    there = await gateways.make(redis_server.url)
    async with slow_loop():
        logs = await asyncio.gather(*(here.store.create(header()) for _ in range(NUM)))
    assert len(owned(client, here.store)) == NUM
    assert all(client.ttl(log_key(log.header.response_id)) > 0 for log in logs)
    assert client.info("clients")["connected_clients"] < 30
    add_end(logs[-1])
    found = await there.store.find(TENANT, logs[-1].header.response_id)
    assert await read_to_end(found) == logs[-1].entries


async def test_a_silent_redis_refuses_them_all_in_its_time(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here = await gateways.make(redis_server.url, is_wired=True)
    assert here.wire is not None
    running = await here.store.create(header())
    wanted = [header() for _ in range(20)]
    async with asyncio.timeout(PATIENCE_S):
        with here.impatient():
            here.wire.stop()
            answers = await asyncio.gather(
                *(here.store.create(each) for each in wanted), return_exceptions=True
            )
    here.wire.go_on()
    assert {type(answer) for answer in answers} == {StoreUnavailableError}
    await beats(client, here.store)  # what Redis took after all is ended
    await until(lambda: owned(client, here.store) == {running.header.response_id: 1})


async def test_who_leaves_before_it_is_open_leaves_nothing_running(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here = await gateways.make(redis_server.url)
    wanted = [header() for _ in range(12)]
    for num_turns, each in enumerate(wanted):  # at every moment of its way
        task = asyncio.create_task(here.store.create(each))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():  # it was quicker
            add_end(task.result())
    last = await here.store.create(header())
    await until(lambda: owned(client, here.store) == {last.header.response_id: 1})
    for each in wanted:
        kinds = [kind for _, _, kind in entries(client, each.response_id)]
        assert not kinds or kinds[-1] in ("e", "x")


async def test_a_crowd_of_readers_shares_what_was_read(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    """Of a long response each copy is megabytes, and takes the event loop's time to decode."""
    here = await gateways.make(redis_server.url)
    there = await gateways.make(redis_server.url)
    log = await here.store.create(header())
    for number in range(2000):
        run_of(log).append_delta("x" * 100, (number,))
    add_end(log)
    await read_to_end(log)
    response_id = log.header.response_id
    client.config_resetstat()
    found = await asyncio.gather(*(there.store.find(TENANT, response_id) for _ in range(40)))
    num_pages = client.info("commandstats")["cmdstat_xrange"]["calls"]
    assert len({id(each) for each in found}) == 1
    assert found[0].entries == log.entries
    assert num_pages <= 5
    assert await there.store.find(TENANT, response_id) is found[0]
    await there.store.delete(TENANT, response_id)
    with expired():
        await there.store.find(TENANT, response_id)
