"""`penstock bench serve`: what a running server gives its users, from outside.

Any OpenAI-compatible server over SSE, and a penstock server over its WebSocket too. The exit code
is 1 when any stream had a fault.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import uvloop

from penstock.load.client.records import Dialogue, StreamRecord
from penstock.load.plotting import new_figure
from penstock.load.report.options import add_report_arguments, file_stem, settings_of, slo_of
from penstock.load.report.run_plots import draw_run
from penstock.load.report.server_metrics import ServerMetrics, read_metrics
from penstock.load.report.summary import Slo, Summary, summarize
from penstock.load.report.text import latency_table, notes, rate_table, warnings
from penstock.load.tables import write_report
from penstock.load.workloads.arrivals import Arrivals, ClosedLoop
from penstock.load.workloads.driver import RunResult
from penstock.load.workloads.measure import Target, measure, target_of, warm_up
from penstock.load.workloads.options import (
    WARM_UP_SEED,
    add_arrival_arguments,
    add_dataset_arguments,
    make_arrivals,
    make_dialogues,
)
from penstock.load.workloads.wire import Wire, add_wire_arguments, wire_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument(
        "--num-warmups", type=int, default=1, help="requests sent before; jsonl: the file's first"
    )
    add_wire_arguments(parser)
    add_dataset_arguments(parser, num_prompts=100)
    add_arrival_arguments(parser)
    add_report_arguments(parser)
    parser.add_argument(
        "--save-records", action="store_true", help="write what came of each request as JSONL"
    )


def run(parsed: argparse.Namespace) -> int:
    """Measure; print and write the report; 1 if any stream had a fault."""
    job = _job(parsed)
    print(job.title)
    outcome = uvloop.run(_measure(job))
    report = _report(job, outcome)
    print(f"\n{report}")
    stem = file_stem("serve", parsed.label)
    paths = write_report(
        parsed.out,
        stem,
        markdown=f"# {job.title}\n\n{report}",
        data={
            "settings": settings_of(parsed),
            "model": job.target.model,
            "summary": outcome.summary.to_json(),
            "server": asdict(outcome.server) if outcome.server else None,
        },
    )
    if parsed.save_records:
        paths.append(_write_records(outcome.result, parsed.out / f"{stem}-records.jsonl"))
    if parsed.plot:
        paths.append(parsed.out / f"{stem}.png")
        draw_run(outcome.result, outcome.summary, title=job.title, path=paths[-1])
    print("\nwrote", ", ".join(map(str, paths)))
    return int(outcome.summary.num_failed > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What the arguments ask for."""

    title: str
    target: Target
    wire: Wire
    dialogues: Sequence[Dialogue]
    warm_ups: Sequence[Dialogue]
    arrivals: Arrivals
    slo: Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    result: RunResult
    summary: Summary
    server: ServerMetrics | None


def _job(parsed: argparse.Namespace) -> _Job:
    if parsed.plot:
        new_figure(1, 1)  # what is missing is missed now, not after the run
    wire, slo = wire_of(parsed), slo_of(parsed)
    dialogues = make_dialogues(
        parsed, wire.endpoint, num_dialogues=parsed.num_prompts, seed=parsed.seed
    )
    warm_ups: list[Dialogue] = []
    if parsed.num_warmups > 0:
        warm_ups = make_dialogues(
            parsed, wire.endpoint, num_dialogues=parsed.num_warmups, seed=WARM_UP_SEED
        )
    arrivals = make_arrivals(parsed, dialogues)
    target = target_of(
        parsed.label or parsed.base_url, parsed.base_url, model=parsed.model, wire=wire
    )
    num_turns = sum(len(dialogue.turns) for dialogue in dialogues)
    return _Job(
        title=f"{target.name}: {target.model}, {num_turns:,} requests of {parsed.dataset}, "
        f"{_described(arrivals, parsed)}, {wire.endpoint} by {wire.transport}",
        target=target,
        wire=wire,
        dialogues=dialogues,
        warm_ups=warm_ups,
        arrivals=arrivals,
        slo=slo,
    )


def _described(arrivals: Arrivals, parsed: argparse.Namespace) -> str:
    if isinstance(arrivals, ClosedLoop):
        return f"{arrivals.max_concurrency:,} in flight"
    if parsed.ramp_from is not None:
        rate = f"{parsed.ramp_from:g} to {parsed.ramp_to:g} dialogues a second"
    elif arrivals.offsets_s[-1] == 0:
        rate = "all at once"
    else:
        rate = f"{len(arrivals.offsets_s) / arrivals.offsets_s[-1]:.3g} dialogues a second"
    cap = arrivals.max_concurrency
    return rate if cap is None else f"{rate}, at most {cap:,} in flight"


async def _measure(job: _Job) -> _Outcome:
    await warm_up(job.target, job.wire, job.warm_ups)
    measured = await measure(job.target, job.wire, job.dialogues, job.arrivals)
    return _Outcome(
        result=measured.result,
        summary=summarize(measured.result, job.slo),
        server=read_metrics(measured.metrics_texts),
    )


def _report(job: _Job, outcome: _Outcome) -> str:
    summary = outcome.summary
    has_cap = isinstance(job.arrivals, ClosedLoop) or job.arrivals.max_concurrency is not None
    parts = [latency_table(summary), rate_table(summary), notes(summary, outcome.server)]
    parts += [f"warning: {text}" for text in warnings(summary, has_cap=has_cap)]
    return "\n\n".join(parts)


def _write_records(result: RunResult, path: Path) -> Path:
    with path.open("wb") as file:
        for record in result.records:
            file.write(orjson.dumps(_plain(record, result.began_s)) + b"\n")
    return path


def _plain(record: StreamRecord, began_s: float) -> dict[str, Any]:
    """A record with its times from the start of the run."""
    plain = asdict(record)
    for name in ("scheduled_s", "sent_s", "ended_s"):
        plain[name] -= began_s
    plain["event_times_s"] = [time_s - began_s for time_s in record.event_times_s]
    return plain
