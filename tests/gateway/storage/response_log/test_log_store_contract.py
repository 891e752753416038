"""What every log store does: in memory, on disk and in Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.gateway.storage.response_log.log_store import LogExistsError, LogStore, MemoryLogStore
from penstock.gateway.storage.response_log.record import DeltaEntry, EndEntry

from ....redis_server import RedisServer
from .conftest import Gateways, Owner
from .disks import process
from .records import TENANT, add_delta, add_end, expired, header, read_to_end, run_of, seen


@pytest.fixture(params=["memory", "disk", pytest.param("redis", marks=pytest.mark.redis)])
async def store(
    request: pytest.FixtureRequest, gateways: Gateways, tmp_path: Path
) -> AsyncIterator[LogStore]:
    if request.param == "memory":
        yield MemoryLogStore(1 << 20)
    elif request.param == "disk":
        async with process(tmp_path) as started:
            yield started.store
    else:
        server: RedisServer = request.getfixturevalue("redis_server")
        yield (await gateways.make(server.url)).store


async def test_a_running_response_is_found_as_itself(store: LogStore) -> None:
    log = await store.create(header())
    assert await store.find(TENANT, log.header.response_id) is log


async def test_of_one_id_there_is_one_log(store: LogStore) -> None:
    first = await store.create(header())
    for _ in range(2):
        with pytest.raises(LogExistsError):
            await store.create(first.header)
        assert await store.find(TENANT, first.header.response_id) is first
        add_delta(first)
    add_end(first)
    assert [type(entry) for entry in await read_to_end(first)] == [DeltaEntry] * 2 + [EndEntry]


async def test_what_is_appended_is_read_in_order_to_the_end(store: LogStore) -> None:
    log = await store.create(header())
    written = [add_delta(log) for _ in range(5)]
    end = add_end(log)
    assert await read_to_end(log) == [*written, end]
    assert log.is_resumable


async def test_an_ended_response_is_replayed_from_every_cut_point(store: LogStore) -> None:
    log = await store.create(header())
    for _ in range(4):
        add_delta(log)
    add_end(log)
    whole = await read_to_end(log)
    found = await store.find(TENANT, log.header.response_id)
    for after in range(-1, whole[-1].last_number + 1):
        expected = [entry for entry in whole if entry.last_number > after]
        assert await read_to_end(found, after) == expected
    assert await read_to_end(found, whole[-1].last_number) == []
    assert found.header == log.header


async def test_a_cancel_reaches_who_runs_it(store: LogStore) -> None:
    log = await store.create(header())
    owner = Owner("r")
    run_of(log).begin(owner)
    await store.cancel(TENANT, log.header.response_id)
    assert owner.cancelled == ["r"]
    add_end(log)
    await read_to_end(log)
    await store.cancel(TENANT, log.header.response_id)
    assert owner.cancelled == ["r"]


async def test_another_tenants_response_is_not_there(store: LogStore) -> None:
    log = await store.create(header())
    response_id = log.header.response_id
    for is_ended in (False, True):
        if is_ended:
            add_end(log)
            await read_to_end(log)
        with expired():
            await store.find("somebody else", response_id)
        with expired():
            await store.cancel("somebody else", response_id)
        await store.delete("somebody else", response_id)
    assert await store.find(TENANT, response_id)


@pytest.mark.parametrize("response_id", ["", "resp_1", "resp_*", f"resp_{48 * '0'}"])
async def test_a_response_nobody_knows_is_not_there(store: LogStore, response_id: str) -> None:
    with expired():
        await store.find(TENANT, response_id)
    with expired():
        await store.cancel(TENANT, response_id)
    await store.delete(TENANT, response_id)


async def test_an_ended_response_is_deleted_a_running_one_is_not(store: LogStore) -> None:
    log = await store.create(header())
    response_id = log.header.response_id
    await store.delete(TENANT, response_id)
    add_delta(log)
    await seen(log, 1)
    assert await store.find(TENANT, response_id) is log
    add_end(log)
    assert isinstance((await read_to_end(log))[-1], EndEntry)
    await store.delete(TENANT, response_id)
    with expired():
        await store.find(TENANT, response_id)
