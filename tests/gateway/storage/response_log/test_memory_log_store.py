"""What bounds the log store in memory, and that it counts what it takes."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from penstock.engine.request import Request
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.log_store import MemoryLogStore
from penstock.gateway.storage.response_log.record import DeltaEntry, LogHeader

from ....support.tiers import tiered
from ...garbage import bytes_taken
from .records import TENANT, add_delta, add_end, expired, header, read_to_end, run_of

Fields = dict[str, Any]


def words(num: int) -> str:
    """No two the same object, as texts that came over a wire."""
    return " ".join(str(random.random()) for _ in range(num))


def alternatives() -> Fields:
    """A token as the API shows it with all its alternatives."""
    tokens = [{"token": words(1), "logprob": random.random(), "bytes": [1, 2]} for _ in range(20)]
    return {"token": words(1), "logprob": -1.5, "bytes": [7], "top_logprobs": tokens}


def with_prompt(**fields: Any) -> LogHeader:
    made = header()
    token_ids = tuple(random.randrange(1 << 17) for _ in range(2000))
    request = Request(
        request_id=made.response_id,
        prompt_token_ids=token_ids,
        sampling_params=made.request.sampling_params,
    )
    return dataclasses.replace(made, request=request, **fields)


SAID: dict[str, Callable[[], tuple[LogHeader, list[Fields]]]] = {
    "nothing": lambda: (header(), []),
    "many deltas": lambda: (header(), [{"text": words(1)} for _ in range(200)]),
    "logprobs": lambda: (header(), [{"logprobs": (alternatives(),)} for _ in range(20)]),
    "a prompt": lambda: (with_prompt(), []),
    "instructions": lambda: (with_prompt(echo={"instructions": words(500)}), []),
    "items": lambda: (with_prompt(input_items=({"text": words(500)},)), []),
}


def write(log: ResponseLog, deltas: list[Fields]) -> None:
    for fields in deltas:
        entry = DeltaEntry(log.next_number, "x", (random.randrange(1 << 17),))
        run_of(log).append(msgspec.structs.replace(entry, **fields))
    add_end(log)


@pytest.mark.parametrize("said", tiered(SAID, first=("items",)))
async def test_it_counts_what_it_takes(said: str) -> None:
    """Whatever is in the logs: the bound would be none if something in them were not counted."""
    store = MemoryLogStore(1 << 40)

    async def fill() -> None:
        for _ in range(50):
            made, deltas = SAID[said]()
            write(await store.create(made), deltas)

    num_taken = await bytes_taken(fill)
    assert store.num_bytes / 2 < num_taken < 1.1 * store.num_bytes


async def ended(store: MemoryLogStore) -> str:
    log = await store.create(header())
    write(log, [{"text": words(100)}])  # some 2 kB
    return log.header.response_id


async def is_there(store: MemoryLogStore, response_id: str) -> bool:
    try:
        await store.find(TENANT, response_id)
    except Exception:
        with expired():
            await store.find(TENANT, response_id)
        return False
    return True


async def test_beyond_its_bytes_the_oldest_goes() -> None:
    store = MemoryLogStore(20_000)
    running = await store.create(header())
    made = [await ended(store) for _ in range(20)]
    assert store.num_bytes <= 20_000
    there = [await is_there(store, response_id) for response_id in made]
    assert 3 < sum(there) < 20
    assert there == sorted(there)
    assert await store.find(TENANT, running.header.response_id) is running, "what runs stays"


async def test_beyond_its_time_a_log_goes() -> None:
    now_s = 0.0
    store = MemoryLogStore(1 << 20, ttl_s=10, clock=lambda: now_s)
    made = await ended(store)
    now_s = 9.0
    assert await is_there(store, made)
    now_s = 10.0
    assert not await is_there(store, made)
    assert store.num_bytes == 0


async def test_who_reads_an_ended_log_shares_it_and_keeps_it() -> None:
    store = MemoryLogStore(20_000)
    log = await store.create(header())
    add_delta(log)
    response_id = log.header.response_id
    add_end(log)
    assert await store.find(TENANT, response_id) is log, "the one its first readers have"
    entries = log.entries
    del log
    gc.collect()
    first = await store.find(TENANT, response_id)
    assert await store.find(TENANT, response_id) is first
    while await is_there(store, response_id):
        await ended(store)
    assert await read_to_end(first) == entries
