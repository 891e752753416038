"""What `make bench` prints: a server's start-up time, memory and tokens per second.

Starts a server of its own on a free port, talks to it over HTTP as any client would, and stops
it. Greedy, `ignore_eos`, so that every stream has the same length.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

_PROMPT = "Tell me a long story about a lighthouse."
_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Started:
    base_url: str
    ready_s: float
    process: psutil.Process


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of `concurrency` equal streams."""

    concurrency: int
    tokens_per_s: float
    ttft_ms: float


@contextmanager
def server(model: str | None, flags: list[str]) -> Iterator[Started]:
    """A server of this checkout on a free port, stopped at the end."""
    penstock = Path(sys.executable).with_name("penstock")
    command = [str(penstock), "serve", *([model] if model else []), "--port", "0", *flags]
    started_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"http://\S+", line)
        if match is None:
            raise SystemExit("the server did not start")
        ready_s = time.monotonic() - started_s
        yield Started(match.group(), ready_s, psutil.Process(process.pid))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


async def stream(client: httpx.AsyncClient, model: str) -> tuple[int, float]:
    """One stream; its number of tokens and the seconds to its first one."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": _PROMPT}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": _TOKENS,
        "ignore_eos": True,
    }
    sent_s, first_s, num_tokens = time.perf_counter(), 0.0, 0
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if not first_s and chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                first_s = time.perf_counter() - sent_s
            if chunk.get("usage"):
                num_tokens = chunk["usage"]["completion_tokens"]
    return num_tokens, first_s


async def measure(base_url: str, model: str, concurrency: int) -> Measured:
    """Start `concurrency` streams together and wait for all."""
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=600) as client:
        await stream(client, model)  # warm
        began_s = time.perf_counter()
        results = await asyncio.gather(*(stream(client, model) for _ in range(concurrency)))
        took_s = time.perf_counter() - began_s
    return Measured(
        concurrency=concurrency,
        tokens_per_s=sum(tokens for tokens, _ in results) / took_s,
        ttft_ms=1000 * statistics.median(first for _, first in results),
    )


def _resident(process: psutil.Process) -> dict[str, float]:
    """MiB of each process of the server."""
    return {
        item.name(): item.memory_info().rss / (1 << 20)
        for item in [process, *process.children(recursive=True)]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("flags", nargs="*", help="flags for the server, after --")
    arguments = parser.parse_args()
    with server(arguments.model, arguments.flags) as started:
        name = httpx.get(f"{started.base_url}/v1/models").json()["data"][0]["id"]
        print(f"{os.cpu_count()} cores · model {name} · ready after {started.ready_s:.1f} s")
        for process, mebibytes in _resident(started.process).items():
            print(f"  {process:<18} {mebibytes:6.0f} MiB resident")
        print("  streams   tokens/s   TTFT ms (median)")
        for concurrency in arguments.concurrency:
            run = asyncio.run(measure(started.base_url, name, concurrency))
            print(f"  {run.concurrency:>7} {run.tokens_per_s:>10,.0f} {run.ttft_ms:>10.0f}")


if __name__ == "__main__":
    main()
