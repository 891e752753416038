"""Streams of one server without Redis: kill -9 and SIGSTOP of its processes, of all of them, and
its stop. What was stored goes on in the successor, or in the next server of the same folder.

What each client has at the end is checked by `stream_checker`, and against a run that nobody
disturbed: greedy, fp32. An engine takes only as many steps as it is let (`paced_engine`): no stream
is over when something happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.tiers import tiered

from .kills import kill
from .paced_engine import Pace
from .processes import END_S, Served, serve, suspended, wait_gone
from .stream_checker import CheckedStream, replay

_NUM_STREAMS = 32  # half of them over SSE, half over WebSockets
_NUM_TOKENS = 150  # of the shortest
_STEPS = 20  # at a time; all together end no stream
_SILENCE_S = 2.5  # of a connection, then every other client leaves it
_FLAGS = ("--dtype", "float32", "--disconnect-grace-s", "600")  # who is slow has not left


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A folder, and the server that runs there."""

    folder: Path
    pace: Pace
    served: Served


@contextlib.contextmanager
def running(folder: Path, pace: Pace, log: str = "log") -> Iterator[Stack]:
    flags = (*_FLAGS, "--data-dir", f"{folder}/data")
    with serve(*flags, log=folder / log, command=pace.command) as served:
        yield Stack(folder=folder, pace=pace, served=served)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("disk")
    with running(folder, Pace(folder / "pace")) as stack:
        yield stack


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> list[dict[str, Any]]:
    """What comes of each stream when nothing happens."""

    async def run() -> list[dict[str, Any]]:
        streams = await asyncio.gather(*(each.read() for each in streams_of(stack.served)))
        return [stream.outcome for stream in streams]

    return asyncio.run(run())


def streams_of(served: Served, *, silence_s: float | None = None) -> list[CheckedStream]:
    return [
        CheckedStream(
            body={
                "model": "demo",
                "input": f"My name is Zorin{number}. Tell me a story about a fox.",
                "max_output_tokens": (length := _NUM_TOKENS + number),
                "min_tokens": length,
                "temperature": 0,
            },
            begins_at=served.base_url,
            resumes_at=served.base_url,
            transport=("sse", "websocket")[number % 2],
            leaves_after=40 if number % 5 == 0 else 0,
            silence_s=silence_s if number % 4 < 2 else None,
            give_up_s=3 * END_S,
        )
        for number in range(_NUM_STREAMS)
    ]


async def begun(stack: Stack, streams: list[CheckedStream]) -> list[asyncio.Task[CheckedStream]]:
    """All are amid their text."""
    stack.pace.allow(0)
    reading = [asyncio.create_task(stream.read()) for stream in streams]
    await until(lambda: all(stream.events for stream in streams))
    stack.pace.allow(_STEPS)
    await until(lambda: all(stream.text for stream in streams))
    return reading


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(END_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def progress(stack: Stack, streams: list[CheckedStream], num_steps: int = _STEPS) -> None:
    """Wait until they have more text; none is over then."""
    num_chars = sum(len(stream.text) for stream in streams)
    stack.pace.allow(num_steps)
    await until(lambda: sum(len(stream.text) for stream in streams) > num_chars)
    assert not any(stream.is_ended for stream in streams)


async def check(
    served: Served, streams: list[CheckedStream], undisturbed: list[dict[str, Any]]
) -> None:
    """Each is what it was to be, and is stored so."""
    for stream, expected in zip(streams, undisturbed, strict=True):
        assert stream.outcome == expected
        assert stream.response_id is not None
        assert await replay(served.base_url, stream.response_id) == stream.events
    async with httpx.AsyncClient(base_url=served.base_url, timeout=END_S) as client:
        for stream in streams:
            stored = (await client.get(f"/v1/responses/{stream.response_id}")).json()
            assert stored == stream.events[-1]["response"]
    print("\nlongest pauses", *(f"{stream.longest_pause_s:.2f}" for stream in streams))
    print("connections", *(stream.num_connections for stream in streams))


_ONE_EACH = (("gateway", "engine"), _STEPS)


@pytest.mark.parametrize(
    ("kills", "num_steps"),
    tiered(
        [_ONE_EACH, (("engine", "gateway") * 2, _STEPS), (8 * ("gateway",), 8)],
        first=[_ONE_EACH],
    ),
    ids=["gateway, engine", "each twice", "gateway again and again"],
)
async def test_processes_killed(
    stack: Stack, undisturbed: list[dict[str, Any]], kills: tuple[str, ...], num_steps: int
) -> None:
    streams = streams_of(stack.served)
    reading = await begun(stack, streams)
    for which in kills:
        stack.pace.allow(0)
        await kill(stack.served, which)
        await progress(stack, streams, num_steps)
    stack.pace.set_free()
    await asyncio.gather(*reading)
    await check(stack.served, streams, undisturbed)


# Engine and gateway give each other up after 5 s.
@pytest.mark.exhaustive
@pytest.mark.parametrize("freeze_s", [1.0, 3.2, 9.0])
@pytest.mark.parametrize("which", ["gateway", "engine"])
async def test_a_process_frozen(
    stack: Stack, undisturbed: list[dict[str, Any]], which: str, freeze_s: float
) -> None:
    streams = streams_of(stack.served, silence_s=_SILENCE_S)
    reading = await begun(stack, streams)
    with suspended(stack.served.child(f"penstock-{which}")):
        stack.pace.allow(_STEPS)
        await asyncio.sleep(freeze_s)
    await progress(stack, streams)
    stack.pace.set_free()
    await asyncio.gather(*reading)
    await check(stack.served, streams, undisturbed)
    stayed = [stream for stream in streams if stream.silence_s is None]
    assert [error for stream in stayed for error in stream.losses] == []


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.exhaustive
async def test_everything_is_gone_and_starts_again(
    tmp_path: Path, undisturbed: list[dict[str, Any]], how: str
) -> None:
    """Streams go on in the next server of the folder; what had ended is there."""
    pace = Pace(tmp_path / "pace")
    with ExitStack() as servers:
        first = servers.enter_context(running(tmp_path, pace))
        (ended,) = streams_of(first.served)[:1]
        await ended.read()
        streams = streams_of(first.served)
        reading = await begun(first, streams)
        pace.allow(0)
        if how == "killed":
            family = first.served.renew_family()
            first.served.process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(wait_gone, family)
        else:
            assert await asyncio.to_thread(first.served.stop) == 0
        assert not any(stream.is_ended for stream in streams)
        second = await asyncio.to_thread(
            servers.enter_context, running(tmp_path, pace, "second log")
        )
        for stream in streams:
            stream.resumes_at = second.served.base_url
        await progress(second, streams)
        pace.set_free()
        await asyncio.gather(*reading)
        await check(second.served, [ended, *streams], [undisturbed[0], *undisturbed])
