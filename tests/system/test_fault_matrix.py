"""kill -9 of the engine, of a gateway, of Redis, while a dozen streams are each somewhere else.

Two servers share one Redis. Streams begin at the first; over SSE and over WebSockets, resumed on
the same server and on the other, some by clients that lost nothing and left. What each client has
at the end is checked by `stream_checker`, and against a run that nobody disturbed: greedy, fp32.
Of five streams, two are stories and three the same JSON, whose grammar holds across each kill.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import httpx
import pytest

from tests.redis_server import RedisServer

from .processes import Served, serve, suspended, wait_until
from .stream_checker import TERMINAL, CheckedStream, ExpiredError, replay

pytestmark = pytest.mark.redis

_NUM_CUTS = 5  # per transport and place of return
_APART = 5  # events between the begins of two streams: each is somewhere else when it is cut
_LENGTHS = (700, 10)  # tokens of the first stream, and how many less of each that follows
_QUIET_S = 0.5
_FROM_END = 400  # characters to come of a stream that is not about to end
_CASES = list(product(range(_NUM_CUTS), ("sse", "websocket"), ("same", "other")))
_CHAPTER = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 30},
        "pages": {"type": "integer", "minimum": 1, "maximum": 999},
        "mood": {"enum": ["happy", "sad", "strange"]},
        "hero": {"type": ["string", "null"], "maxLength": 20},
    },
    "required": ["title", "pages", "mood", "hero"],
    "additionalProperties": False,
}
_BOOK = {"type": "array", "items": _CHAPTER, "minItems": 16, "maxItems": 16}
_OBJECT = {
    "input": "Write a book about a fox.",
    "max_output_tokens": 4000,
    "text": {"format": {"type": "json_schema", "name": "book", "strict": True, "schema": _BOOK}},
}
_BACK_S = 90.0
_HELLO = {"model": "demo", "input": "Hello", "max_output_tokens": 8, "temperature": 0}
# What is promised beyond the time that a start takes, and by how much a loaded machine may miss it.
_EXTRA_S = 2.0
_PATIENCE = 3.0
_ATTEMPTS = 5


class TooLateError(Exception):
    """Too many streams had ended, or come near it, before they were disturbed: nothing is shown.
    That happens where this process stands still for a moment."""

    def __init__(self, reading: list[asyncio.Task[CheckedStream]]) -> None:
        super().__init__("too few streams are amid their text")
        self.reading = reading


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two servers of one Redis; the second serves new sessions without it, too."""

    redis: RedisServer
    first: Served
    second: Served

    def wait_ready(self) -> None:
        for served in (self.first, self.second):
            wait_until(lambda served=served: _is_ready(served.base_url), timeout_s=_BACK_S)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    path = tmp_path_factory.mktemp("pair")
    with contextlib.ExitStack() as stack:
        # A log that Redis is slow to take is given up; disk and machine are not to be the reason.
        # What is killed, and not the machine, loses nothing by it.
        options = {"appendfsync": "no"}
        redis = stack.enter_context(RedisServer(path / "redis", options=options))
        flags = ("--dtype", "float32", "--redis-url", redis.url)
        flags += ("--redis-patience-ms", "2000")
        flags += ("--disconnect-grace-s", "600")  # who is slow to return has not left
        first = stack.enter_context(serve(*flags, log=path / "first"))
        optional = ("--session-storage", "optional")
        second = stack.enter_context(serve(*flags, *optional, log=path / "second"))
        yield Pair(redis=redis, first=first, second=second)


@pytest.fixture(scope="module")
def undisturbed(pair: Pair) -> list[dict[str, Any]]:
    """What comes of each case when nothing happens."""

    async def run() -> list[dict[str, Any]]:
        streams = await asyncio.gather(*(stream.read() for stream in _streams(pair)))
        objects = {stream.text for stream in streams if "text" in stream.body}
        assert len(objects) == 1
        assert len(json.loads(objects.pop())) == _BOOK["minItems"]
        return [stream.outcome for stream in streams]

    return asyncio.run(run())


def _streams(pair: Pair) -> list[CheckedStream]:
    return [
        CheckedStream(
            body={
                "model": "demo",
                "input": f"My name is Zorin{number}. Tell me a story about a fox.",
                "max_output_tokens": (length := _LENGTHS[0] - _LENGTHS[1] * number),
                "temperature": 0,
                **({"min_tokens": length} if number % 5 < 2 else _OBJECT),
            },
            begins_at=pair.first.base_url,
            resumes_at=(pair.first if place == "same" else pair.second).base_url,
            transport=transport,
            leaves_after=40 if place == "other" else 0,
        )
        for number, (_, transport, place) in enumerate(_CASES)
    ]


async def _begin(streams: list[CheckedStream]) -> list[asyncio.Task[CheckedStream]]:
    """Begin one after the other; each is somewhere else when the last has begun."""
    reading: list[asyncio.Task[CheckedStream]] = []
    for stream in streams:
        if reading:
            await _move_on(streams[:1], _APART)
        reading.append(asyncio.create_task(stream.read()))
    return reading


def again_if_too_late(
    test: Callable[[Pair, list[dict[str, Any]]], Awaitable[None]],
) -> Callable[[Pair, list[dict[str, Any]]], Awaitable[None]]:
    """Run the test until it came in time. Only that is tried again."""

    @functools.wraps(test)
    async def run(pair: Pair, undisturbed: list[dict[str, Any]]) -> None:
        for _ in range(_ATTEMPTS):
            try:
                return await test(pair, undisturbed)
            except TooLateError as error:
                await asyncio.gather(*error.reading)
        pytest.fail(f"too late {_ATTEMPTS} times")

    return run


async def _move_on(streams: list[CheckedStream], num_events: int) -> None:
    """Return when each has got so many more, or ended."""
    goals = [len(stream.events) + num_events for stream in streams]
    async with asyncio.timeout(_BACK_S):
        while not all(  # noqa: ASYNC110
            stream.is_ended or len(stream.events) >= goal
            for stream, goal in zip(streams, goals, strict=True)
        ):
            await asyncio.sleep(0.001)


async def _stand_still(streams: list[CheckedStream]) -> None:
    """Return when nothing is on its way to them."""
    num_events = -1
    while num_events != (num_events := sum(len(stream.events) for stream in streams)):  # noqa: ASYNC110
        await asyncio.sleep(_QUIET_S)


def _aim(
    what: str,
    streams: list[CheckedStream],
    reading: list[asyncio.Task[CheckedStream]],
    undisturbed: list[dict[str, Any]],
) -> list[CheckedStream]:
    """Print where the streams are; those that are amid their text, with clients that stay.

    Raises:
        TooLateError: there is none over SSE, or none over a WebSocket.
    """
    print(f"\n{what} after", *(len(stream.events) for stream in streams), "events")
    amid = [
        stream
        for stream, expected in zip(streams, undisturbed, strict=True)
        if stream.text and len(stream.text) + _FROM_END < len(expected["text"])
        if not stream.leaves_after
    ]
    if len({stream.transport for stream in amid}) < 2:
        raise TooLateError(reading)
    return amid


async def _check(
    pair: Pair, streams: list[CheckedStream], undisturbed: list[dict[str, Any]]
) -> float:
    """Each is what it was to be, whoever is asked; the longest pause of any."""
    for stream, expected in zip(streams, undisturbed, strict=True):
        assert stream.outcome == expected
        assert stream.response_id is not None
        for served in (pair.first, pair.second):
            assert await replay(served.base_url, stream.response_id) == stream.events
    pause_s = max(stream.longest_pause_s for stream in streams)
    print("longest pauses", *(f"{stream.longest_pause_s:.2f}" for stream in streams))
    print("connections", *(stream.num_connections for stream in streams))
    return pause_s


@again_if_too_late
async def test_an_engine_killed_twice(pair: Pair, undisturbed: list[dict[str, Any]]) -> None:
    num_before = len(_starts_s(pair.first, "engine"))
    streams = _streams(pair)
    reading = await _begin(streams)
    for _ in range(2):
        amid = _aim("engine killed", streams, reading, undisturbed)
        await _kill(pair.first, "engine")
        await _move_on(amid, 10)
    await asyncio.gather(*reading)
    pause_s = await _check(pair, streams, undisturbed)
    starts_s = _starts_s(pair.first, "engine")[num_before:]
    assert len(starts_s) == 2
    print(f"the engine took {starts_s} s to start")
    assert pause_s < _PATIENCE * (max(starts_s) + _EXTRA_S)


@again_if_too_late
async def test_gateways_killed_in_turn(pair: Pair, undisturbed: list[dict[str, Any]]) -> None:
    servers = (pair.first, pair.second)
    nums_before = [len(_starts_s(served, "gateway")) for served in servers]
    streams = _streams(pair)
    reading = await _begin(streams)
    for served in servers:
        amid = _aim("gateway killed", streams, reading, undisturbed)
        await _kill(served, "gateway")
        await _move_on(amid, 10)
    await asyncio.gather(*reading)
    pair.wait_ready()
    pause_s = await _check(pair, streams, undisturbed)
    starts_s = []
    for served, num_before in zip(servers, nums_before, strict=True):
        starts_s += _starts_s(served, "gateway")[num_before:]
    assert len(starts_s) == 2
    print(f"the gateways took {starts_s} s to start")
    assert pause_s < _PATIENCE * (max(starts_s) + _EXTRA_S)


@again_if_too_late
async def test_redis_killed_and_back(pair: Pair, undisturbed: list[dict[str, Any]]) -> None:
    """Live streams go on where they are, and cannot be resumed; what is new is refused, or runs
    without storage. When Redis is back, everything works as before."""
    streams = _streams(pair)
    reading = await _begin(streams)
    pair.first.renew_family()
    with suspended(pair.first.child("penstock-engine")):
        await _stand_still(streams)  # what is still to come of them comes without Redis
        amid = _aim("Redis killed", streams, reading, undisturbed)
        pair.redis.kill()
    await asyncio.gather(
        *(task for stream, task in zip(streams, reading, strict=True) if stream in amid)
    )
    await _check_new_sessions_without_redis(pair)
    pair.redis.start()
    ends = await asyncio.gather(*reading, return_exceptions=True)
    for stream, end, expected in zip(streams, ends, undisturbed, strict=True):
        if end is stream:
            assert stream.outcome == expected
        else:
            assert isinstance(end, ExpiredError), end
            assert stream not in amid
            assert expected["text"].startswith(stream.text)
    assert all(stream.num_connections == 1 for stream in amid)
    for stream, served in product(streams, (pair.first, pair.second)):
        await _check_replay_after_redis(served, stream, was_shown_without=stream in amid)
    print("longest pauses", *(f"{stream.longest_pause_s:.2f}" for stream in amid))
    await _check_sessions_work(pair)


async def _check_replay_after_redis(
    served: Served, stream: CheckedStream, *, was_shown_without: bool
) -> None:
    """Nobody gets less than others saw: what was shown without Redis is not told at all, the rest
    as it was. A client that left may have missed some of it while Redis was away."""
    assert stream.response_id is not None
    try:
        events = await replay(served.base_url, stream.response_id)
    except ExpiredError:
        return
    assert not was_shown_without
    assert events[: len(stream.events)] == stream.events
    assert events[-1]["type"] in TERMINAL


async def _check_new_sessions_without_redis(pair: Pair) -> None:
    async with (
        httpx.AsyncClient(base_url=pair.first.base_url, timeout=_BACK_S) as first,
        httpx.AsyncClient(base_url=pair.second.base_url, timeout=_BACK_S) as second,
    ):
        refused = await first.post("/v1/responses", json=_HELLO)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "session_store_unavailable"
        refused = await first.post("/v1/conversations", json={})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "session_store_unavailable"
        unstored = await first.post("/v1/responses", json={**_HELLO, "store": False})
        assert unstored.status_code == 200
        run = await second.post("/v1/responses", json=_HELLO)
        assert run.status_code == 200
        assert run.json()["output"][0]["content"][0]["text"]


async def _check_sessions_work(pair: Pair) -> None:
    """A first turn on one server, the next on the other."""
    async with (
        httpx.AsyncClient(base_url=pair.first.base_url, timeout=_BACK_S) as first,
        httpx.AsyncClient(base_url=pair.second.base_url, timeout=_BACK_S) as second,
    ):
        turn = await first.post("/v1/responses", json=_HELLO)
        assert turn.status_code == 200, turn.text
        again = {**_HELLO, "previous_response_id": turn.json()["id"]}
        turn = await second.post("/v1/responses", json=again)
        assert turn.status_code == 200, turn.text


async def _kill(served: Served, which: str) -> None:
    """Kill the engine or the gateway, and wait for its successor."""
    num_back = len(_starts_s(served, which)) + 1
    name = f"penstock-{which}"
    next(child for child in served.renew_family() if child.name() == name).kill()
    await asyncio.to_thread(wait_until, lambda: len(_starts_s(served, which)) == num_back)


def _starts_s(served: Served, which: str) -> list[float]:
    """How long each took that came back."""
    found = re.findall(rf"the {which} is back after ([0-9.]+) s", served.log.read_text())
    return [float(start_s) for start_s in found]


def _is_ready(base_url: str) -> bool:
    try:
        return httpx.get(f"{base_url}/ready", timeout=_BACK_S).status_code == 200
    except httpx.TransportError:
        return False
