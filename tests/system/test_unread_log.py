"""A log that nobody reads holds up nobody, and says afterwards what is missing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection

import httpx
import pytest

from .processes import (
    END_S,
    ENDLESS_TOKENS,
    PENSTOCK,
    children,
    metric,
    wait_gone,
)

pytestmark = [pytest.mark.process_kills, pytest.mark.exhaustive]

_NUM_REQUESTS = 2000
_LONG_ID = {"x-request-id": "x" * 128}  # twice in a line of JSON: 2,000 are more than the queue
_STORY = {
    "model": "demo",
    "prompt": "Once",
    "max_tokens": ENDLESS_TOKENS,
    "ignore_eos": True,
    "stream": True,
}


@contextmanager
def serve(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with stdout and stderr on one pipe, read up to the line that it is ready; and its
    address."""
    process = subprocess.Popen(
        [PENSTOCK, "serve", "--port", "0", "--log-format", "json", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        env={"PENSTOCK_SHUTDOWN_GRACE_S": "2", **os.environ},
    )
    try:
        assert process.stdout is not None
        match = None
        while match is None:
            line = process.stdout.readline()
            assert line, "it ended before it was ready"
            match = re.search(r"ready at (https?://\S+)", line)
        yield process, match[1]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


async def fill(url: str) -> None:
    """Ordinary requests, each of which leaves a line."""
    await asyncio.to_thread(_request, url)


def _request(url: str) -> None:
    with contextlib.closing(HTTPConnection(url.removeprefix("http://"), timeout=END_S)) as client:
        for _ in range(_NUM_REQUESTS):
            client.request("GET", "/v1/models", headers=_LONG_ID)
            answer = client.getresponse()
            assert answer.status == 200
            answer.read()


async def test_nobody_waits_for_the_logs_reader_who_is_told_what_is_missing(
    long_model: tuple[str, ...],
) -> None:
    with serve(*long_model) as (process, url):
        async with httpx.AsyncClient(base_url=url, timeout=END_S) as client:
            await fill(url)
            num_dropped = await metric(client, "log_lines_dropped_total")
            assert num_dropped > 0
            *before, notice = await read_until(process, "dropped")
            assert notice["message"] == f"{num_dropped:.0f} log lines were dropped"
            assert len(before) == _NUM_REQUESTS - num_dropped
            assert (await client.get("/v1/models", headers=_LONG_ID)).status_code == 200
            [last] = await read_until(process, "/v1/models")
            assert last["logger"] == "penstock.access"

            # From here on nobody reads.
            events: list[str] = []
            story = asyncio.create_task(read_story(client, events))
            await fill(url)
            assert (await client.get("/health")).status_code == 200
            await grown(events)
            # The supervisor tells of this, and the next engine starts under the same full pipe.
            [engine] = children(process, "penstock-engine")
            engine.kill()
            await asyncio.to_thread(wait_gone, [engine])
            await grown(events)
            assert (await client.get("/ready")).status_code == 200
            [after] = children(process, "penstock-engine")
            assert after.pid != engine.pid
            process.send_signal(signal.SIGTERM)
            await story
        assert "the server is shutting down" in events[-2]
        assert events[-1] == "data: [DONE]"
        assert await asyncio.to_thread(process.wait, END_S) == 0
        wait_gone([after])


async def read_until(process: subprocess.Popen[str], text: str) -> list[dict[str, str]]:
    """The log's next lines up to one whose message has this text."""

    def read() -> list[dict[str, str]]:
        assert process.stdout is not None
        lines: list[dict[str, str]] = []
        while not lines or text not in lines[-1]["message"]:
            lines.append(json.loads(process.stdout.readline()))
        return lines

    async with asyncio.timeout(END_S):
        return await asyncio.to_thread(read)


async def read_story(client: httpx.AsyncClient, events: list[str]) -> None:
    async with client.stream("POST", "/v1/completions", json=_STORY) as response:
        async for line in response.aiter_lines():
            if line:
                events.append(line)  # noqa: PERF401  (they are looked at meanwhile)


async def grown(events: list[str]) -> None:
    """Wait for more than can have been under way."""
    num = len(events)
    async with asyncio.timeout(END_S):
        while len(events) < num + 500:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
