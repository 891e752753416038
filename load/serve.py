"""`penstock bench serve`: latencies and throughput of running servers, as their clients see them.

It measures any OpenAI-compatible server over SSE, and a penstock server over WebSocket too. Several
loads are a sweep, at which several servers take turns (A B A B …) with the same prompts, so that a
drifting machine favours none. Each load has prompts of its own, since a prefix cache would know
repeated ones. `--flood` measures each load alone and beside another tenant's
streams. The exit code is 1 if any stream had a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import multiprocessing
import os
import re
import statistics
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from multiprocessing.synchronize import Event
from typing import Any

import orjson
import uvloop
from tqdm import tqdm

from penstock.engine.errors import ConfigError
from penstock.load.client.records import Address, Dialogue, StreamRecord
from penstock.load.client.transport import Wire
from penstock.load.report.options import add_out, objective, positive, settings_of
from penstock.load.report.summary import (
    Slo,
    Summary,
    TurnTimes,
    latency_table,
    notes,
    rate_table,
    summarize,
    turns_of,
    warnings,
)
from penstock.load.report.tables import publish, table_of
from penstock.load.workloads.driver import Arrivals, ClosedLoop, RunResult
from penstock.load.workloads.driver import run as drive
from penstock.load.workloads.options import (
    WARM_UP_SEED,
    Load,
    add_dataset_arguments,
    add_load_arguments,
    add_wire_arguments,
    loads_of,
    make_dialogues,
    wire_of,
)

_DEFAULT_URL = "http://127.0.0.1:8000"
_PROMPTS_PER_STREAM, _SECONDS = 4, 10.0  # of each load of a sweep, at least
_LIST_WITHIN_S = 10.0
_FLOOD_SEED = WARM_UP_SEED << 1
_FLOOD_START_S, _FLOOD_RUN_UP_S = 60.0, 5.0
_FLOOD_NICE, _FLOOD_ROUNDS = 19, 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base-url", action="append", metavar="[NAME=]URL",
        help=f"a server's address; may be repeated; default: {_DEFAULT_URL}")  # fmt: skip
    add("--num-warmups", type=int, default=1, help="warm-up requests; with jsonl, the file's first")
    add_wire_arguments(parser)
    add_dataset_arguments(parser, num_prompts=100)
    add_load_arguments(parser)
    group = parser.add_argument_group("sweep, and another tenant")
    add = group.add_argument
    add("--repeats", type=positive, default=1, help="runs of each server at each load")
    add("--flood", type=int, default=0, metavar="N",
        help="measure again beside N streams, which a process at nice 19 keeps open")  # fmt: skip
    add("--flood-api-key", help="the key of the flood; default: the same as of the measured")
    group = parser.add_argument_group("report")
    add = group.add_argument
    add("--goodput", nargs="+", type=objective, default=[], metavar="NAME:MS",
        help="objectives in milliseconds, such as ttft:200 tpot:50 e2e:5000")  # fmt: skip
    add("--label", default="", help="label in the title and file names")
    add_out(parser)
    add("--save-records", action="store_true", help="write the record of each request as JSONL")


@dataclass(frozen=True, slots=True)
class Run:
    """One server at one load, once."""

    server: str
    load: Load
    is_flooded: bool
    result: RunResult
    summary: Summary

    def figures(self) -> dict[str, Any]:
        return {
            "server": self.server,
            "load": asdict(self.load),
            "is_flooded": self.is_flooded,
            "summary": self.summary.to_json(),
            "turns": [asdict(turn) for turn in turns_of(self.result.records)],
        }


def run(parsed: argparse.Namespace) -> int:
    """Measure; print and write the report; return 1 if any stream had a fault."""
    wire, loads = wire_of(parsed), loads_of(parsed)
    make_dialogues(parsed, wire.endpoint, num_dialogues=1, seed=0)
    targets = [
        Target(name, base_url, parsed.model or first_model(base_url, wire.api_key))
        for name, base_url in _servers(parsed.base_url or [_DEFAULT_URL]).items()
    ]
    title = (
        f"{parsed.label or ', '.join(target.name for target in targets)}: "
        f"{targets[0].model}, {parsed.dataset}, {wire.endpoint} by {wire.transport}"
    )
    print(title, flush=True)
    runs = uvloop.run(_measure(parsed, targets, wire, loads))
    has_cap = all(load.concurrency is not None for load in loads)
    doubts = {text for each in runs for text in warnings(each.summary, has_cap=has_cap)}
    parts = [_details(runs[0])] if len(runs) == 1 else [sweep_table(runs)]
    if parsed.flood:
        parts.append(_flood_ratios(runs))
    parts += [f"warning: {text}" for text in sorted(doubts)]
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", parsed.label)  # in the characters of file names
    stem = f"serve-{label}" if label else "serve"
    others = [parsed.out / f"{stem}-records.jsonl"] if parsed.save_records else []
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(map(_lines, runs)))
    data = {"settings": settings_of(parsed), "runs": [each.figures() for each in runs]}
    print()
    publish(parsed.out, stem, title, "\n\n".join(parts), data, others=others)
    return int(any(each.summary.num_failed for each in runs))


def _servers(texts: Sequence[str]) -> dict[str, str]:
    """Addresses by name. Raises ConfigError if two have the same."""
    servers: dict[str, str] = {}
    for text in texts:
        name, equals, base_url = text.partition("=")
        name, base_url = (name, base_url) if equals and "/" not in name else (text, text)
        if not name or not base_url or name in servers:
            raise ConfigError(f"--base-url {text!r}: must be URL or NAME=URL, each once")
        servers[name] = base_url
    return servers


async def _measure(
    parsed: argparse.Namespace, targets: Sequence[Target], wire: Wire, loads: Sequence[Load]
) -> list[Run]:
    """All servers at all loads."""

    def dialogues_of(num_dialogues: int, seed: int) -> list[Dialogue]:
        return make_dialogues(parsed, wire.endpoint, num_dialogues=num_dialogues, seed=seed)

    if parsed.num_warmups > 0:
        warm_ups = dialogues_of(parsed.num_warmups, WARM_UP_SEED)
        for target in targets:
            await warm_up(target, wire, warm_ups)
    runs: list[Run] = []
    slo = Slo(**dict(parsed.goodput))
    floods = (False, True) if parsed.flood else (False,)
    for index, load in enumerate(loads):
        for is_flooded, repeat in itertools.product(floods, range(parsed.repeats)):
            seed = parsed.seed + (index * len(floods) + is_flooded) * parsed.repeats + repeat
            dialogues = dialogues_of(_num_dialogues(parsed, load, len(loads)), seed)
            for target in targets:
                arrivals = load.arrivals(dialogues, seed=seed)
                with _flood(target, wire, parsed) if is_flooded else nullcontext():
                    result = await measure(target, wire, dialogues, arrivals)
                summary = summarize(result, slo)
                runs.append(Run(target.name, load, is_flooded, result, summary))
                if len(loads) > 1:  # a sweep takes long
                    print(f"{target.name}, {load}: {summary.output_tokens_per_s:,.0f} tokens/s")
    return runs


def _num_dialogues(parsed: argparse.Namespace, load: Load, num_loads: int) -> int:
    """Of a sweep enough for each load to last."""
    most: int = parsed.num_prompts
    if num_loads == 1:
        return most
    rate = load.rate if load.rate is not None and math.isfinite(load.rate) else 0.0
    streams = load.concurrency or 0
    return max(most, math.ceil(rate * _SECONDS), 0 if rate else streams * _PROMPTS_PER_STREAM)


def _lines(run: Run) -> bytes:
    """The run's records as JSONL, with times from its start."""

    def plain(record: StreamRecord) -> dict[str, Any]:
        began_s, values = run.result.began_s, asdict(record)
        for name in ("scheduled_s", "sent_s", "ended_s"):
            values[name] -= began_s
        values["event_times_s"] = [time_s - began_s for time_s in record.event_times_s]
        return {"server": run.server, "load": str(run.load), "is_flooded": run.is_flooded, **values}

    return b"".join(orjson.dumps(plain(record)) + b"\n" for record in run.result.records)


# -- a measured run -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """A server to measure."""

    name: str
    base_url: str
    model: str  # the name that requests carry


def first_model(base_url: str, api_key: str | None) -> str:
    """The first model that the server lists. Raises ConfigError if it cannot be reached or lists
    none."""
    address = Address.parse(base_url)
    url = f"http{'s' * address.is_tls}://{address.netloc}{address.prefix}/v1/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=headers)  # noqa: S310  (an address of the user)
    try:
        with opener.open(request, timeout=_LIST_WITHIN_S) as answer:
            return str(orjson.loads(answer.read())["data"][0]["id"])
    except (urllib.error.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url} lists no model ({error}): pass --model") from error
    except OSError as error:
        raise ConfigError(f"no server at {base_url}: {error}") from error


async def warm_up(target: Target, wire: Wire, dialogues: Sequence[Dialogue]) -> None:
    """Send the first turns of some dialogues at once. Raises ConfigError if one had a fault,
    before every request has it."""
    first_turns = [replace(dialogue, turns=dialogue.turns[:1]) for dialogue in dialogues]
    arrivals = ClosedLoop(max(len(first_turns), 1))
    for record in (await send(target, wire, first_turns, arrivals)).records:
        if not record.is_clean:
            raise ConfigError(
                f"{target.base_url}: a warm-up request was {record.faults[0]}: {record.detail}"
            )


async def measure(
    target: Target, wire: Wire, dialogues: Sequence[Dialogue], arrivals: Arrivals
) -> RunResult:
    """Send a workload, with a progress bar in a terminal."""
    num_turns = sum(len(dialogue.turns) for dialogue in dialogues)
    with tqdm(total=num_turns, desc=target.name, unit="request", leave=False, disable=None) as bar:

        def advance(_: StreamRecord) -> None:
            bar.update()

        return await send(target, wire, dialogues, arrivals, on_end=advance)


async def send(
    target: Target,
    wire: Wire,
    dialogues: Sequence[Dialogue],
    arrivals: Arrivals,
    *,
    on_end: Callable[[StreamRecord], None] | None = None,
    records: list[StreamRecord] | None = None,
) -> RunResult:
    """Send a workload; the last two arguments are the driver's."""
    async with wire.open(target.base_url) as transport:
        return await drive(
            transport, dialogues, arrivals=arrivals, model=target.model, history=wire.history,
            extra=wire.extra, ignore_eos=wire.ignore_eos, on_end=on_end, records=records,
        )  # fmt: skip


# -- another tenant's flood ----------------------------------------------------------------------


@contextmanager
def _flood(target: Target, wire: Wire, parsed: argparse.Namespace) -> Iterator[None]:
    """Keep the flood's streams open during the block. Its client is another process at nice 19:
    real floods come from other machines, so the server should not pay for this client's CPU."""
    context = multiprocessing.get_context("spawn")
    is_there = context.Event()
    dialogues = make_dialogues(parsed, wire.endpoint, num_dialogues=parsed.flood, seed=_FLOOD_SEED)
    wire = replace(wire, api_key=parsed.flood_api_key or wire.api_key, stall_s=300.0)
    process = context.Process(
        target=_run_flood, args=(target, wire, dialogues, is_there), daemon=True
    )
    process.start()
    try:
        if not is_there.wait(_FLOOD_START_S):
            raise ConfigError("--flood: none of its streams got a token")
        time.sleep(_FLOOD_RUN_UP_S)  # until its queue is long
        yield
    finally:
        process.kill()
        process.join()


def _run_flood(target: Target, wire: Wire, dialogues: list[Dialogue], is_there: Event) -> None:
    os.nice(_FLOOD_NICE)

    def note(record: StreamRecord) -> None:
        if record.is_clean:
            is_there.set()

    arrivals, again = ClosedLoop(len(dialogues)), dialogues * _FLOOD_ROUNDS
    asyncio.run(send(target, wire, again, arrivals, on_end=note))


def _flood_ratios(runs: Sequence[Run]) -> str:
    """What the flood costs."""

    def p99_ms(name: str, load: Load, *, is_flooded: bool) -> float:
        return statistics.median(
            each.summary.ttft_ms.p99
            for each in runs
            if (each.server, each.load, each.is_flooded) == (name, load, is_flooded)
        )

    pairs = dict.fromkeys((each.server, each.load) for each in runs if each.is_flooded)
    lines = []
    for name, load in pairs:
        alone, beside = (p99_ms(name, load, is_flooded=each) for each in (False, True))
        lines.append(f"- {name}, {load}: beside the flood TTFT p99 is {beside / alone:.2f} times")
    return "\n".join(lines)


# -- what is said of it --------------------------------------------------------------------------

_NOTES = """\
spread: of tokens/s over all runs of this load, highest ÷ lowest; all else is of the run of median
throughput. Latencies in ms, from when a request was due. good: share of all requests that kept to
the objectives."""


def _details(run: Run) -> str:
    columns: dict[str, Callable[[TurnTimes], str]] = {
        "turn": lambda each: f"{each.turn}",
        "prompt tokens": lambda each: f"{each.prompt_tokens:,.0f}",
        "not cached": lambda each: f"{each.new_tokens:,.0f}",
        "TTFT ms p50": lambda each: f"{each.ttft_ms:,.1f}",
    }
    turns = turns_of(run.result.records)
    parts = [latency_table(run.summary), rate_table(run.summary), notes(run.summary)]
    return "\n\n".join([str(run.load), *parts, *([table_of(turns, columns)] if turns else [])])


def points_of(runs: Sequence[Run]) -> Mapping[tuple[str, Load, bool], list[Run]]:
    """The runs by server, load and flood, that of median throughput first; of an even number, the
    lower of the two."""
    points: dict[tuple[str, Load, bool], list[Run]] = {}
    for each in runs:
        points.setdefault((each.server, each.load, each.is_flooded), []).append(each)
    for point in points.values():
        point.sort(key=lambda each: each.summary.output_tokens_per_s)
        point.insert(0, point.pop((len(point) - 1) // 2))
    return points


def sweep_table(runs: Sequence[Run]) -> str:
    """A row for each server at each load."""

    def rates(point: Sequence[Run]) -> list[float]:
        return [each.summary.output_tokens_per_s for each in point]

    def ms(name: str, quantile: str) -> Callable[[Sequence[Run]], str]:
        return lambda point: f"{getattr(getattr(point[0].summary, name), quantile):,.1f}"

    columns: dict[str, Callable[[Sequence[Run]], str]] = {
        "server": lambda point: point[0].server,
        "load": lambda point: f"{point[0].load}{', flooded' * point[0].is_flooded}",
        "tokens/s": lambda point: f"{rates(point)[0]:,.0f}",
        "spread": lambda point: (
            f"{max(rates(point)) / min(rates(point)):.2f}" if min(rates(point)) > 0 else "–"
        ),
        "requests/s": lambda point: f"{point[0].summary.requests_per_s:,.2f}",
        **{
            f"{title} {quantile}": ms(name, quantile)
            for title, name in {"TTFT": "ttft_ms", "ITL": "itl_ms", "E2E": "e2e_ms"}.items()
            for quantile in ("p50", "p99")
        },
        "good": lambda point: (
            f"{point[0].summary.goodput.share:.0%}" if point[0].summary.goodput else "–"
        ),
        "faults": lambda point: f"{sum(each.summary.num_failed for each in point):,}",
    }
    return f"{table_of(points_of(runs).values(), columns)}\n\n{_NOTES}"
