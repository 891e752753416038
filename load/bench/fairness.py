"""`penstock bench fairness`: how one tenant's flood affects another's time to first token.

It starts a server with two tenants of equal weight. The small tenant keeps a few streams open,
first alone, then beside a flood of `--times` as many. The flood's client is a separate process at
nice 19: real floods come from other machines, so the server should not pay for this client's CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.config import DEMO_MODEL
from penstock.load.client.records import Call, StreamRecord
from penstock.load.client.sse import SseTransport
from penstock.load.launch import server
from penstock.load.report.options import add_out, positive
from penstock.load.report.summary import ttft_ms
from penstock.load.report.tables import publish, table_of
from penstock.load.workloads.measure import ServerPages

_BAR = 2.0
_KEYS = """\
[[keys]]
key = "small"
tenant = "small"
admin = true
[[keys]]
key = "flood"
tenant = "flood"
[tenants.small]
[tenants.flood]
"""
_PROMPT_TOKENS, _OUTPUT_TOKENS = (32, 96), (16, 64)  # shortest and longest
_BACKOFF_S = 1.0  # after a refusal, as in Retry-After
_STALL_S = 300.0
_FLOOD_NICE = 19
_TOKENS = "penstock:tenant_generation_tokens_total"
_FLOOD_START_S = 60.0  # of its process, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The small tenant's times to first token in one run."""

    name: str
    num_streams: int
    num_faulty: int
    median_ms: float
    p99_ms: float
    flood_streams: int = 0  # the flood's at once
    flood_tokens_per_s: float = 0.0  # its throughput nevertheless


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=None, help="a directory or a Hub id; default: the demo")
    add("--concurrency", type=positive, default=2, help="streams of the small tenant")
    add("--times", type=positive, default=100, help="the flood has this many times as many streams")
    add("--flood-limit", type=int, default=0, help="the flood's requests at once; 0: no limit")
    add("--max-num-seqs", type=positive, default=16, help="sequences running at once")
    add("--seconds", type=float, default=20.0, help="duration of each run")
    add("--seed", type=int, default=0, help="seed of the requests")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run both; print and write the table; return 1 if the flood more than doubles the p99."""
    with tempfile.TemporaryDirectory(prefix="penstock-fairness-") as directory:
        keys = Path(directory) / "keys.toml"
        limit = f"max_concurrent_requests = {parsed.flood_limit}" if parsed.flood_limit else ""
        keys.write_text(f"{_KEYS}{limit}\n", encoding="utf-8")
        flags = ["--api-keys-file", str(keys), "--max-num-seqs", str(parsed.max_num_seqs)]
        with server(parsed.model, flags) as started:
            waits = asyncio.run(_measure(started.base_url, parsed))
    alone, flooded = waits
    ratio = flooded.p99_ms / alone.p99_ms
    verdict = (
        f"Beside the flood the p99 is {ratio:.2f} times that alone (bar: {_BAR:g}). "
        f"The flood's client runs at nice {_FLOOD_NICE}."
    )
    report = f"{_table(waits)}\n\n{verdict}"
    data = {"runs": [asdict(wait) for wait in waits], "ratio": ratio}
    publish(parsed.out, "fairness", "A tenant beside another's flood", report, data)
    return int(ratio > _BAR or any(wait.num_faulty for wait in waits))


async def _measure(base_url: str, parsed: argparse.Namespace) -> list[Wait]:
    num_flood = parsed.concurrency * parsed.times
    async with _transport(base_url, "small") as small:
        rng = random.Random(parsed.seed)
        await _hold(small, parsed.concurrency, rng, seconds=2.0)  # the first requests are slow
        alone = await _hold(small, parsed.concurrency, rng, seconds=parsed.seconds)
        with _flood(base_url, num_flood, seed=parsed.seed + 1):
            await _await_flood(base_url)
            await asyncio.sleep(parsed.seconds / 4)  # until its queue is long
            before = await asyncio.to_thread(_num_flood_tokens, base_url)
            began_s = time.perf_counter()
            flooded = await _hold(small, parsed.concurrency, rng, seconds=parsed.seconds)
            took_s = time.perf_counter() - began_s
            num_tokens = await asyncio.to_thread(_num_flood_tokens, base_url) - before
    return [
        _wait("alone", alone),
        _wait(
            "beside the flood",
            flooded,
            flood_streams=num_flood,
            flood_tokens_per_s=num_tokens / took_s,
        ),
    ]


async def _await_flood(base_url: str) -> None:
    """Wait for the flood's first tokens: a process at nice 19 may start late."""
    async with asyncio.timeout(_FLOOD_START_S):
        while not await asyncio.to_thread(_num_flood_tokens, base_url):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def _num_flood_tokens(base_url: str) -> float:
    """The flood's output tokens so far, as the server counts them."""
    families = text_string_to_metric_families(ServerPages(base_url, "small").metrics() or "")
    samples = (sample for family in families for sample in family.samples)
    return sum(
        sample.value
        for sample in samples
        if sample.name == _TOKENS and sample.labels["tenant"] == "flood"
    )


def _transport(base_url: str, tenant: str) -> SseTransport:
    return SseTransport(base_url, "completions", api_key=tenant, stall_s=_STALL_S)


@contextmanager
def _flood(base_url: str, num_streams: int, *, seed: int) -> Iterator[None]:
    """Keep `num_streams` streams of the flood open, from another process, during the block."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_run_flood, args=(base_url, num_streams, seed), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _run_flood(base_url: str, num_streams: int, seed: int) -> None:
    os.nice(_FLOOD_NICE)

    async def hold() -> None:
        async with _transport(base_url, "flood") as flood:
            await _hold(flood, num_streams, random.Random(seed), seconds=math.inf)

    asyncio.run(hold())


async def _hold(
    transport: SseTransport, num_streams: int, rng: random.Random, *, seconds: float
) -> list[StreamRecord]:
    """Keep `num_streams` streams open for a while; return all their records."""
    records: list[StreamRecord] = []
    until_s = time.perf_counter() + seconds

    async def one_after_the_other() -> None:
        while time.perf_counter() < until_s:
            record = StreamRecord(scheduled_s=time.perf_counter())
            await transport.stream(_call(rng), record)
            records.append(record)
            if not record.is_clean:
                await asyncio.sleep(_BACKOFF_S)

    await asyncio.gather(*(one_after_the_other() for _ in range(num_streams)))
    return records


def _call(rng: random.Random) -> Call:
    num_prompt, num_output = rng.randint(*_PROMPT_TOKENS), rng.randint(*_OUTPUT_TOKENS)
    return Call(
        model=DEMO_MODEL,
        max_tokens=num_output,
        ignore_eos=True,
        prompt_token_ids=tuple(rng.randrange(300) for _ in range(num_prompt)),
        extra={"model": None},  # the server's only one
    )


def _wait(name: str, records: Sequence[StreamRecord], **flood: Any) -> Wait:
    timed = [record for record in records if record.is_clean and record.event_times_s]
    times_ms = list(map(ttft_ms, timed))
    return Wait(
        name=name,
        num_streams=len(records),
        num_faulty=sum(not record.is_clean for record in records),
        median_ms=statistics.median(times_ms),
        p99_ms=float(np.percentile(times_ms, 99)),
        **flood,
    )


def _table(waits: Sequence[Wait]) -> str:
    columns: dict[str, Callable[[Wait], str]] = {
        "small tenant": lambda wait: wait.name,
        "streams": lambda wait: f"{wait.num_streams:,}",
        "faulty": lambda wait: f"{wait.num_faulty}",
        "TTFT p50 ms": lambda wait: f"{wait.median_ms:,.1f}",
        "TTFT p99 ms": lambda wait: f"{wait.p99_ms:,.1f}",
        "flood at once": lambda wait: f"{wait.flood_streams}",
        "its tokens/s": lambda wait: f"{wait.flood_tokens_per_s:,.0f}",
    }
    return table_of(waits, columns)
