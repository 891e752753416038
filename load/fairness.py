"""`penstock bench fairness`: what one tenant's flood does to another's time to first token.

Starts a server with two tenants of equal weight. The small one keeps a few streams open, each
followed by the next, first alone, then beside a flood that keeps `--times` as many.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.engine.config import DEMO_MODEL
from penstock.load.arguments import add_out
from penstock.load.client.records import Call, StreamRecord
from penstock.load.client.sse import SseTransport
from penstock.load.launch import server
from penstock.load.tables import table, write_report

_BAR = 2.0
_KEYS = """\
[[keys]]
key = "small"
tenant = "small"
[[keys]]
key = "flood"
tenant = "flood"
[tenants.small]
[tenants.flood]
"""
_PROMPT_TOKENS, _OUTPUT_TOKENS = (32, 96), (16, 64)  # shortest and longest
_BACKOFF_S = 1.0  # of who is refused, as Retry-After has it
_STALL_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The small tenant's times to first token, in one run."""

    name: str
    num_streams: int
    num_faulty: int
    median_ms: float
    p99_ms: float
    flood_streams: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=None, help="a directory or a Hub id; default: the demo")
    parser.add_argument("--concurrency", type=int, default=2, help="streams of the small tenant")
    parser.add_argument("--times", type=int, default=100, help="as many has the flood")
    parser.add_argument(
        "--flood-limit", type=int, default=0, help="the flood's requests at once; 0: no limit"
    )
    parser.add_argument("--max-num-seqs", type=int, default=16, help="sequences running at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Both runs; print and write the table; 1 if the flood more than doubles the p99."""
    with tempfile.TemporaryDirectory(prefix="penstock-fairness-") as directory:
        keys = Path(directory) / "keys.toml"
        limit = f"max_concurrent_requests = {parsed.flood_limit}" if parsed.flood_limit else ""
        keys.write_text(f"{_KEYS}{limit}\n", encoding="utf-8")
        flags = ["--api-keys-file", str(keys), "--max-num-seqs", str(parsed.max_num_seqs)]
        with server(parsed.model, flags) as started:
            waits = asyncio.run(_measure(started.base_url, parsed))
    alone, flooded = waits
    ratio = flooded.p99_ms / alone.p99_ms
    verdict = f"Beside the flood the p99 is {ratio:.2f} times that alone (bar: {_BAR:g})."
    report = f"{_table(waits)}\n\n{verdict}"
    print(report)
    paths = write_report(
        parsed.out,
        "fairness",
        markdown=f"# A tenant beside another's flood\n\n{report}",
        data={"runs": [asdict(wait) for wait in waits], "ratio": ratio},
    )
    print("\nwrote", ", ".join(map(str, paths)))
    return int(ratio > _BAR or any(wait.num_faulty for wait in waits))


async def _measure(base_url: str, parsed: argparse.Namespace) -> list[Wait]:
    async with (
        SseTransport(base_url, "completions", api_key="small", stall_s=_STALL_S) as small,
        SseTransport(base_url, "completions", api_key="flood", stall_s=_STALL_S) as flood,
    ):
        rng = random.Random(parsed.seed)
        await _hold(small, parsed.concurrency, rng, seconds=2.0)  # the first requests are slow
        alone = await _hold(small, parsed.concurrency, rng, seconds=parsed.seconds)
        num_flood = parsed.concurrency * parsed.times
        flooding = asyncio.create_task(_hold(flood, num_flood, rng, seconds=2 * parsed.seconds))
        await asyncio.sleep(parsed.seconds / 4)  # until its queue is long
        flooded = await _hold(small, parsed.concurrency, rng, seconds=parsed.seconds)
        flooding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await flooding
    return [_wait("alone", alone), _wait("beside the flood", flooded, num_flood)]


async def _hold(
    transport: SseTransport, num_streams: int, rng: random.Random, *, seconds: float
) -> list[StreamRecord]:
    """Keep so many streams open for a while; all that were."""
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


def _wait(name: str, records: Sequence[StreamRecord], flood_streams: int = 0) -> Wait:
    times_ms = [
        1e3 * (record.event_times_s[0] - record.scheduled_s)
        for record in records
        if record.is_clean and record.event_times_s
    ]
    return Wait(
        name=name,
        num_streams=len(records),
        num_faulty=sum(not record.is_clean for record in records),
        median_ms=statistics.median(times_ms),
        p99_ms=statistics.quantiles(times_ms, n=100, method="inclusive")[98],
        flood_streams=flood_streams,
    )


def _table(waits: Sequence[Wait]) -> str:
    header = ("small tenant", "streams", "faulty", "flood at once", "TTFT p50 ms", "TTFT p99 ms")
    rows = [
        [
            wait.name,
            f"{wait.num_streams:,}",
            f"{wait.num_faulty}",
            f"{wait.flood_streams}",
            f"{wait.median_ms:,.1f}",
            f"{wait.p99_ms:,.1f}",
        ]
        for wait in waits
    ]
    return table(header, rows)
