"""SIGSTOP of every process of a server with two workers, under streams that never cease.

Clients read one stream after the other, over SSE and over WebSockets, while processes are frozen
in turn. Some leave a connection that falls silent and resume on another, which only the worker that
lives accepts; the others stay and read on where they are when their worker wakes up. So do streams
that cannot be resumed. Each stream is checked by `stream_checker` while it is read, and at its end
against what nobody disturbed: greedy, fp32.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import pytest

from tests.redis_server import RedisServer

from .processes import END_S, Served, serve, suspended
from .stream_checker import CheckedStream, replay

pytestmark = [pytest.mark.redis, pytest.mark.process_kills]

# A lease runs out after 3 s: a worker that is frozen for 3.2 s may be taken for dead just when it
# wakes up. Engine and gateways give each other up after 5 s, and Redis is waited for 2 s here.
_FREEZE_S = 3.2
_FREEZES_S = [_FREEZE_S, 6.5]
_NUM_STREAMS = 16  # per transport
_NUM_PLAIN = 1  # of each kind that cannot be resumed
_NUM_HIT = 6  # streams at least that a worker runs when it is frozen
_NUM_CASES = 4
_NUM_TOKENS = 200
_SILENCE_S = 2.5  # of a connection, then every other client leaves it
_CALM_S = 120.0  # a stream that is still read then is lost


@dataclass
class Load:
    """Clients that read until they are told to stop.

    Attributes:
        ended: responses that came to their end.
        num_plain: other streams that did.
        leaves: whether every other client leaves a connection that falls silent.
    """

    served: Served
    expected: dict[str, Any] = field(default_factory=dict)
    leaves: bool = True
    ended: list[CheckedStream] = field(default_factory=list)
    num_plain: int = 0
    _is_over: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def learn(self) -> None:
        """What comes of each case when nothing happens."""
        cases = range(_NUM_CASES)
        streams = await asyncio.gather(*(self._stream(case, "sse").read() for case in cases))
        self.expected = {f"response {case}": streams[case].outcome for case in cases}
        plain = list(itertools.product(_PLAIN, cases))
        texts = await asyncio.gather(*(self._plain_text(kind, case) for kind, case in plain))
        for (kind, case), text in zip(plain, texts, strict=True):
            assert text
            self.expected[f"{kind} {case}"] = text

    def start(self) -> None:
        for number in range(_NUM_STREAMS):
            for transport in ("sse", "websocket"):
                self._tasks.append(asyncio.create_task(self._read(number, transport)))
        for kind, number in itertools.product(_PLAIN, range(_NUM_PLAIN)):
            self._tasks.append(asyncio.create_task(self._read_plain(kind, number)))

    async def stop(self) -> None:
        """Raises: AssertionError: a stream was lost, or is not what it was to be."""
        self._is_over = True
        async with asyncio.timeout(_CALM_S):
            await asyncio.gather(*self._tasks)

    def check(self) -> None:
        """Raises: as `stop`, so far."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, number: int, transport: str) -> None:
        silence_s = _SILENCE_S if self.leaves and number % 2 else None
        for case in itertools.count(number):
            if self._is_over:
                return
            stream = await self._stream(case % _NUM_CASES, transport, silence_s).read()
            assert stream.outcome == self.expected[f"response {case % _NUM_CASES}"]
            self.ended.append(stream)

    def _stream(self, case: int, transport: str, silence_s: float | None = None) -> CheckedStream:
        return CheckedStream(
            body={**_SETTINGS, "input": _prompt(case), "max_output_tokens": _NUM_TOKENS},
            begins_at=self.served.base_url,
            resumes_at=self.served.base_url,
            transport=transport,
            silence_s=silence_s,
        )

    async def _read_plain(self, kind: str, number: int) -> None:
        for case in itertools.count(number):
            if self._is_over:
                return
            text = await self._plain_text(kind, case % _NUM_CASES)
            if text is not None:
                assert text == self.expected[f"{kind} {case % _NUM_CASES}"]
                self.num_plain += 1

    async def _plain_text(self, kind: str, case: int) -> str | None:
        """Of one stream on one connection, to its proper end; None where it was refused."""
        path, body, end = _PLAIN[kind]
        prompt = {
            "chat": {"messages": [{"role": "user", "content": _prompt(case)}]},
            "completion": {"prompt": _prompt(case)},
            "unstored": {"input": _prompt(case), "store": False},
        }[kind]
        request = {**_SETTINGS, **body, **prompt, "stream": True}
        async with (
            httpx.AsyncClient(base_url=self.served.base_url, timeout=_CALM_S) as client,
            client.stream("POST", path, json=request) as response,
        ):
            if response.status_code != 200:
                assert response.status_code == 503, await response.aread()
                assert "retry-after" in response.headers
                await asyncio.sleep(0.2)
                return None
            found = [line async for line in response.aiter_lines()]
        lines = [line.removeprefix("data: ") for line in found if line.startswith("data: ")]
        assert end in lines[-1], f"{kind} ends with {lines[-3:]}"
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        if kind == "unstored":
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return "".join(map(_text_of, events))


_SETTINGS = {"model": "demo", "ignore_eos": True, "temperature": 0}
_PLAIN: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": ("/v1/chat/completions", {"max_tokens": _NUM_TOKENS}, "[DONE]"),
    "completion": ("/v1/completions", {"max_tokens": _NUM_TOKENS}, "[DONE]"),
    "unstored": ("/v1/responses", {"max_output_tokens": _NUM_TOKENS}, '"response.incomplete"'),
}


def _prompt(case: int) -> str:
    return f"My name is Zorin{case}. Tell me a story about a fox."


def _text_of(event: dict[str, Any]) -> str:
    assert "error" not in event, event
    if "choices" in event:
        choices = event["choices"]
        text = choices[0].get("text", choices[0].get("delta", {}).get("content")) if choices else ""
        return text or ""
    return event["delta"] if event["type"] == "response.output_text.delta" else ""


@dataclass(frozen=True)
class Stack:
    served: Served
    redis: RedisServer

    @property
    def processes(self) -> dict[str, psutil.Process]:
        """One of each kind."""
        return {
            "worker": self.served.child("penstock-gateway"),
            "engine": self.served.child("penstock-engine"),
            "supervisor": psutil.Process(self.served.process.pid),
        }

    async def num_running(self, worker: int) -> int:
        """Responses that a worker computes."""
        async with httpx.AsyncClient(base_url=self.served.base_url, timeout=END_S) as client:
            text = (await client.get("/metrics")).text
        pattern = rf'^penstock:response_logs_live{{[^}}]*worker="{worker}"[^}}]*}} ([0-9.]+)$'
        found = re.search(pattern, text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    async def has_much_to_do(self, worker: int) -> None:
        """Wait until it runs many responses: a freeze hits them."""
        async with asyncio.timeout(END_S):
            while await self.num_running(worker) < _NUM_HIT:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    @property
    def num_gone(self) -> int:
        """How often a worker has taken over from another, which it took for dead."""
        return self.served.log.read_text().count("is gone; it ran")

    @property
    def num_taken_over(self) -> int:
        """Responses that a worker has lost to another, as it knows itself."""
        return self.served.log.read_text().count("has taken over resp_")

    async def has_gone(self, num: int) -> None:
        async with asyncio.timeout(END_S):
            while self.num_gone < num:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = tmp_path_factory.mktemp("freezes")
    # A log that Redis is slow to take is given up; disk and machine are not to be the reason.
    with RedisServer(path / "redis", options={"appendfsync": "no"}) as redis:
        flags = ("--dtype", "float32", "--api-workers", "2", "--redis-url", redis.url)
        flags += ("--redis-patience-ms", "2000", "--stream-interval-ms", "50")
        flags += ("--disconnect-grace-s", "600")  # who is slow to return has not left
        with serve(*flags, log=path / "log") as served:
            yield Stack(served, redis)


@pytest.fixture(scope="module")
def expected(stack: Stack) -> dict[str, Any]:
    load = Load(stack.served)
    asyncio.run(load.learn())
    return load.expected


@pytest.fixture
async def load(
    stack: Stack, expected: dict[str, Any], request: pytest.FixtureRequest
) -> AsyncIterator[Load]:
    load = Load(stack.served, expected, **getattr(request, "param", {}))
    load.start()
    try:
        yield load
    finally:
        await load.close()


@pytest.mark.parametrize("freeze_s", _FREEZES_S)
@pytest.mark.exhaustive
async def test_processes_frozen_in_turn(stack: Stack, load: Load, freeze_s: float) -> None:
    """A worker, the engine, the supervisor."""
    num_gone, num_before = stack.num_gone, stack.num_taken_over
    for name, process in stack.processes.items():
        for worker in range(2):
            await stack.has_much_to_do(worker)
        with suspended(process):
            await asyncio.sleep(freeze_s)
            if name == "worker" and freeze_s > _FREEZE_S:  # no longer by chance
                await stack.has_gone(num_gone + 1)
        load.check()
        print(f"\n{name} frozen for {freeze_s} s")
    await load.stop()
    resumed = [stream for stream in load.ended if stream.num_connections > 1]
    stayed = [stream for stream in load.ended if stream.silence_s is None]
    print(f"{stack.num_taken_over - num_before} taken over")
    print(f"{len(load.ended)} responses, {len(resumed)} resumed, {load.num_plain} other streams")
    print(f"the longest pause of who stayed: {max(each.longest_pause_s for each in stayed):.1f} s")
    assert {stream.transport for stream in resumed} == {"sse", "websocket"}
    assert [error for stream in stayed for error in stream.losses] == []
    for stream in resumed[:: len(resumed) // 20 + 1]:  # as it was read, so it is stored
        assert stream.response_id is not None
        assert await replay(stack.served.base_url, stream.response_id) == stream.events


# What Redis did not confirm cannot be resumed: who stays loses nothing.
@pytest.mark.exhaustive
@pytest.mark.parametrize("freeze_s", _FREEZES_S)
@pytest.mark.parametrize("load", [{"leaves": False}], indirect=True, ids=["staying"])
async def test_redis_frozen(stack: Stack, load: Load, freeze_s: float) -> None:
    for worker in range(2):
        await stack.has_much_to_do(worker)
    with stack.redis.paused():
        await asyncio.sleep(freeze_s)
    load.check()
    await load.stop()
    assert load.ended
