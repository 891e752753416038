"""The client against our own server with the demo model: every record clean, every token there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest
import uvloop

from penstock.load.client.records import Call, Endpoint, Message, StreamRecord
from penstock.load.client.transport import TransportKind, Wire
from penstock.load.launch import Started

from ..system.processes import metric

_NUM_STREAMS = 16
_WAYS = [
    ("sse", "chat"),
    ("websocket", "responses"),
    pytest.param("sse", "completions", marks=pytest.mark.exhaustive),
    pytest.param("sse", "responses", marks=pytest.mark.exhaustive),
]


def _run(coroutine: Coroutine[Any, Any, None]) -> None:
    """On the event loop that benches use."""
    uvloop.run(coroutine)


def _call(index: int, **fields: Any) -> Call:
    asked = Message(role="user", content=f"Hi, I am Zorin{index}. Tell me a story, 好 and 🙂!")
    values = {"max_tokens": 8 + index, "ignore_eos": True, "messages": (asked,), **fields}
    return Call(model="demo", extra={"temperature": 1.5, "seed": index}, **values)


def _record(call: Call) -> StreamRecord:
    return StreamRecord(scheduled_s=0.0, expected_tokens=call.max_tokens)


@pytest.mark.parametrize(("kind", "endpoint"), _WAYS)
def test_every_stream_is_clean(demo: Started, kind: TransportKind, endpoint: Endpoint) -> None:
    calls = [_call(index) for index in range(_NUM_STREAMS)]
    records = [_record(call) for call in calls]

    async def run() -> None:
        async with Wire(transport=kind, endpoint=endpoint).open(demo.base_url) as transport:
            pairs = zip(calls, records, strict=True)
            await asyncio.gather(*(transport.stream(call, record) for call, record in pairs))

    _run(run())
    for call, record in zip(calls, records, strict=True):
        assert record.faults == [], record.detail
        assert record.output_tokens == call.max_tokens
        assert record.prompt_tokens > 10
        assert record.text
        assert record.finish_reason in ("length", "max_output_tokens")
        assert 0 < len(record.event_times_s) <= call.max_tokens
        assert record.sent_s < record.event_times_s[0] <= record.event_times_s[-1] <= record.ended_s
        if endpoint != "responses":
            assert len(record.event_tokens) == len(record.event_times_s)
    if endpoint != "responses":
        num_timed = sum(sum(record.event_tokens) for record in records)
        num_tokens = sum(call.max_tokens for call in calls)
        assert 0.9 * num_tokens < num_timed <= num_tokens  # the last of a stream may have no text


# Responses over SSE go on when their client leaves, so that it can come back.
@pytest.mark.parametrize(("kind", "endpoint"), _WAYS[:3])
def test_walking_away_frees_the_server(
    demo: Started, kind: TransportKind, endpoint: Endpoint
) -> None:
    async def run() -> None:
        async with (
            Wire(transport=kind, endpoint=endpoint).open(demo.base_url) as transport,
            httpx.AsyncClient(base_url=demo.base_url, timeout=60) as metrics,
        ):
            # So long that none can have ended when the last has begun.
            calls = [_call(index, max_tokens=1900) for index in range(12)]
            records = [_record(call) for call in calls]
            tasks = [
                asyncio.create_task(transport.stream(call, record))
                for call, record in zip(calls, records, strict=True)
            ]
            async with asyncio.timeout(60):
                while not all(record.event_times_s for record in records):
                    assert not any(record.faults for record in records), records
                    await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert all(task.cancelled() for task in tasks)
            assert all(record.is_clean for record in records)
            async with asyncio.timeout(60):
                while await metric(metrics, "num_requests_running"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            record = _record(_call(0))
            await transport.stream(_call(0), record)
            assert record.faults == []

    _run(run())
