"""Redis stalls, is killed, forgets, or loses an answer: streams go on, and nothing torn is told."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import redis

from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.response_log.codec import encode_delta
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.log_store import LogExistsError
from penstock.gateway.storage.response_log.record import DeltaEntry

from ....redis_server import RedisServer
from .conftest import Gateway, Gateways, begin
from .records import (
    PATIENCE_S,
    TENANT,
    add_delta,
    add_end,
    expired,
    header,
    read_to_end,
    run_of,
    seen,
    until,
)
from .stored import add_fence, is_broken, log_key, owned

pytestmark = pytest.mark.redis


async def up_again(gateway: Gateway) -> ResponseLog:
    """A new response, once Redis takes one."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(StoreUnavailableError):
                return await begin(gateway)
            await asyncio.sleep(0.05)


async def test_a_stalled_redis_costs_a_stream_its_resumption_and_nothing_else(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here = await gateways.make(redis_server.url, is_wired=True)
    there = await gateways.make(redis_server.url)
    assert here.wire is not None
    logs = [await begin(here) for _ in range(20)]
    with here.impatient():
        here.wire.stop()
        written = [[add_delta(log)] for log in logs]
        for log in logs:
            await seen(log, 1)
        assert not any(log.is_resumable for log in logs)
        for log, entries in zip(logs, written, strict=True):
            entries.append(add_delta(log))
            assert log.replica.num_visible == 2  # at once from now on
    here.wire.go_on()
    for log in logs:
        assert await here.store.find(TENANT, log.header.response_id) is log
    for log in logs:  # whatever of it got to Redis after all
        await until_expired(there, log)
    for log, entries in zip(logs, written, strict=True):
        end = add_end(log)
        assert await read_to_end(log) == [*entries, end]
    durable = await begin(here, 2)
    assert durable.is_resumable
    await until(lambda: owned(client, here.store) == {durable.header.response_id: 1})
    assert all(is_broken(client, log.header.response_id) for log in logs)


async def until_expired(gateway: Gateway, log: ResponseLog) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await gateway.store.find(TENANT, log.header.response_id)
            except Exception:
                with expired():
                    await gateway.store.find(TENANT, log.header.response_id)
                return
            await asyncio.sleep(0.02)


@pytest.mark.process_kills
async def test_redis_killed_in_mid_stream_and_started_again(
    own_server: RedisServer, gateways: Gateways
) -> None:
    here, there = await gateways.make(own_server.url), await gateways.make(own_server.url)
    log, idle = await begin(here, 2), await begin(here, 2)
    ended = await begin(here, 1)
    add_end(ended)
    whole = await read_to_end(ended)
    replica = await there.store.find(TENANT, log.header.response_id)
    reading = asyncio.create_task(read_to_end(replica))
    own_server.kill()
    with here.impatient():
        add_delta(log)
        await seen(log, 3)
    assert not log.is_resumable
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StoreUnavailableError):
            await here.store.create(header())
        with pytest.raises(StoreUnavailableError):
            await there.store.find(TENANT, idle.header.response_id)
    own_server.start()
    assert (await up_again(here)).is_resumable
    with expired():
        await reading
    with expired():
        await there.store.find(TENANT, log.header.response_id)
    assert await read_to_end(await there.store.find(TENANT, ended.header.response_id)) == whole
    # It had nothing to say while Redis was away: it is as durable as before.
    follower = await there.store.find(TENANT, idle.header.response_id)
    add_delta(idle)
    add_end(idle)
    assert await read_to_end(follower) == await read_to_end(idle)
    assert idle.is_resumable
    with own_server.client() as client:
        await until(lambda: idle.header.response_id not in owned(client, here.store))
        assert is_broken(client, log.header.response_id)
    assert not there.carried_on  # nobody took the outage for a death


@pytest.mark.process_kills
async def test_a_redis_that_comes_back_empty(own_server: RedisServer, gateways: Gateways) -> None:
    here, there = await gateways.make(own_server.url), await gateways.make(own_server.url)
    log = await begin(here, 2)
    replica = await there.store.find(TENANT, log.header.response_id)
    own_server.kill()
    for file in own_server.directory.glob("appendonlydir/*"):
        file.unlink()
    own_server.start()
    await here.is_known()  # without its lease the other would take over what it begins
    fresh = await up_again(here)
    with expired():
        await read_to_end(replica)
    add_delta(log)
    await seen(log, 3)
    await until(lambda: not log.is_resumable)
    add_delta(fresh)
    add_end(fresh)
    replayed = await there.store.find(TENANT, fresh.header.response_id)
    assert await read_to_end(replayed) == await read_to_end(fresh)


async def test_a_redis_that_lost_the_last_entries(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here, there = await gateways.make(redis_server.url), await gateways.make(redis_server.url)
    log = await begin(here, 4)
    key = log_key(log.header.response_id)
    header_entry, first = client.xrange(key, count=2)
    client.delete(key)
    for entry_id, fields in (header_entry, first):
        client.xadd(key, fields, id=entry_id)
    add_delta(log)  # Redis takes it: its id is above the last one
    await seen(log, 5)
    with expired():
        await there.store.find(TENANT, log.header.response_id)


async def test_an_entry_whose_acknowledgement_got_lost_is_there_once(
    redis_server: RedisServer, gateways: Gateways
) -> None:
    here = await gateways.make(redis_server.url, is_wired=True)
    there = await gateways.make(redis_server.url)
    assert here.wire is not None
    log = await begin(here, 2)
    here.wire.lose_reply("XADD", log_key(log.header.response_id))
    add_delta(log)
    add_delta(log)
    await seen(log, 4)
    assert here.wire.num_lost == 1
    assert log.is_resumable
    add_end(log)
    whole = await read_to_end(log)
    assert len(whole) == 5
    replayed = await there.store.find(TENANT, log.header.response_id)
    assert await read_to_end(replayed) == whole


async def test_a_refused_id_of_its_own_is_success_and_a_higher_epoch_is_loss(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here = await gateways.make(redis_server.url)
    log = await begin(here, 1)
    response_id = log.header.response_id
    stored_before = DeltaEntry(log.next_number, "once", (1,))
    entry_id = f"1-{stored_before.last_number}"
    client.xadd(log_key(response_id), {"d": encode_delta(stored_before)}, id=entry_id)
    run_of(log).append(stored_before)
    await seen(log, 2)
    assert log.is_resumable
    assert not here.lost
    add_fence(client, response_id, 2, "another gateway")
    add_delta(log)
    await until(lambda: here.lost)
    assert log.replica.num_visible == 2


async def test_a_full_redis_refuses_and_streams_go_on(
    own_server: RedisServer, gateways: Gateways
) -> None:
    here = await gateways.make(own_server.url)
    log = await begin(here, 1)
    with own_server.client() as client:
        client.config_set("maxmemory", 1)
        with here.impatient():
            add_delta(log)
            await seen(log, 2)
        assert not log.is_resumable
        with pytest.raises(StoreUnavailableError):
            await here.store.create(header())
        client.config_set("maxmemory", 0)
    await until_expired(await gateways.make(own_server.url), log)
    assert (await up_again(here)).is_resumable


async def test_a_response_whose_log_broke_is_stopped_from_another_gateway(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    """It cannot be read there any more, and runs on all the same."""
    here = await gateways.make(redis_server.url, is_wired=True)
    there = await gateways.make(redis_server.url)
    assert here.wire is not None
    log = await begin(here, 1)
    response_id = log.header.response_id
    with here.impatient():
        here.wire.stop()
        add_delta(log)
        await seen(log, 2)
    here.wire.go_on()
    assert not log.is_resumable
    await until(lambda: is_broken(client, response_id))
    with expired():
        await there.store.find(TENANT, response_id)
    with expired():
        await there.store.cancel("another tenant", response_id)
    await there.store.cancel(TENANT, response_id)
    await until(lambda: here.cancelled)
    assert here.cancelled == [response_id]


async def test_foreign_content_is_no_outage(
    redis_server: RedisServer,
    client: redis.Redis,
    gateways: Gateways,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Somebody else's value lies where a log is to be: one stream is not resumable, at once and
    with one line; no response can begin or be read there."""
    here = await gateways.make(redis_server.url)
    log, other = await begin(here, 1), await begin(here, 1)
    wanted = header()
    for response_id in (log.header.response_id, wanted.response_id):
        client.set(log_key(response_id), "no stream")
    add_delta(log)
    add_delta(other)
    await seen(log, 2)
    await seen(other, 2)
    assert not log.is_resumable
    assert other.is_resumable
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.exc_info is None
    assert "its key is no stream (ResponseError: WRONGTYPE" in record.getMessage()
    with pytest.raises(LogExistsError):
        await here.store.create(wanted)
    with expired():
        await here.store.find(TENANT, wanted.response_id)
    add_end(log)  # while it runs, its note tells that it does
    await until(lambda: owned(client, here.store) == {other.header.response_id: 1})
