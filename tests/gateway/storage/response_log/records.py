"""Responses to store: headers, deltas, ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest

from penstock.engine.request import FinishReason, Request, SamplingParams
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.sources import next_of
from penstock.gateway.storage.conversations.ids import new_conversation_id, new_response_id
from penstock.gateway.storage.response_log.cursor import LogNotice
from penstock.gateway.storage.response_log.log import InMemory, ResponseLog, Run
from penstock.gateway.storage.response_log.record import (
    ITEM_EVENTS,
    MESSAGE,
    DeltaEntry,
    EndEntry,
    Entry,
    LogHeader,
)
from penstock.gateway.storage.response_log.replica import Commands

TENANT = "acme"
PATIENCE_S = 60.0  # of tests, with a machine that does other things too


def header(tenant: str = TENANT) -> LogHeader:
    conversation_id = new_conversation_id()
    response_id = new_response_id(conversation_id)
    params = SamplingParams(seed=(1 << 64) - 1, stop=("\n\n",), max_tokens=100)
    request = Request(
        request_id=response_id, prompt_token_ids=(1, 2, 70_000), sampling_params=params
    )
    return LogHeader(
        response_id=response_id,
        conversation_id=conversation_id,
        tenant=tenant,
        nonce="1",
        created_at=1_700_000_000,
        echo={"model": "demo"},
        request=request,
    )


def run_of(log: ResponseLog) -> Run:
    """The run of a response here."""
    assert log.run is not None
    return log.run


class Elsewhere(InMemory):
    """A log may go on at another gateway."""

    def carry_out(self, log: ResponseLog, commands: Commands) -> None:
        pass


def go_on_elsewhere(log: ResponseLog, entries: Sequence[Entry]) -> None:
    """Another gateway takes the response over, and adds this."""
    epoch = log.replica.epoch
    log.do(log.replica.fenced(epoch))
    for entry in entries:
        at = epoch + 1, entry.last_number
        assert log.replica.received(log.replica.position, at, entry)
    log.wake()


def add_delta(log: ResponseLog, text: str | None = None) -> DeltaEntry:
    number = log.next_number
    entry = DeltaEntry(number, f"<{number}>" if text is None else text, (number, 128_000))
    if log.run is not None:
        log.run.append(entry)
    return entry


def add_end(log: ResponseLog, reason: FinishReason = FinishReason.STOP) -> EndEntry:
    entry = EndEntry(
        number=log.next_number,
        num_events=ITEM_EVENTS[MESSAGE].closing + 1,
        reason=reason,
        usage=(3, 0, len(log.token_ids)),
        ended_at=1_700_000_001,
        prefix_id=b"\x00\xff" * 16,
    )
    if log.run is not None:
        log.run.append(entry)
    return entry


async def read_to_end(log: ResponseLog, after: int = -1) -> list[Entry]:
    """All entries with an event above `after`."""
    found: list[Entry] = []
    async with asyncio.timeout(PATIENCE_S):
        with log.read(after) as reader:
            while (entries := await next_of(reader)) is not None:
                found += [entry for entry in entries if not isinstance(entry, LogNotice)]
    return found


async def seen(log: ResponseLog, num_entries: int) -> None:
    """Wait until so many entries can be seen."""
    await until(lambda: log.replica.num_visible >= num_entries)


@contextlib.contextmanager
def expired() -> Iterator[None]:
    """The block is refused with 404 `response_expired`."""
    with pytest.raises(RequestRefusedError) as caught:
        yield
    assert (caught.value.status, caught.value.code) == (404, "response_expired")


async def until(condition: Callable[[], object]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_found(look: Callable[[], Awaitable[object]]) -> None:
    """Wait until what is looked for is there."""
    async with asyncio.timeout(PATIENCE_S):
        while not await look():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
