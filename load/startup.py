"""`penstock bench startup`: a server's start, its memory, and its speed with few and many streams.

Real servers are started and stopped: seconds until each is ready and until its first token, and the
memory of its processes. The last one is then asked for the same requests as by `penstock bench
serve`, so that the figures are comparable. The first start reads files into the page cache: a first
start after boot is not measured. `make bench` does it once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import uvloop

from penstock.engine.config import DEMO_MODEL
from penstock.engine.errors import ConfigError
from penstock.load.client.records import Call, Endpoint, StreamRecord
from penstock.load.client.sse import SseTransport
from penstock.load.client.transport import TransportKind, open_transport
from penstock.load.launch import Memory, Started, server
from penstock.load.machine import commit
from penstock.load.report.options import add_out, counts, positive
from penstock.load.report.summary import Summary, summarize
from penstock.load.report.tables import publish, table, table_of
from penstock.load.workloads.datasets import Lengths, RandomLengths, Words
from penstock.load.workloads.driver import ClosedLoop
from penstock.load.workloads.driver import run as drive

_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)  # token ids that every vocabulary has
_FIRST_TOKENS = 16
_PROMPT_TOKENS = 64  # words: a few more tokens of a small vocabulary
_MIN_REQUESTS, _WAVES = 4, 2
_NOTES = """\
To the first token: the ready line and then the first answer, asked for at once. Memory in MiB, when
ready: resident counts all pages; proportional divides those that processes share, so that it can be
summed; unique would be free without the process; used is resident after a first request."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    add("--repeats", type=positive, default=3, help="number of starts")
    add("--streams", type=counts, default="1,8,32",
        help="numbers of concurrent streams, comma-separated")  # fmt: skip
    add("--output-tokens", type=positive, default=128, help="tokens per answer")
    add("flags", nargs="*", help="flags for the server, after --")
    add_out(parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a server: the memory of each process when ready (`idle`) and after a request."""

    ready_s: float  # from the start of its process to its ready line
    first_token_s: float  # from a first request, sent then, to its first token
    idle: Mapping[str, Memory]
    used: Mapping[str, Memory]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A number of concurrent streams, and how they are sent."""

    num_streams: int
    transport: TransportKind = "sse"
    endpoint: Endpoint = "chat"


def run(parsed: argparse.Namespace) -> int:
    """Start and measure; print and write the tables; return 1 if a stream had a fault."""
    starts: list[Start] = []
    speeds: list[tuple[Case, Summary]] = []
    for number in range(parsed.repeats):
        with server(parsed.model, parsed.flags) as started:
            starts.append(_start(started, parsed.model))
            if number + 1 == parsed.repeats:
                for seed, case in enumerate(_cases(parsed.streams)):
                    measured = _measure(case, started, parsed, seed=seed)
                    speeds.append((case, uvloop.run(measured)))
    for _, summary in speeds:
        for fault, detail in summary.fault_details.items():
            print(f"{fault}: {detail}", file=sys.stderr)
    ready_s = statistics.median(start.ready_s for start in starts)
    title = f"{os.cpu_count()} cores · model {parsed.model} · ready after {ready_s:.1f} s"
    tables = [_times_table(starts), _memory_table(starts), _speed_table(speeds)]
    data = {
        "model": parsed.model,
        "commit": commit(),
        "starts": [asdict(start) for start in starts],
        "speeds": [{**asdict(case), "summary": summary.to_json()} for case, summary in speeds],
    }
    report = "\n\n".join([title, *tables, _NOTES])
    publish(parsed.out, "startup", "Start of a server", report, data)
    return int(any(summary.num_failed for _, summary in speeds))


def _start(started: Started, model: str) -> Start:
    """What a server that has just become ready takes to its first token."""
    idle, sent_s = started.memory(), time.perf_counter()
    first_token_s = uvloop.run(_ask(started, model)) - sent_s
    return Start(
        ready_s=started.ready_s, first_token_s=first_token_s, idle=idle, used=started.memory()
    )


async def _ask(started: Started, model: str) -> float:
    """Complete a first request; return when its first token came. Raises ConfigError if it
    failed."""
    call = Call(model=model, max_tokens=_FIRST_TOKENS, ignore_eos=True, prompt_token_ids=_PROMPT,
                extra={"model": None})  # fmt: skip
    record = StreamRecord(scheduled_s=time.perf_counter(), expected_tokens=_FIRST_TOKENS)
    async with SseTransport(started.base_url, "completions") as transport:
        await transport.stream(call, record)
    if not record.is_clean or not record.event_times_s:
        raise ConfigError(f"the first request failed: {record.faults} {record.detail}")
    return record.event_times_s[0]


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


# -- what is said of it ---------------------------------------------------------------------------


def _times_table(starts: Sequence[Start]) -> str:
    rows = {
        "ready": [start.ready_s for start in starts],
        "first token": [start.ready_s + start.first_token_s for start in starts],
    }
    columns: dict[str, Callable[[tuple[str, list[float]]], str]] = {
        "from the start of the process to": lambda row: row[0],
        "s": lambda row: f"{statistics.median(row[1]):.2f}",
        "min–max": lambda row: f"{min(row[1]):.2f}–{max(row[1]):.2f}",
    }
    return table_of(rows.items(), columns)


def _memory_table(starts: Sequence[Start]) -> str:
    """Medians over all starts."""

    def mebibytes(process: str, when: str, size: str) -> str:
        sizes = (getattr(getattr(start, when)[process], size) for start in starts)
        return f"{statistics.median(sizes) / (1 << 20):,.0f}"

    names = ("resident", "proportional", "unique")
    rows = [
        [
            process,
            *(mebibytes(process, "idle", f"{name}_bytes") for name in names),
            mebibytes(process, "used", "resident_bytes"),
        ]
        for process in starts[0].idle
    ]
    return table(("process", *names, "used"), rows)


def _speed_table(speeds: Sequence[tuple[Case, Summary]]) -> str:
    def ms(value: float) -> str:
        return f"{value:,.1f}"

    header = ("streams", "over", "tokens/s", "TTFT ms p50", "p99", "ITL ms p50", "p99", "faults")
    names: dict[Any, str] = {"sse": "SSE", "websocket": "WebSocket"}
    rows = [
        [
            f"{case.num_streams:,}",
            f"{case.endpoint}, {names[case.transport]}",
            f"{summary.output_tokens_per_s:,.0f}",
            *map(ms, (summary.ttft_ms.p50, summary.ttft_ms.p99)),
            *map(ms, (summary.itl_ms.p50, summary.itl_ms.p99)),
            f"{summary.num_failed:,}",
        ]
        for case, summary in speeds
    ]
    return table(header, rows)
