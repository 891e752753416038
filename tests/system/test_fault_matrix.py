"""kill -9 of the engine, of a gateway, of Redis, while a dozen streams are each somewhere else.

Two servers share one Redis. Streams begin at the first; over SSE and over WebSockets, resumed on
the same server and on the other, some by clients that lost nothing and left. What each client has
at the end is checked by `stream_checker`, and against a run that nobody disturbed: greedy, fp32.
Of five streams, two are stories, two the same JSON, whose grammar holds across each kill, and one
thinks before its JSON, up to a budget that ends the thought behind the last kill.

An engine takes only as many steps as it is let before a kill (`paced_engine`): no stream can be
over by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import httpx
import pytest

from tests.redis_server import RedisServer

from .kills import kill
from .paced_engine import Pace
from .processes import END_S, Served, serve, wait_until
from .stream_checker import TERMINAL, CheckedStream, ExpiredError, replay

# The first tier has kills of both in `test_disk_faults.py`.
pytestmark = [pytest.mark.redis, pytest.mark.process_kills, pytest.mark.exhaustive]

_NUM_CUTS = 3  # per transport and place of return
_APART = 5  # steps between the begins of two streams: each is somewhere else when it is cut
_AFTER_LAST = 40  # steps when the last has begun, and after a kill; all together end no stream
_LENGTHS = (240, 6)  # tokens of the first story, and how many less of each that follows
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
_BOOK = {"type": "array", "items": _CHAPTER, "minItems": 5, "maxItems": 5}
_OBJECT = {
    "input": "Write a book about a fox.",
    "max_output_tokens": 4000,
    "text": {"format": {"type": "json_schema", "name": "book", "strict": True, "schema": _BOOK}},
}
_BUDGET, _NUM_END_TOKENS = 150, 6  # in tokens of the demo; more than steps before a kill
_THOUGHT = {
    **_OBJECT,
    "enable_thinking": True,
    "thinking_token_budget": _BUDGET,
    "logit_bias": {"32": -100},  # "<", with which the model would end the thought
}
_HELLO = {"model": "demo", "input": "Hello", "max_output_tokens": 8, "temperature": 0}

Kill = tuple[str, str]  # of which server, which process


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two servers of one Redis; the second serves new sessions without it, too."""

    redis: RedisServer
    first: Served
    second: Served
    paces: tuple[Pace, Pace]

    def allow(self, num_steps: int) -> None:
        for pace in self.paces:
            pace.allow(num_steps)

    def set_free(self) -> None:
        for pace in self.paces:
            pace.set_free()

    def wait_ready(self) -> None:
        for served in (self.first, self.second):
            wait_until(served.is_ready)


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
        optional = ("--session-storage", "optional")
        paces = Pace(path / "first.pace"), Pace(path / "second.pace")
        servers = (
            serve(*flags, log=path / "first", command=paces[0].command),
            serve(*flags, *optional, log=path / "second", command=paces[1].command),
        )
        with ThreadPoolExecutor() as threads:  # both start at once
            first, second = threads.map(stack.enter_context, servers)
        yield Pair(redis=redis, first=first, second=second, paces=paces)


@pytest.fixture(scope="module")
def undisturbed(pair: Pair) -> list[dict[str, Any]]:
    """What comes of each case when nothing happens."""

    async def run() -> list[dict[str, Any]]:
        streams = await asyncio.gather(*(stream.read() for stream in _streams(pair)))
        objects = [stream.text for stream in streams if "text" in stream.body]
        assert all(len(json.loads(text)) == _BOOK["minItems"] for text in objects)
        thoughts = [
            stream.outcome["usage"]["output_tokens_details"]["reasoning_tokens"]
            for stream in streams
            if stream.thought
        ]
        assert thoughts == [_BUDGET + _NUM_END_TOKENS] * (len(streams) // 5)
        num_tokens = [stream.outcome["usage"]["output_tokens"] for stream in streams]
        assert min(num_tokens) > len(streams) * _APART + 2 * _AFTER_LAST
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
                **({"min_tokens": length}, _OBJECT, _THOUGHT)[number % 5 // 2],
            },
            begins_at=pair.first.base_url,
            resumes_at=(pair.first if place == "same" else pair.second).base_url,
            transport=transport,
            leaves_after=40 if place == "other" else 0,
        )
        for number, (_, transport, place) in enumerate(_CASES)
    ]


async def _begin(pair: Pair, streams: list[CheckedStream]) -> list[asyncio.Task[CheckedStream]]:
    """Begin one after the other; each is somewhere else when the last has begun."""
    pair.allow(0)
    reading: list[asyncio.Task[CheckedStream]] = []
    for stream in streams:
        reading.append(asyncio.create_task(stream.read()))
        await _until(lambda stream=stream: stream.events)  # type: ignore[misc]
        num_events = len(streams[0].events)
        pair.allow(_APART)
        await _until(lambda num=num_events: len(streams[0].events) > num)  # type: ignore[misc]
    pair.allow(_AFTER_LAST)
    await _until(lambda: all(stream.text or stream.thought for stream in _staying(streams)))
    return reading


def _staying(streams: Sequence[CheckedStream]) -> list[CheckedStream]:
    """Those whose clients do not leave; over SSE and over WebSockets."""
    return [stream for stream in streams if not stream.leaves_after]


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(END_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def _check_amid(what: str, streams: list[CheckedStream]) -> None:
    """Nothing is over yet, and no thought."""
    print(f"\n{what} after", *(len(stream.events) for stream in streams), "events")
    assert not any(stream.is_ended for stream in streams)
    assert not any(stream.text for stream in streams if "thinking_token_budget" in stream.body)


async def _check(
    pair: Pair, streams: list[CheckedStream], undisturbed: list[dict[str, Any]]
) -> None:
    """Each is what it was to be, whoever is asked."""
    for stream, expected in zip(streams, undisturbed, strict=True):
        assert stream.outcome == expected
        assert stream.response_id is not None
        for served in (pair.first, pair.second):
            assert await replay(served.base_url, stream.response_id) == stream.events
        async with httpx.AsyncClient(base_url=pair.second.base_url, timeout=END_S) as http:
            stored = await http.get(f"/v1/responses/{stream.response_id}")
        assert stored.json() == stream.events[-1]["response"]  # with what it has used
    print("longest pauses", *(f"{stream.longest_pause_s:.2f}" for stream in streams))
    print("connections", *(stream.num_connections for stream in streams))


@pytest.mark.parametrize(
    "kills",
    [
        (("first", "engine"), ("first", "gateway")),
        (("first", "engine"), ("first", "engine")),
        (("first", "gateway"), ("second", "gateway")),
    ],
    ids=["engine, gateway", "engine twice", "both gateways"],
)
async def test_processes_killed(
    pair: Pair, undisturbed: list[dict[str, Any]], kills: tuple[Kill, Kill]
) -> None:
    streams = _streams(pair)
    before = await _used(pair)
    reading = await _begin(pair, streams)
    for which, what in kills:
        _check_amid(f"{what} killed", streams)
        pair.allow(0)
        await kill(getattr(pair, which), what)
        num_chars = sum(len(stream.text) for stream in streams)
        pair.allow(_AFTER_LAST)
        await _until(
            lambda num=num_chars: sum(len(stream.text) for stream in streams) > num  # type: ignore[misc]
        )
    pair.set_free()
    await asyncio.gather(*reading)
    pair.wait_ready()
    await _check(pair, streams, undisturbed)
    told = [_counts(each.events[-1]["response"]["penstock"]["usage"], 1) for each in streams]
    assert await _used(pair) - before == sum(told, Counter())


async def _used(pair: Pair) -> Counter[str]:
    """What all requests so far have used, as both servers count it."""
    totals = []
    for served in (pair.first, pair.second):
        async with httpx.AsyncClient(base_url=served.base_url, timeout=END_S) as http:
            days = (await http.get("/v1/usage")).json()["data"]
        totals.append(
            sum(
                (
                    _counts(
                        {**each, **each["penstock"], "prompt_tokens": each["input_tokens"]},
                        each["num_model_requests"],
                    )
                    for day in days
                    for each in day["results"]
                ),
                Counter(),
            )
        )
    assert totals[0] == totals[1]
    return totals[0]


def _counts(used: dict[str, Any], num_requests: int) -> Counter[str]:
    names = ("prompt_tokens", "output_tokens", "thinking_tokens")
    seconds = ("compute_seconds", "kv_block_seconds")
    return Counter(
        {
            "requests": num_requests,
            **{name: used[name] for name in names},
            **used["cached_tokens"],
            **{name: round(1e6 * used[name]) for name in seconds},
        }
    )


async def test_redis_killed_and_back(pair: Pair, undisturbed: list[dict[str, Any]]) -> None:
    """Live streams go on where they are, and cannot be resumed; what is new is refused, or runs
    without storage. When Redis is back, everything works as before."""
    streams = _streams(pair)
    reading = await _begin(pair, streams)
    _check_amid("Redis killed", streams)
    pair.redis.kill()
    pair.set_free()
    amid = _staying(streams)
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
        httpx.AsyncClient(base_url=pair.first.base_url, timeout=END_S) as first,
        httpx.AsyncClient(base_url=pair.second.base_url, timeout=END_S) as second,
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
        httpx.AsyncClient(base_url=pair.first.base_url, timeout=END_S) as first,
        httpx.AsyncClient(base_url=pair.second.base_url, timeout=END_S) as second,
    ):
        turn = await first.post("/v1/responses", json=_HELLO)
        assert turn.status_code == 200, turn.text
        again = {**_HELLO, "previous_response_id": turn.json()["id"]}
        turn = await second.post("/v1/responses", json=again)
        assert turn.status_code == 200, turn.text
