"""Logs and the events made of them: every cursor sees the same events, whatever it missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from penstock.engine.request import FinishReason, Request, SamplingParams
from penstock.gateway.api.responses.events import (
    Event,
    Payloads,
    num_closing_events,
    response_object,
)
from penstock.gateway.api.responses.routes import _joined
from penstock.gateway.api.responses.subscriber import Subscriber
from penstock.gateway.api.responses.websocket import Lane
from penstock.gateway.errors import GenerationFailedError, RequestRefusedError
from penstock.gateway.sources import next_of
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.record import DeltaEntry, EndEntry, LogHeader

from ..storage.response_log.records import Elsewhere, go_on_elsewhere, run_of

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
REASONS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, None)


def header(**values: Any) -> LogHeader:
    tree, turn = "a" * 24, "b" * 24
    fixed: dict[str, Any] = {
        "response_id": f"resp_{tree}{turn}",
        "conversation_id": f"conv_{tree}",
        "tenant": "default",
        "nonce": "1",
        "created_at": 1,
        "echo": {
            "model": "m", "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto",
            "tools": [], "temperature": 1.0, "top_p": 1.0, "instructions": None,
        },
        "request": Request(
            request_id="r", prompt_token_ids=(1, 2), sampling_params=SamplingParams()
        ),
    }  # fmt: skip
    return LogHeader(**{**fixed, **values})


def end(log: ResponseLog, reason: FinishReason | None) -> EndEntry:
    return EndEntry(
        number=log.next_number,
        num_events=num_closing_events(log, reason),
        reason=reason,
        usage=(2, 1, 3),
        ended_at=2,
        error=None if reason is not None else ("server_error", "it broke"),
    )


def filled(
    texts: Sequence[str], reason: FinishReason | None = FinishReason.STOP, **values: Any
) -> ResponseLog:
    log = ResponseLog(header(**values))
    for number, text in enumerate(texts):
        run_of(log).append(DeltaEntry(log.next_number, text, (number,)))
    run_of(log).append(end(log, reason))
    return log


class Seen:
    """A connection that shows what was written to it.

    Args:
        size: events that fill it; it has room again once somebody looks whether it has.
    """

    def __init__(self, size: int = 1 << 30) -> None:
        self.events: list[dict[str, Any]] = []
        self.num_waits = 0
        self._size = self._room = size

    def write(self, payload: bytes) -> bool:
        self.events.append(orjson.loads(payload))
        self._room -= 1
        return self._room > 0

    async def drained(self) -> None:
        self.num_waits += 1
        await asyncio.sleep(0)
        self._room = self._size


def jsons(events: Sequence[Event]) -> list[bytes]:
    return [event.json for event in events]


@asynccontextmanager
async def following(subscriber: Subscriber, size: int = 1 << 30) -> AsyncIterator[Seen]:
    """A reader that leaves."""
    seen = Seen(size)
    task = asyncio.create_task(subscriber.write_to(seen, jsons))
    await asyncio.sleep(0)
    yield seen
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def events_of(log: ResponseLog, after: int = -1) -> list[dict[str, Any]]:
    seen = Seen()
    await Subscriber(log, after=after).write_to(seen, jsons)
    return seen.events


@pytest.mark.parametrize("generates", [True, False])
@pytest.mark.parametrize("is_background", [True, False])
@pytest.mark.parametrize("reason", REASONS)
async def test_every_cursor_sees_the_rest(
    generates: bool, is_background: bool, reason: FinishReason | None
) -> None:
    texts = ["Hé", "", "llo <b>\u2028"] if generates else []
    log = filled(texts, reason, generates=generates, is_background=is_background)
    whole = await events_of(log)
    assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
    assert "".join(event.get("delta", "") for event in whole) == "".join(texts)
    terminal = [
        event for event in whole
        if event["type"] in ("response.completed", "response.incomplete", "response.failed")
    ]  # fmt: skip
    assert terminal == whole[-1:]
    assert terminal[0]["response"] == response_object(log)
    for event in whole:
        EVENTS.validate_python(event)
    for after in range(-1, len(whole)):
        assert await events_of(log, after) == whole[after + 1 :]
    for after in range(len(whole), len(whole) + 3):
        with pytest.raises(RequestRefusedError, match=f"starting_after is {after}"):
            await events_of(log, after)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(max_size=3), max_size=12),
    st.lists(st.integers(0, 20), max_size=6),
    st.lists(st.integers(0, 2), min_size=12, max_size=12),
    st.integers(1, 4),
)
async def test_a_reader_that_comes_and_goes_misses_nothing(
    texts: list[str], stays: list[int], pauses: list[int], size: int
) -> None:
    """It reads a few events, leaves while the response goes on, and comes back; its connection
    has room for a few events at a time."""
    log = ResponseLog(header())
    whole = await events_of(filled(texts))

    async def write() -> None:
        for number, text in enumerate(texts):
            run_of(log).append(DeltaEntry(log.next_number, text, (number,)))
            for _ in range(pauses[number]):
                await asyncio.sleep(0)
        run_of(log).append(end(log, FinishReason.STOP))

    writer = asyncio.create_task(write())
    seen: list[dict[str, Any]] = []
    for stay in [*stays, len(whole)]:
        async with following(Subscriber(log, after=len(seen) - 1), size) as reader:
            wanted = min(stay, len(whole) - len(seen))
            while len(reader.events) < wanted:  # noqa: ASYNC110  (it looks at every turn)
                await asyncio.sleep(0)
        seen += reader.events[:stay]
    await writer
    assert seen == whole
    assert not log.readers


async def test_a_slow_reader_gets_several_at_once() -> None:
    log = ResponseLog(header())
    with log.read() as reader:
        for number in range(3):
            run_of(log).append(DeltaEntry(log.next_number, "x", (number,)))
        assert not reader.when_ready(lambda: None)
        assert len(await next_of(reader) or ()) == 3
        run_of(log).append(end(log, FinishReason.STOP))
        assert len(await next_of(reader) or ()) == 1
        assert await next_of(reader) is None


async def test_what_comes_is_written_at_once_while_there_is_room() -> None:
    log = ResponseLog(header())
    async with following(Subscriber(log), size=8) as seen:
        num_opening = len(seen.events)
        await asyncio.sleep(0)
        run_of(log).append(DeltaEntry(log.next_number, "a", (1,)))
        for _ in range(3):
            await asyncio.sleep(0)  # the first delta finds a task that waits
        for number, text in enumerate("bc"):
            run_of(log).append(DeltaEntry(log.next_number, text, (number,)))
            assert seen.events[-1]["delta"] == text  # nobody had to be woken
        run_of(log).append(DeltaEntry(log.next_number, "d", (4,)))
        run_of(log).append(DeltaEntry(log.next_number, "e", (5,)))
        assert (len(seen.events), seen.num_waits) == (8, 0)  # it is full: "e" waits in the log
        for _ in range(5):
            await asyncio.sleep(0)
        assert [event["delta"] for event in seen.events[num_opening:]] == list("abcde")
        assert seen.num_waits == 1


async def test_a_connection_that_breaks_ends_its_reader_alone() -> None:
    class Broken(Seen):
        def write(self, payload: bytes) -> bool:
            if len(self.events) == num_before:
                raise ConnectionError
            return super().write(payload)

    log, broken = ResponseLog(header()), Broken()
    num_before = 6
    task = asyncio.create_task(Subscriber(log).write_to(broken, jsons))
    async with following(Subscriber(log)) as seen:
        for number, text in enumerate("abcd"):
            run_of(log).append(DeltaEntry(log.next_number, text, (number,)))
            for _ in range(3):
                await asyncio.sleep(0)
        with pytest.raises(ConnectionError):
            await task
        assert len(log.readers) == 1
        assert [event["delta"] for event in seen.events[-4:]] == list("abcd")


async def test_a_reader_that_is_cut_gets_nothing_that_came_meanwhile() -> None:
    log, seen = ResponseLog(header()), Seen()
    task = asyncio.create_task(Subscriber(log).write_to(seen, jsons))
    await asyncio.sleep(0)
    run_of(log).append(DeltaEntry(log.next_number, "a", (1,)))
    log.replica.append(1, DeltaEntry(log.next_number, "b", (2,)))
    log.replica.acknowledged(1, 2)
    for reader in log.readers:
        reader.fail(GenerationFailedError("cut"), at_once=True)
    with pytest.raises(GenerationFailedError):
        await task
    assert seen.events[-1]["delta"] == "a"


@pytest.mark.parametrize(
    "payloads", [_joined, Lane(cast("Any", None), stream_id="x")._labelled], ids=["sse", "lane"]
)
async def test_deltas_look_the_same_alone_and_together(payloads: Payloads) -> None:
    """One by one, each is put around its text; together, by the general way."""

    class Raw(Seen):
        written = b""

        def write(self, payload: bytes) -> bool:
            self.written += payload
            return True

    log, live, late = ResponseLog(header()), Raw(), Raw()
    task = asyncio.create_task(Subscriber(log).write_to(live, payloads))
    for number, text in enumerate(["a", 'quoted "b"\n', "ü😀", "d" * 3000]):
        await asyncio.sleep(0)
        run_of(log).append(DeltaEntry(log.next_number, text, (number,)))
    run_of(log).append(end(log, FinishReason.STOP))
    await task
    await Subscriber(log).write_to(late, payloads)
    assert live.written == late.written


async def test_notices_come_in_their_place_and_are_not_replayed() -> None:
    log = ResponseLog(header())
    notices = ("preempted", "queue")
    async with following(Subscriber(log, notices=notices)) as seen:
        num_opening = len(seen.events)
        run_of(log).append(DeltaEntry(log.next_number, "a", (1,)))
        log.notify("preempted")
        log.notify("resumed")
        run_of(log).append(DeltaEntry(log.next_number, "b", (2,)))
        log.notify("queue", position=3)
        for _ in range(3):
            await asyncio.sleep(0)
    found = seen.events[num_opening:]
    assert [event.get("delta", event["type"]) for event in found] == [
        "a", "penstock.preempted", "b", "penstock.queue"
    ]  # fmt: skip
    assert found[-1]["position"] == 3
    assert "sequence_number" not in found[-1]
    run_of(log).append(end(log, FinishReason.STOP))
    again = Seen()
    await Subscriber(log, notices=notices).write_to(again, jsons)
    assert not [event for event in again.events if event["type"].startswith("penstock.")]


@pytest.mark.parametrize("num_before", [0, 1, 3])
async def test_a_reader_follows_a_response_to_its_next_owner(num_before: int) -> None:
    texts = ["a", "b", "c"]
    whole = filled(texts)
    log = ResponseLog(header(), storage=Elsewhere())
    for number, text in enumerate(texts[:num_before]):
        run_of(log).append(DeltaEntry(log.next_number, text, (number,)))
    seen = Seen()
    task = asyncio.create_task(Subscriber(log).write_to(seen, jsons))
    await asyncio.sleep(0)
    go_on_elsewhere(log, whole.entries[num_before:])
    await task
    assert seen.events == await events_of(whole)


async def test_what_is_not_confirmed_is_not_seen() -> None:
    class Slow(Elsewhere):
        def store(self, log: ResponseLog) -> None:
            pass

    log = ResponseLog(header(), storage=Slow())
    run_of(log).append(DeltaEntry(log.next_number, "a", (1,)))
    run_of(log).append(end(log, FinishReason.STOP))
    with log.read() as reader:
        waiting = asyncio.ensure_future(next_of(reader))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        assert not log.is_ended
        log.do(log.replica.acknowledged(1, 1))
        assert len(await waiting or ()) == 1
        go_on_elsewhere(log, [])
        log.fail(RuntimeError("the storage is gone"))
        with pytest.raises(RuntimeError, match="gone"):
            await next_of(reader)
