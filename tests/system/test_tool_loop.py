"""kill -9 of the engine, of the gateway, of Redis, at every kind of event of a loop that thinks,
calls a tool and answers: the tool runs once, no event is lost or repeated, the log tells the same.

A loop is disturbed once, at the moment its client reads the first event of a kind. Greedy, fp32.
Engine and gateway take seconds to come back, so they are spared the kinds that leave the gateway in
one write with the kind before.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from penstock.clients import AsyncClient, RetryPolicy, calls_of
from tests.redis_server import RedisServer

from .processes import Served, serve, wait_until
from .stream_checker import replay

pytestmark = pytest.mark.redis

_ASKED: dict[str, Any] = {
    "model": "demo",
    "input": "what is 12 plus 30?",
    "reasoning": {"effort": "low"},
    "temperature": 0,
}
_PATIENT = RetryPolicy(max_retries=40, max_resumes=40, max_wait_s=0.5)
_COMPARED = ("status", "output", "usage")
_LEFT_OUT = ("id", "call_id", "input_tokens_details")  # depends on who came before
_TOLD = "penstock.tool_output"
_WITH_THE_ONE_BEFORE = ("in_progress", "part.added", "text.done", "arguments.done", "part.done")
# A supervisor that takes every death for the first of its child, so that none is made to wait.
_SUPERVISOR = """
from penstock.gateway.launch import child
child._HEALTHY_S = 0.0
from penstock.gateway.launch.cli import main
main()
"""

Event = dict[str, Any]
Kind = tuple[str, str]  # the event's type, its item's type
Disturb = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Stack:
    redis: RedisServer
    served: Served

    async def kill_redis(self) -> None:
        """Kill it, and start it again."""
        self.redis.kill()
        await asyncio.to_thread(self.redis.start)

    async def kill(self, name: str) -> None:
        """Kill a process, and wait for its successor."""
        killed = self.served.child(name)
        killed.kill()
        await asyncio.to_thread(self._wait_for_successor, killed, name)

    def _wait_for_successor(self, killed: psutil.Process, name: str) -> None:
        wait_until(lambda: killed not in self.served.renew_family())
        wait_until(lambda: any(child.name() == name for child in self.served.renew_family()))
        wait_until(self._is_ready)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.served.base_url}/ready", timeout=60).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = tmp_path_factory.mktemp("tools")
    # What is killed, and not the machine, loses nothing by it.
    with RedisServer(path / "redis", options={"appendfsync": "no"}) as redis:
        flags = ("--dtype", "float32", "--redis-url", redis.url, "--redis-patience-ms", "20000")
        command = (sys.executable, "-c", _SUPERVISOR)
        with serve(*flags, log=path / "log", command=command) as served:
            yield Stack(redis, served)


class Loop:
    """One run of the tools, and what came of it.

    Attributes:
        rounds: the events of each answer.
        kinds: where each kind was read first.
    """

    def __init__(self, stack: Stack, counter: Path) -> None:
        self.rounds: list[list[Event]] = [[]]
        self.kinds: list[Kind] = []
        self._base_url = stack.served.base_url
        self._counter = counter

    async def run(self, at: Kind | None = None, disturb: Disturb | None = None) -> None:
        """To the end; disturbed when the first event of the kind is read."""

        def calculator(expression: str) -> str:
            """Computes."""
            with self._counter.open("a") as lines:
                lines.write(f"{expression}\n")
            return "4711"

        items: dict[int, str] = {}
        disturbing: asyncio.Future[object] | None = None
        async with AsyncClient(self._base_url, retries=_PATIENT) as client:
            async for event in client.responses.run_tools(tools=[calculator], **_ASKED):
                kind = self._take(dict(event), items)
                if kind == at and disturbing is None and disturb is not None:
                    disturbing = asyncio.ensure_future(disturb())
        if disturbing is not None:
            await disturbing
        assert (disturbing is None) == (at is None)

    async def check(self) -> None:
        """No gap, each call once, and the server tells it again as it was."""
        calls, made = [], []
        for events in self.rounds:
            heard = [event for event in events if event["type"] != _TOLD]
            assert [event["sequence_number"] for event in heard] == list(range(len(heard)))
            response = heard[-1]["response"]
            assert heard[-1]["type"] == "response.completed"
            _check_deltas(heard)
            assert await replay(self._base_url, response["id"]) == heard
            calls += calls_of(response)
            made += [event["call_id"] for event in events if event["type"] == _TOLD]
            added = [e["item"] for e in heard if e["type"] == "response.output_item.added"]
            assert [item["id"] for item in added] == [item["id"] for item in response["output"]]
        assert [call["call_id"] for call in calls] == made
        assert len(set(made)) == len(made) == 1
        assert self._counter.read_text() == "12 + 30\n"
        async with httpx.AsyncClient(base_url=self._base_url) as client:
            kept = await client.get(f"/v1/responses/{response['id']}/input_items")
        outputs = [i for i in kept.json()["data"] if i["type"] == "function_call_output"]
        assert [item["call_id"] for item in outputs] == made

    @property
    def outcome(self) -> list[Event]:
        """What must not depend on what happened meanwhile: all but ids, times and how the text was
        cut into deltas."""
        ends = [next(e for e in reversed(events) if "response" in e) for events in self.rounds]
        responses = [{key: end["response"][key] for key in _COMPARED} for end in ends]
        return json.loads(json.dumps(responses), object_hook=_without_ids)  # type: ignore[no-any-return]

    def _take(self, event: Event, items: dict[int, str]) -> Kind:
        if event["type"] == "response.created":
            items.clear()
            if self.rounds[-1]:
                self.rounds.append([])
        if event["type"] == "response.output_item.added":
            items[event["output_index"]] = event["item"]["type"]
        self.rounds[-1].append(event)
        kind = (event["type"], items.get(event.get("output_index", -1), ""))
        if kind not in self.kinds:
            self.kinds.append(kind)
        return kind


def _without_ids(value: Event) -> Event:
    return {key: each for key, each in value.items() if key not in _LEFT_OUT}


def _check_deltas(heard: Sequence[Event]) -> None:
    """They are what each item says at its end."""
    said: dict[tuple[int, str], str] = {}
    for event in heard:
        key = (event.get("output_index", -1), event["type"].rpartition(".")[0])
        if event["type"].endswith(".delta"):
            said[key] = said.get(key, "") + event["delta"]
        elif event["type"].endswith(("_text.done", "arguments.done")):
            assert said.pop(key) == event.get("text", event.get("arguments"))
    assert not said


@pytest.fixture(scope="module")
def undisturbed(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Loop:
    loop = Loop(stack, tmp_path_factory.mktemp("counters") / "undisturbed")
    asyncio.run(loop.run())
    asyncio.run(loop.check())
    return loop


async def _disturb_at_every_kind(
    stack: Stack,
    undisturbed: Loop,
    counters: Path,
    disturb: Disturb,
    *,
    but: tuple[str, ...] = (),
) -> None:
    kinds = [kind for kind in undisturbed.kinds if not kind[0].endswith(but)]
    assert len(kinds) == (12 if but else 20)
    for number, kind in enumerate(kinds):
        loop = Loop(stack, counters / str(number))
        await loop.run(kind, disturb)
        assert loop.outcome == undisturbed.outcome, kind
        await loop.check()


@pytest.mark.parametrize("name", ["penstock-engine", "penstock-gateway"])
async def test_a_process_is_killed(
    stack: Stack, undisturbed: Loop, tmp_path: Path, name: str
) -> None:
    await _disturb_at_every_kind(
        stack,
        undisturbed,
        tmp_path,
        partial(stack.kill, name),
        but=_WITH_THE_ONE_BEFORE,
    )


async def test_redis_is_killed(stack: Stack, undisturbed: Loop, tmp_path: Path) -> None:
    await _disturb_at_every_kind(stack, undisturbed, tmp_path, stack.kill_redis)
