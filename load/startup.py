"""`penstock bench startup`: start, memory, speed, and how long a dead engine makes streams wait.

Real servers are started and stopped: seconds until each is ready and until its first token, and the
memory of its processes. The last one is then asked for the same requests as by `penstock bench
serve`, so that the figures are comparable. At the end of each, its engine is killed (`kill -9`)
amid as many streams as there were at most, and what a reader waited is measured. The first start
reads files into the page cache: a first start after boot is not measured. `make bench` does it
once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import uvloop

from penstock.engine.config import DEMO_MODEL
from penstock.engine.errors import ConfigError
from penstock.load.client.records import Call, Dialogue, StreamRecord
from penstock.load.client.sse import SseTransport
from penstock.load.client.transport import Wire
from penstock.load.launch import Started, server
from penstock.load.machine import commit
from penstock.load.report.options import add_out, counts, positive
from penstock.load.report.summary import summarize
from penstock.load.report.tables import publish, table
from penstock.load.serve import Run, Target, measure, send, sweep_table
from penstock.load.workloads.datasets import Lengths, RandomLengths, Words
from penstock.load.workloads.driver import ClosedLoop
from penstock.load.workloads.options import Load

_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)  # token ids that every vocabulary has
_FIRST_TOKENS = 16
_PROMPT_TOKENS = 64  # words: a few more tokens of a small vocabulary
_MIN_REQUESTS, _WAVES = 4, 2
_KILL_SEED = 1 << 20  # prompts that no speed was measured with
_TOKENS_AROUND, _ENDLESS_TOKENS = 64, 1500  # before and after a death; of an answer, at most
_LOOK_S = 0.005
_NOTES = """\
To the first token: the ready line and then the first answer, asked for at once. Memory in MiB, when
ready: resident counts all pages; proportional divides those that processes share, so that it can be
summed; unique would be free without the process; used is resident after a first request. The
longest gap is that of all streams: between two events with text; an engine is killed after 64
tokens of each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    add("--repeats", type=positive, default=3, help="number of starts")
    add("--streams", type=counts, default="1,8,32",
        help="numbers of concurrent streams, comma-separated")  # fmt: skip
    add("--output-tokens", type=positive, default=128, help="tokens per answer")
    add("--kill", action=argparse.BooleanOptionalAction, default=True,
        help="end each server's engine amid the most streams")  # fmt: skip
    add("flags", nargs="*", help="flags for the server, after --")
    add_out(parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a server: the memory of each process when ready (`idle`) and after a request."""

    ready_s: float  # from the start of its process to its ready line
    first_token_s: float  # from a first request, sent then, to its first token
    gap_s: float | None = None  # the longest of all streams whose engine was killed
    idle: Mapping[str, Mapping[str, int]]
    used: Mapping[str, Mapping[str, int]]


def run(parsed: argparse.Namespace) -> int:
    """Start and measure; print and write the tables; return 1 if a stream had a fault."""
    starts: list[Start] = []
    for number in range(parsed.repeats):
        with server(parsed.model, parsed.flags) as started:
            starts.append(_start(started, parsed.model))
            if number + 1 == parsed.repeats:
                runs = uvloop.run(_speeds(started, parsed))
            if parsed.kill:
                starts[-1] = replace(starts[-1], gap_s=uvloop.run(_outlive(started, parsed)))
    for each in runs:
        for fault, detail in each.summary.fault_details.items():
            print(f"{fault}: {detail}", file=sys.stderr)
    ready_s = statistics.median(start.ready_s for start in starts)
    title = f"{os.cpu_count()} cores · model {parsed.model} · ready after {ready_s:.1f} s"
    data = {
        "model": parsed.model,
        "commit": commit(),
        "starts": [asdict(start) for start in starts],
        "speeds": [each.figures() for each in runs],
    }
    times = _times_table(starts, runs, num_streams=max(parsed.streams))
    parts = [title, times, _memory_table(starts), _NOTES, sweep_table(runs)]
    publish(parsed.out, "startup", "Start of a server", "\n\n".join(parts), data)
    return int(any(each.summary.num_failed for each in runs))


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


async def _speeds(started: Started, parsed: argparse.Namespace) -> list[Run]:
    """Every number of streams over chat completions; the largest also as our own web page sends
    them. Each after a warm-up request."""
    most, runs = max(parsed.streams), list[Run]()
    chat = Wire(endpoint="chat", extra={"temperature": 0})
    sse = replace(chat, endpoint="responses")
    socket = replace(sse, transport="websocket")
    cases = [*((num_streams, chat) for num_streams in parsed.streams), (most, sse), (most, socket)]
    for seed, (num_streams, wire) in enumerate(cases):
        name = f"{wire.endpoint}, {wire.transport}"
        target = Target(name, started.base_url, parsed.model)
        num_dialogues = max(_MIN_REQUESTS, _WAVES * num_streams) + 1
        dialogues = _dialogues(num_dialogues, parsed.output_tokens, seed=seed)
        for part in (dialogues[:1], dialogues[1:]):
            result = await measure(target, wire, part, ClosedLoop(num_streams))
        runs.append(Run(name, Load(concurrency=num_streams), False, result, summarize(result)))
    return runs


def _dialogues(num: int, output_tokens: int, *, seed: int) -> list[Dialogue]:
    return RandomLengths(
        num_dialogues=num,
        input_len=Lengths.fixed(_PROMPT_TOKENS),
        output_len=Lengths.fixed(output_tokens),
        seed=seed,
    ).make(Words())


async def _outlive(started: Started, parsed: argparse.Namespace) -> float:
    """Kill the engine when each of the most streams has some tokens, and read on until each has as
    many more; the longest gap of any.

    Raises ConfigError if one had a fault.
    """
    dialogues = _dialogues(max(parsed.streams), _ENDLESS_TOKENS, seed=_KILL_SEED)
    records: list[StreamRecord] = []
    # Behind the end of a text there may be no more of it, nor in a chat behind what may be a call.
    wire = Wire(extra={"temperature": 0, "min_tokens": _ENDLESS_TOKENS})
    target = Target("to be killed", started.base_url, parsed.model)
    arrivals = ClosedLoop(len(dialogues))
    sending = asyncio.create_task(send(target, wire, dialogues, arrivals, records=records))

    async def reach(num_tokens: int) -> None:
        while len(records) < len(dialogues) or min(map(_num_tokens, records)) < num_tokens:
            for record in records:
                if record.ended_s > 0.0:
                    raise ConfigError(f"a stream whose engine is killed ended: {record.detail}")
            await asyncio.sleep(_LOOK_S)

    try:
        await reach(_TOKENS_AROUND)
        killed_s, engine = time.perf_counter(), started.family()["engine"]
        engine.kill()
        await reach(max(map(_num_tokens, records)) + _TOKENS_AROUND)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    return _longest_gap_s(records, since_s=killed_s)


def _num_tokens(record: StreamRecord) -> int:
    return sum(record.event_tokens)


def _longest_gap_s(records: Iterable[StreamRecord], *, since_s: float = 0.0) -> float:
    """Between two events with text of any stream, the later of them since then."""
    gaps_s = (
        later - one
        for record in records
        for one, later in pairwise(record.event_times_s)
        if later >= since_s
    )
    return max(gaps_s, default=0.0)


# -- what is said of it ---------------------------------------------------------------------------


def _times_table(starts: Sequence[Start], runs: Sequence[Run], *, num_streams: int) -> str:
    undisturbed = [
        _longest_gap_s(each.result.records) for each in runs if each.load.concurrency == num_streams
    ]
    times = {
        "from its process to ready": [start.ready_s for start in starts],
        "… to the first token": [start.ready_s + start.first_token_s for start in starts],
        f"longest gap of {num_streams} streams": undisturbed,
        "… whose engine is killed": [start.gap_s for start in starts if start.gap_s is not None],
    }
    rows = [
        [name, f"{statistics.median(each):.2f}", f"{min(each):.2f}–{max(each):.2f}"]
        for name, each in times.items()
        if each
    ]
    return table(("start of a server", "s", "min–max"), rows)


def _memory_table(starts: Sequence[Start]) -> str:
    """Medians over all starts."""

    def mebibytes(process: str, when: str, size: str) -> str:
        sizes = (getattr(start, when)[process].get(size, 0) for start in starts)
        return f"{statistics.median(sizes) / (1 << 20):,.0f}"

    rows = [
        [process, *(mebibytes(process, "idle", size) for size in ("rss", "pss", "uss")),
         mebibytes(process, "used", "rss")]
        for process in starts[0].idle
    ]  # fmt: skip
    return table(("process", "resident", "proportional", "unique", "used"), rows)
