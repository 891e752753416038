"""Two engines on one machine: one is killed, or told to end, under many streams, and each stream is
what it would have been, to the token."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .processes import Served, serve, wait_until

_NUM_STREAMS = 50
_NUM_TOKENS = 60
_BLOCK_SIZE = 16
_LIMIT_S = 60.0


@pytest.fixture(scope="module")
def pool(long_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("pool") / "log"
    options = (
        "--replicas", "2", "--dtype", "float32", "--log-level", "info", "--kv-transfer", "always",
    )  # fmt: skip
    with serve(*long_model, *options, log=log) as served:
        yield served


@dataclass
class Stream:
    number: int
    more: str = ""  # of its prompt
    text: str = ""
    tokens: list[str] = field(default_factory=list)
    ending: list[str] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list, compare=False)  # of its chunks

    def wait_s(self, since_s: float) -> float:
        """The longest time without a chunk from then on."""
        times = [since_s, *(each for each in self.times_s if each > since_s)]
        return max((later - sooner for sooner, later in pairwise(times)), default=0.0)


def _body(stream: Stream) -> dict[str, Any]:
    number = stream.number
    return {
        "model": "demo",
        "stream": True,
        "messages": [
            {"role": "user", "content": f"Tell me story {number} about a fox.{stream.more}"}
        ],
        "max_tokens": _NUM_TOKENS,
        "min_tokens": _NUM_TOKENS,
        "temperature": 0.9,
        "seed": number,
        "logprobs": True,
    }


async def _chunks(client: httpx.AsyncClient, stream: Stream) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", "/v1/chat/completions", json=_body(stream)) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


async def _read(client: httpx.AsyncClient, stream: Stream) -> None:
    async for chunk in _chunks(client, stream):
        assert "error" not in chunk, chunk
        stream.times_s.append(time.monotonic())
        for choice in chunk["choices"]:
            stream.text += choice["delta"].get("content") or ""
            entries = (choice.get("logprobs") or {}).get("content") or []
            stream.tokens += [entry["token"] for entry in entries]
            stream.ending += [choice["finish_reason"]] if choice["finish_reason"] else []


async def read_all(
    client: httpx.AsyncClient, *, more: str = "", num: int = _NUM_STREAMS
) -> tuple[list[Stream], asyncio.Task[Any]]:
    streams = [Stream(number, more) for number in range(num)]
    task = asyncio.create_task(_gathered(client, streams))
    return streams, task


async def _gathered(client: httpx.AsyncClient, streams: list[Stream]) -> None:
    await asyncio.gather(*(_read(client, stream) for stream in streams))


def _engines(served: Served) -> list[psutil.Process]:
    return [each for each in served.renew_family() if each.name() == "penstock-engine"]


def _states(served: Served) -> list[str]:
    return [each["state"] for each in httpx.get(f"{served.base_url}/health").json()["engines"]]


def _counted(served: Served, name: str, **labels: str) -> float:
    """Of all engines, since their start."""
    families = text_string_to_metric_families(httpx.get(f"{served.base_url}/metrics").text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"penstock:{name}_total" and labels.items() <= sample.labels.items()
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "drained"])
async def test_streams_go_on_at_once_in_the_other_engine(
    pool: Served, number: signal.Signals
) -> None:
    is_draining = number == signal.SIGTERM
    more = " And about a hen." * 60 if is_draining else ""
    limits = httpx.Limits(max_connections=_NUM_STREAMS)
    async with httpx.AsyncClient(base_url=pool.base_url, timeout=_LIMIT_S, limits=limits) as client:
        expected, reading = await read_all(client, more=more)
        await reading
        wait_until(lambda: _states(pool) == ["ready", "ready"])
        streams, reading = await read_all(client, more=more)
        while any(not stream.tokens for stream in streams):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        victim = min(_engines(pool), key=lambda each: each.create_time())
        before = {each["name"]: each for each in (await client.get("/health")).json()["engines"]}
        assert all(each["num_streams"] for each in before.values()), before
        victim.send_signal(number)
        await asyncio.to_thread(victim.wait, 30)
        await reading
    assert all(len(stream.tokens) == _NUM_TOKENS for stream in streams)
    assert streams == expected
    log = pool.log.read_text()
    said = "continue in another one" if number == signal.SIGKILL else "open streams leave it"
    assert said in log
    wait_until(lambda: _states(pool) == ["ready", "ready"])
    if is_draining:  # their KV went along, and was found
        assert not _counted(pool, "kv_blocks_transferred", direction="refused")
        num_blocks = _counted(pool, "kv_blocks_transferred", direction="received")
        num_left = before[next(iter(before))]["num_streams"]
        assert num_blocks >= 10 * num_left > 0
        assert _counted(pool, "prefix_cache_host_hits") >= num_blocks * _BLOCK_SIZE / 2
