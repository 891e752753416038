"""Cursors: all entries in order, a bounded number at a time, and nothing that the reader knows."""

from __future__ import annotations

import pytest

from penstock.gateway.api.responses.logged_generation import LoggedGeneration
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.sources import next_of
from penstock.gateway.storage.response_log.cursor import LogNotice
from penstock.gateway.storage.response_log.log import ResponseLog, response_expired
from penstock.gateway.storage.response_log.record import Entry

from .records import Elsewhere, add_delta, add_end, go_on_elsewhere, header

_MANY = 1000


async def _taken(log: ResponseLog, after: int = -1) -> list[list[Entry | LogNotice]]:
    batches = []
    with log.read(after) as reader:
        while (batch := await next_of(reader)) is not None:
            batches.append(batch)
    return batches


async def test_a_long_log_comes_in_parts() -> None:
    """What was taken and not sent yet is memory, and readers may be many and slow."""
    log = ResponseLog(header())
    for _ in range(_MANY):
        add_delta(log)
    add_end(log)
    batches = await _taken(log)
    assert [entry for batch in batches for entry in batch] == log.entries
    assert max(map(len, batches)) <= 64


async def test_who_knows_more_than_a_replica_gets_only_what_is_new() -> None:
    log = ResponseLog(header())
    with log.read(after=log.next_number + _MANY - 1) as reader:
        for _ in range(_MANY):  # more at once than a reader takes
            add_delta(log)
        new = add_delta(log)
        assert await next_of(reader) == [new]


async def test_notices_keep_their_places_in_a_long_log() -> None:
    log = ResponseLog(header())
    with log.read() as reader:
        expected: list[Entry | LogNotice] = []
        for number in range(_MANY):
            expected.append(add_delta(log))
            if number % 50 == 0:
                log.notify("preempted")
                expected.append(log.notices[-1][1])
        expected.append(add_end(log))
        found: list[Entry | LogNotice] = []
        while (batch := await next_of(reader)) is not None:
            found += batch
    assert found == expected


async def test_an_answer_whose_log_is_lost_is_to_be_asked_for_again() -> None:
    """A 404 would say that there was nothing to ask, and no client tries again after one."""
    log = ResponseLog(header(), storage=Elsewhere())
    add_delta(log)
    go_on_elsewhere(log, [])
    with LoggedGeneration(log) as generation:
        assert await next_of(generation) is not None
        log.fail(response_expired(log.header.response_id))
        with pytest.raises(RequestRefusedError) as caught:
            await next_of(generation)
    assert (caught.value.status, caught.value.code) == (503, "session_store_unavailable")
