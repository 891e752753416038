"""`make bench`: a server's start-up time and memory, and its speed with few and with many streams.

It starts a server and sends the same requests as `penstock bench serve`, so that the figures are
comparable. It takes minutes; `penstock bench` measures more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop

from penstock.engine.config import DEMO_MODEL
from penstock.engine.errors import ConfigError
from penstock.load.client.records import Endpoint
from penstock.load.client.transport import TransportKind, open_transport
from penstock.load.launch import Started, server
from penstock.load.report.options import counts, positive
from penstock.load.report.summary import Summary, summarize
from penstock.load.report.tables import table
from penstock.load.workloads.datasets import Lengths, RandomLengths, Words
from penstock.load.workloads.driver import ClosedLoop
from penstock.load.workloads.driver import run as drive

_PROMPT_TOKENS = 64  # words: a few more tokens of a small vocabulary
_OUTPUT_TOKENS = 128
_MIN_REQUESTS, _WAVES = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A number of concurrent streams, and how they are sent."""

    num_streams: int
    transport: TransportKind = "sse"
    endpoint: Endpoint = "chat"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a stream had a fault, 2 if the server did not start."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    add(
        "--streams",
        type=counts,
        default="1,8,32",
        help="numbers of concurrent streams, comma-separated",
    )
    add("--output-tokens", type=positive, default=_OUTPUT_TOKENS, help="tokens per answer")
    add("flags", nargs="*", help="flags for the server, after --")
    parsed = parser.parse_args(arguments)
    try:
        with server(parsed.model, parsed.flags) as started:
            return _measure_all(started, parsed)
    except ConfigError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return 2


def _measure_all(started: Started, parsed: argparse.Namespace) -> int:
    print(f"{os.cpu_count()} cores · model {parsed.model} · ready after {started.ready_s:.1f} s\n")
    print(_memory_table(started), end="\n\n", flush=True)
    rows, num_failed = [], 0
    for seed, case in enumerate(_cases(parsed.streams)):
        measure = _measure(case, started, parsed, seed=seed)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            summary = runner.run(measure)
        rows.append(_row(case, summary))
        num_failed += summary.num_failed
        for fault, detail in summary.fault_details.items():
            print(f"{fault}: {detail}", file=sys.stderr)
    print(table(_HEADER, rows))
    return int(num_failed > 0)


def _cases(streams: Sequence[int]) -> list[Case]:
    """Every number of streams over chat completions; the largest also as our own web page sends
    them."""
    most = max(streams)
    return [
        *(Case(num_streams=num_streams) for num_streams in streams),
        Case(num_streams=most, endpoint="responses"),
        Case(num_streams=most, endpoint="responses", transport="websocket"),
    ]


async def _measure(
    case: Case, started: Started, parsed: argparse.Namespace, *, seed: int
) -> Summary:
    """Keep the case's number of streams in flight, after a warm-up request."""
    num_requests = max(_MIN_REQUESTS, _WAVES * case.num_streams)
    dialogues = RandomLengths(
        num_dialogues=num_requests + 1,
        input_len=Lengths.fixed(_PROMPT_TOKENS),
        output_len=Lengths.fixed(parsed.output_tokens),
        seed=seed,
    ).make(Words())
    async with open_transport(case.transport, case.endpoint, started.base_url) as transport:
        for part in (dialogues[:1], dialogues[1:]):
            result = await drive(
                transport,
                part,
                arrivals=ClosedLoop(case.num_streams),
                model=parsed.model,
                extra={"temperature": 0},
            )
    return summarize(result)


# -- what is said of it -----------------------------------------------------------------------

_HEADER = ("streams", "over", "tokens/s", "TTFT ms p50", "p99", "ITL ms p50", "p99", "faults")
_NAMES = {"sse": "SSE", "websocket": "WebSocket"}


def _row(case: Case, summary: Summary) -> list[str]:
    latencies = (summary.ttft_ms.p50, summary.ttft_ms.p99, summary.itl_ms.p50, summary.itl_ms.p99)
    return [
        f"{case.num_streams:,}",
        f"{case.endpoint}, {_NAMES[case.transport]}",
        f"{summary.output_tokens_per_s:,.0f}",
        *(f"{latency:,.1f}" for latency in latencies),
        f"{summary.num_failed:,}",
    ]


def _memory_table(started: Started) -> str:
    rows = [
        [name, *(f"{size / (1 << 20):,.0f}" for size in (memory.resident_bytes,
                                                         memory.unique_bytes))]
        for name, memory in started.memory().items()
    ]  # fmt: skip
    return table(("process", "MiB resident", "of its own"), rows)


if __name__ == "__main__":
    sys.exit(main())
