"""Steers at random tokens, over server-sent events and WebSockets, while engine and gateway are
killed and stand still: each is committed once, cut at once, and no text is lost or repeated."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from penstock.clients import AsyncClient, RefusedError, RetryPolicy, output_text
from tests.redis_server import RedisServer

from .kills import kill, named
from .processes import END_S, ENDLESS_TOKENS, Served, serve, suspended

_PATIENT = RetryPolicy(max_retries=400, max_resumes=400, first_wait_s=0.05, max_wait_s=0.5)
_STORY: dict[str, Any] = {
    "model": "demo",
    "input": "Tell me a long story. " * 100,  # so that there is a prefix worth the name
    "temperature": 0,
    "min_tokens": ENDLESS_TOKENS // 2,  # for all of them a successor might have no room
    "max_output_tokens": ENDLESS_TOKENS,
}
_MAX_CUT = 2  # tokens after a steer has arrived
_PREFIX_HIT = 0.98
_FREEZE_S = 0.5
_NUM_ROUNDS, _NUM_CHAINS, _NUM_STEERS = 10, 5, 10


@dataclass
class _Answer:
    """One answer of a chain.

    Attributes:
        num_late: deltas after its first steer.
    """

    events: list[Any]
    num_late: int


def _split(events: list[Any]) -> list[_Answer]:
    begins = [at for at, event in enumerate(events) if event["type"] == "response.created"]
    found = []
    for begin, end in zip(begins, [*begins[1:], len(events)], strict=True):
        own = events[begin:end]
        kinds = [event["type"] for event in own]
        num_late = 0
        if "response.steer.accepted" in kinds:
            rest = kinds[kinds.index("response.steer.accepted") :]
            num_late = rest.count("response.output_text.delta")
        found.append(_Answer(own, num_late))
    return found


async def _chain(
    client: AsyncClient,
    chance: random.Random,
    wire: str,
    num: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
    *,
    begun: asyncio.Semaphore | None = None,
) -> list[_Answer]:
    """A response that is steered again and again, over one stream.

    Args:
        begun: released with the first delta.
    """
    socket = client.connect()
    asked = {**_STORY, **settings, "metadata": {"chain": str(chance.random())}}
    stream = client.responses.stream(**asked) if wire == "sse" else await socket.create(**asked)
    events: list[Any] = []
    sent: list[asyncio.Task[Any]] = []
    wait = chance.randint(1, 12)
    async with socket, stream:
        async for event in stream:
            events.append(event)
            if event["type"] == "response.created":
                wait = chance.randint(1, 12)
            elif event["type"] == "response.output_text.delta":
                wait -= 1
                if begun is not None:
                    begun.release()
                    begun = None
            if wait == 0 and event["type"] == "response.output_text.delta":
                if len(sent) < num:
                    response_id = stream.response_id
                    assert response_id is not None
                    text = f"And now number {len(sent)}?"
                    sent.append(asyncio.create_task(client.responses.steer(response_id, text)))
                else:
                    await client.responses.cancel(str(stream.response_id))
    answers = _split(events)
    told = []
    for task in sent:
        try:
            told.append(await task)
        except RefusedError as error:  # it had just ended, and nothing was taken
            if error.code not in ("response_already_completed", "response_not_active"):
                raise
    _check_chain(answers, [each["id"] for each in told])
    return answers


def _check_chain(answers: list[_Answer], steer_ids: list[str]) -> None:
    accepted, committed = [], []
    for answer, after in zip(answers, [*answers[1:], None], strict=True):
        events = answer.events
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        response = events[-1]["response"]
        deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
        assert output_text(response) == "".join(deltas)
        assert answer.num_late <= _MAX_CUT
        accepted += [e["steer"]["id"] for e in events if e["type"] == "response.steer.accepted"]
        for steer in (response.get("penstock") or {}).get("steers", ()):
            assert steer["status"] == "committed", steer
            assert after is not None
            assert steer["successor_id"] == after.events[0]["response"]["id"]
            committed.append(steer["id"])
    assert accepted == committed
    assert sorted(accepted) == sorted(steer_ids)
    assert len(set(accepted)) == len(accepted)


async def _steer(
    served: Served, num_chains: int, num_steers: int, *, begun: asyncio.Semaphore | None = None
) -> list[list[_Answer]]:
    async with AsyncClient(served.base_url, retries=_PATIENT) as client:
        chances = [random.Random(number) for number in range(num_chains)]
        return await asyncio.gather(
            *(
                _chain(client, chance, ("sse", "websocket")[number % 2], num_steers, begun=begun)
                for number, chance in enumerate(chances)
            )
        )


@pytest.mark.exhaustive
async def test_steers_at_random_tokens(long_model: tuple[str, ...], tmp_path: Path) -> None:
    """Undisturbed, each successor's prompt is found in the prefix cache."""
    with serve(*long_model, log=tmp_path / "log") as served:
        chains = await _steer(served, num_chains=2, num_steers=3)
    num_known = num_cached = 0
    for answers in chains:
        assert len(answers) == 4
        for before, after in itertools.pairwise(answers):
            usage, known = after.events[-1]["response"]["usage"], before.events[-1]["response"]
            num_known += known["usage"]["input_tokens"] + known["usage"]["output_tokens"]
            num_cached += usage["input_tokens_details"]["cached_tokens"]
    assert num_cached >= _PREFIX_HIT * num_known, (num_cached, num_known)


_WORDS = re.compile(r"([a-z]+ ){2000}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("wire", ["sse", "websocket"])
async def test_steers_of_a_grammar_bound_answer_with_drafts(
    long_model: tuple[str, ...], tmp_path: Path, wire: str
) -> None:
    """Each answer is cut within its grammar and says that it is incomplete; drafts end with it."""
    options = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}')
    settings = {"structured_outputs": {"regex": _WORDS.pattern}, "min_tokens": 0}
    with serve(*long_model, *options, log=tmp_path / "log") as served:
        async with AsyncClient(served.base_url, retries=_PATIENT) as client:
            answers = await _chain(client, random.Random(7), wire, 4, settings)
    assert len(answers) == 5
    for number, answer in enumerate(answers):
        response = answer.events[-1]["response"]
        reason = {"reason": "steered"} if number < 4 else None
        assert (response["status"], response["incomplete_details"]) == (
            "incomplete" if number < 4 else "cancelled",
            reason,
        )
        assert re.fullmatch(r"([a-z]+ )*[a-z]*", output_text(response))


@pytest.mark.exhaustive
async def test_500_steers_while_engine_and_gateway_are_killed(
    long_model: tuple[str, ...], tmp_path: Path
) -> None:
    options = ("--data-dir", str(tmp_path / "data"))
    await _steer_amid_kills((*long_model, *options), tmp_path / "log", num_rounds=_NUM_ROUNDS)


@pytest.mark.exhaustive
@pytest.mark.redis
async def test_steers_with_redis_while_engine_and_gateway_are_killed(
    long_model: tuple[str, ...], tmp_path: Path
) -> None:
    with RedisServer(tmp_path / "redis") as redis:
        options = ("--redis-url", redis.url, "--redis-patience-ms", "2000")
        await _steer_amid_kills((*long_model, *options), tmp_path / "log", num_rounds=4)


async def _steer_amid_kills(options: tuple[str, ...], log: Path, *, num_rounds: int) -> None:
    """A round has 50 steers, in which the engine or the gateway is killed or stands still."""
    with serve(*options, log=log) as served:
        num_steers = 0
        for number in range(num_rounds):
            begun = asyncio.Semaphore(0)
            chains = asyncio.create_task(_steer(served, _NUM_CHAINS, _NUM_STEERS, begun=begun))
            for _ in range(_NUM_CHAINS):
                await asyncio.wait_for(begun.acquire(), END_S)
            which = ("engine", "gateway")[number % 2]
            if number % 4 < 2:
                await kill(served, which)
            else:
                with suspended(named(served, which)):
                    await asyncio.sleep(_FREEZE_S)
            num_steers += sum(len(answers) - 1 for answers in await chains)
    # The others came when their answer had just ended.
    assert num_steers >= 0.9 * num_rounds * _NUM_CHAINS * _NUM_STEERS
