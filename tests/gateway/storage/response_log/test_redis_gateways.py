"""Two gateways on one Redis: reading, stopping and carrying on each other's responses."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref

import pytest
import redis

from penstock.engine.chat_formats import OutputFormat, OutputSyntax
from penstock.gateway.sources import next_of
from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.record import DeltaEntry

from ....redis_server import RedisServer
from .conftest import PATIENT, Gateways, begin
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
from .stored import (
    add_fence,
    beats,
    entries,
    is_broken,
    lapse,
    lease_key,
    log_key,
    owned,
    owned_key,
)

pytestmark = pytest.mark.redis


def keys_without_ttl(client: redis.Redis) -> list[bytes]:
    return [key for key in client.keys("*") if client.ttl(key) < 0]


async def test_another_gateway_reads_it_live_and_from_the_middle(
    redis_server: RedisServer, gateways: Gateways
) -> None:
    here, there = await gateways.make(redis_server.url), await gateways.make(redis_server.url)
    log = await begin(here, 3)
    replica = await there.store.find(TENANT, log.header.response_id)
    assert replica is not log
    assert replica.header == log.header
    reading = [asyncio.create_task(read_to_end(replica, after)) for after in range(-1, 10)]
    for _ in range(4):
        add_delta(log)
        await asyncio.sleep(0.01)
    add_end(log)
    whole = await read_to_end(log)
    assert [entry.number for entry in whole] == list(range(4, 12))
    for after, task in zip(range(-1, 10), reading, strict=True):
        assert await task == [entry for entry in whole if entry.last_number > after]


async def test_every_gateway_knows_what_runs(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here, there = await gateways.make(redis_server.url), await gateways.make(redis_server.url)
    running, ended, broken = [await begin(here, 1) for _ in range(3)]
    add_end(ended)
    await read_to_end(ended)
    here.settings.max_log_bytes = 1  # it goes on without Redis
    add_delta(broken)
    await until(lambda: is_broken(client, broken.response_id))
    asked = [each.response_id for each in (running, ended, broken, header())]
    for gateway in (here, there):
        found = await gateway.store.running(asked)
        assert set(found) == {running.response_id, broken.response_id}
    await here.die(client)
    assert set(await there.store.running(asked)) == {running.response_id}  # it is taken over
    await until(lambda: running.response_id in there.carried_on)
    assert set(await there.store.running(asked)) == {running.response_id}


async def test_another_gateway_reads_several_items(
    redis_server: RedisServer, gateways: Gateways
) -> None:
    here, there = await gateways.make(redis_server.url), await gateways.make(redis_server.url)
    log = await here.store.create(
        dataclasses.replace(
            header(), output_format=OutputFormat(syntax=OutputSyntax(reasoning="qwen3"))
        )
    )
    for output_index in (0, 0, 1):
        run_of(log).append_delta("x", (1,), output_index=output_index)
    add_end(log)
    whole = await read_to_end(log)
    assert [entry.number for entry in whole] == [2, 5, 6, 12]
    for after in range(-1, 17):
        replica = await there.store.find(TENANT, log.header.response_id)
        assert await read_to_end(replica, after) == [
            entry for entry in whole if entry.last_number > after
        ]
    assert log.is_resumable


async def test_readers_of_one_response_share_one_copy_that_goes_with_them(
    redis_server: RedisServer, gateways: Gateways
) -> None:
    here, there = await gateways.make(redis_server.url), await gateways.make(redis_server.url)
    log = await begin(here, 1)
    response_id = log.header.response_id

    async def find_often() -> weakref.ref[ResponseLog]:
        finds = (there.store.find(TENANT, response_id) for _ in range(8))
        found = {id(log): log for log in await asyncio.gather(*finds)}
        assert len(found) == 1
        return weakref.ref(next(iter(found.values())))

    replica = await find_often()
    await until(lambda: gc.collect() >= 0 and replica() is None)


async def test_one_connection_follows_them_all(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here, there = await gateways.make(redis_server.url), await gateways.make(redis_server.url)
    logs = [await begin(here, 1) for _ in range(40)]
    replicas = [await there.store.find(TENANT, log.header.response_id) for log in logs]
    reading = [asyncio.create_task(read_to_end(replica)) for replica in replicas]

    def num_blocked() -> int:
        return int(client.info("clients")["blocked_clients"])

    await until(lambda: num_blocked() >= 2)
    assert num_blocked() <= 2  # one of each gateway
    for log in logs:
        add_end(log)
    for task, log in zip(reading, logs, strict=True):
        assert await task == await read_to_end(log)


async def test_a_long_log_is_read_in_pages(redis_server: RedisServer, gateways: Gateways) -> None:
    here, there = await gateways.make(redis_server.url), await gateways.make(redis_server.url)
    log = await begin(here, 1500)
    replica = await there.store.find(TENANT, log.header.response_id)
    assert replica.entries == log.entries
    for _ in range(1500):
        add_delta(log)
    add_end(log)
    assert await read_to_end(replica) == await read_to_end(log)


async def test_a_cancel_goes_to_the_owner(redis_server: RedisServer, gateways: Gateways) -> None:
    made = [await gateways.make(redis_server.url) for _ in range(3)]
    log = await begin(made[0])
    await made[1].store.cancel(TENANT, log.header.response_id)
    await until(lambda: made[0].cancelled)
    assert made[0].cancelled == [log.header.response_id]
    assert not made[2].cancelled


async def test_a_response_of_a_dead_gateway_is_carried_on_by_one_of_the_others(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    dead, *others = [await gateways.make(redis_server.url) for _ in range(3)]
    log = await begin(dead, 3)
    response_id = log.header.response_id
    readers = [await other.store.find(TENANT, response_id) for other in others]
    reading = [asyncio.create_task(read_to_end(replica, 4)) for replica in readers]
    await dead.die(client)
    await until(lambda: any(other.carried_on for other in others))
    (taker,) = (other for other in others if other.carried_on)
    taken = taker.carried_on[response_id]
    assert taken.entries == log.entries
    assert taken.next_number == log.next_number
    assert await taker.store.find(TENANT, response_id) is taken
    add_delta(taken, "carried on")
    add_end(taken)
    whole = await read_to_end(taken)
    for task in reading:  # that began to read before the owner died
        assert await task == whole[1:]
    assert sum(len(other.carried_on) for other in others) == 1


async def test_a_gateway_is_dead_when_its_lease_has_run_out(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    short = dataclasses.replace(PATIENT, lease_s=0.3)
    alive, dead, other = [
        await gateways.make(redis_server.url, settings) for settings in (PATIENT, short, PATIENT)
    ]
    running, orphan = await begin(alive, 1), await begin(dead, 1)
    await dead.store.close()
    await until(lambda: {*alive.carried_on, *other.carried_on} == {orphan.header.response_id})
    await until(lambda: dead.store.gateway_id.encode() not in client.smembers("penstock:gateways"))
    await beats(client, alive.store)
    await beats(client, other.store)
    assert not alive.lost
    assert owned(client, alive.store)[running.header.response_id] == 1


async def test_many_orphans_find_one_owner_each(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    dead, *others = [await gateways.make(redis_server.url) for _ in range(4)]
    logs = [await begin(dead, 1) for _ in range(60)]
    await dead.die(client)
    await until(lambda: sum(len(other.carried_on) for other in others) >= len(logs))
    for other in others:
        await beats(client, other.store)
    owners = [response_id for other in others for response_id in other.carried_on]
    assert sorted(owners) == sorted(log.header.response_id for log in logs)


async def test_a_cancel_while_nobody_runs_it_is_not_forgotten(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    dead, other = await gateways.make(redis_server.url), await gateways.make(redis_server.url)
    log = await begin(dead, 1)
    await dead.store.close()
    await other.store.cancel(TENANT, log.header.response_id)
    await lapse(client, dead.store)
    await until(lambda: other.carried_on)
    await until(lambda: other.cancelled)


async def test_an_owner_that_wakes_up_is_fenced_off(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    paused = await gateways.make(redis_server.url, is_wired=True)
    other = await gateways.make(redis_server.url)
    log = await begin(paused, 2)
    run = run_of(log)
    response_id = log.header.response_id
    assert paused.wire is not None
    await paused.freeze(client)
    await until(lambda: other.carried_on)
    taken = other.carried_on[response_id]
    add_delta(taken, "new owner")
    await seen(taken, 3)
    add_delta(log, "old owner")
    paused.wire.go_on()
    await until(lambda: paused.lost)
    assert log.replica.num_visible == 2  # nobody saw what it had to say
    assert log.is_resumable
    run.append(DeltaEntry(log.next_number, "a last word", (1,)))  # of a run that is being stopped
    add_end(taken)
    assert await paused.store.find(TENANT, response_id) is log
    assert await read_to_end(log) == await read_to_end(taken)
    assert [e.text for e in log.entries if isinstance(e, DeltaEntry)][-1] == "new owner"


async def test_an_owner_that_went_on_without_redis_steps_back(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    """Another gateway has taken the response over meanwhile. Who saw only what is stored reads on;
    who saw more is told, as the rest may not go together with it."""
    paused = await gateways.make(redis_server.url, is_wired=True)
    other = await gateways.make(redis_server.url)
    log = await begin(paused, 2)
    assert paused.wire is not None
    with log.read() as behind, log.read() as ahead:
        stored = await next_of(behind)
        assert await next_of(ahead) == stored == log.entries
        await paused.freeze(client)
        await until(lambda: other.carried_on)
        with paused.impatient():
            shown = add_delta(log, "without Redis")
            await seen(log, 3)
        assert not log.is_resumable
        assert await next_of(ahead) == [shown]
        paused.wire.go_on()
        assert await paused.store.find(TENANT, log.header.response_id) is log
        await until(lambda: paused.lost)
        (taken,) = other.carried_on.values()
        new, end = add_delta(taken, "new owner"), add_end(taken)
        with expired():
            await next_of(ahead)
        found = []
        while (entries := await next_of(behind)) is not None:
            found += entries
        assert found == [new, end]
    assert log.is_resumable


async def test_an_owner_that_lost_its_lease_looks_before_it_says_anything(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here = await gateways.make(redis_server.url)
    log = await begin(here, 1)
    add_fence(client, log.header.response_id, 2, "somebody")
    client.delete(lease_key(here.store))
    await until(lambda: here.lost)


async def test_it_takes_over_what_it_had_lost_unawares(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    """Another had fenced it and died, before this gateway looked: the run of before is over, and
    has no say in what the new one tells."""
    here = await gateways.make(redis_server.url)
    log = await begin(here, 2)
    before = run_of(log)
    response_id = log.header.response_id
    add_fence(client, response_id, 2, "x")
    client.sadd("penstock:owned:x", f"2 {response_id}")
    client.sadd("penstock:gateways", "x")
    await until(lambda: here.carried_on)
    assert here.carried_on[response_id] is log
    assert here.lost == [response_id]
    assert (before.epoch, run_of(log).epoch) == (1, 3)
    before.append(DeltaEntry(log.next_number, "of the run before", (1,)))
    new = add_delta(log, "of the new one")
    await seen(log, 3)
    assert log.entries[2:] == [new]
    assert await here.store.find(TENANT, response_id) is log
    add_end(log)
    assert await read_to_end(log) == log.entries


async def test_handing_over_is_quick(redis_server: RedisServer, gateways: Gateways) -> None:
    """Nobody waits for a lease to run out or for a heartbeat: here both outlast a test."""
    slow = dataclasses.replace(PATIENT, lease_s=4 * PATIENCE_S, beat_s=2 * PATIENCE_S)
    leaving, other = [await gateways.make(redis_server.url, slow) for _ in range(2)]
    logs = [await begin(leaving, 2) for _ in range(5)]
    await leaving.store.hand_over()
    assert len(leaving.lost) == len(logs)
    await until(lambda: len(other.carried_on) == len(logs))
    with pytest.raises(StoreUnavailableError):
        await leaving.store.create(header())


async def test_who_hands_over_says_no_last_word(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    """Its runs fail when it goes down; the responses do not, however late another one looks."""
    leaving = await gateways.make(redis_server.url)
    log = await begin(leaving, 2)
    await leaving.store.hand_over()
    add_end(log)
    other = await gateways.make(redis_server.url)
    await until(lambda: other.carried_on)
    await leaving.store.close()  # writes what there is to write
    (carried_on,) = other.carried_on.values()
    assert not carried_on.is_ended
    assert len(carried_on.entries) == 2
    assert [kind for _, _, kind in entries(client, log.header.response_id)] == ["h", "d", "d", "f"]
    assert not client.exists(lease_key(leaving.store))


async def test_who_hands_over_waits_until_its_readers_have_found_the_next_owner(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    """Until then it seems to have none."""
    leaving = await gateways.make(redis_server.url)
    other = await gateways.make(redis_server.url, is_wired=True)
    assert other.wire is not None
    log = await begin(leaving, 1)
    with log.read() as reader:
        assert await next_of(reader) == log.entries
        other.wire.stop()
        await leaving.store.hand_over()
        ending = asyncio.create_task(leaving.store.let_readers_end(2 * PATIENCE_S))
        reading = asyncio.create_task(next_of(reader))
        await asyncio.sleep(0.3)  # some looks at whether they have ended
        other.wire.go_on()
        await until(lambda: other.carried_on)
        (taken,) = other.carried_on.values()
        end = add_end(taken)
        assert await reading == [end]
        assert not ending.done()
        ending.cancel()


async def test_a_gateway_without_an_engine_leaves_responses_to_others(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    first = await gateways.make(redis_server.url)
    engineless = await gateways.make(redis_server.url, can_run=lambda: False)
    engineless.settings.without_engine_s = 2 * PATIENT.lease_s
    log = await begin(first, 2)
    await first.store.hand_over()
    await beats(client, engineless.store)
    assert not engineless.carried_on
    third = await gateways.make(redis_server.url)
    await until(lambda: third.carried_on)
    assert not engineless.carried_on
    engineless.settings.without_engine_s = 0.0  # nobody has taken them for so long
    await third.store.hand_over()
    await until(lambda: engineless.carried_on)
    assert owned(client, engineless.store) == {log.header.response_id: 3}


async def test_an_ended_response_leaves_nothing_to_take_over(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    dead, other = await gateways.make(redis_server.url), await gateways.make(redis_server.url)
    log = await begin(dead, 1)
    add_end(log)
    whole = await read_to_end(log)
    running = await begin(dead, 1)
    await dead.die(client)
    await until(lambda: other.carried_on)
    assert list(other.carried_on) == [running.header.response_id]
    assert await read_to_end(await other.store.find(TENANT, log.header.response_id)) == whole
    assert not client.exists(lease_key(dead.store))
    await until(lambda: not client.exists(owned_key(dead.store)))


async def test_every_key_has_a_time_to_live(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here, there = await gateways.make(redis_server.url), await gateways.make(redis_server.url)
    log = await begin(here, 1)
    replica = await there.store.find(TENANT, log.header.response_id)
    await there.store.cancel(TENANT, log.header.response_id)
    await until(lambda: here.cancelled)
    await until(lambda: not keys_without_ttl(client))  # a sign of life later
    add_end(log)
    await read_to_end(replica)
    await until(lambda: not keys_without_ttl(client))


async def test_a_response_that_expired_is_not_found_and_its_readers_are_told(
    redis_server: RedisServer, client: redis.Redis, gateways: Gateways
) -> None:
    here, there = await gateways.make(redis_server.url), await gateways.make(redis_server.url)
    log = await begin(here, 1)
    replica = await there.store.find(TENANT, log.header.response_id)
    client.delete(log_key(log.header.response_id))
    with expired():
        await read_to_end(replica)
    with expired():
        await there.store.find(TENANT, log.header.response_id)
    add_end(log)  # its owner's readers see it through
    assert len(await read_to_end(log)) == 2
    assert not log.is_resumable
