"""`penstock bench soak`: minutes of mixed and hostile traffic, and a verdict.

Streams of every kind, conversations, clients that leave, cancel, read slowly or not at all, crowds,
nonsense, garbage and broken frames, all drawn from one seed. The exit code is 1 unless the verdict
is clean.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engine.errors import ConfigError
from penstock.load.report.options import add_out
from penstock.load.report.plots import BLUE, GREEN, GREY, ORANGE, SKY, new_figure
from penstock.load.report.tables import publish, table, table_of
from penstock.load.soak.course import Plan, soak
from penstock.load.soak.target import Target, given_server, own_server
from penstock.load.soak.verdict import Bounds, Evidence, Fate, Finding, fate_of, findings, slopes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_REDIS_CONNECTIONS = 128  # that a gateway keeps open once it had to open them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    servers = parser.add_argument_group("server", "one of these; by default the demo model")
    which = servers.add_mutually_exclusive_group()
    add = which.add_argument
    add("--base-url", help="a server that runs already")
    add("--model", help="start a penstock server of this model")
    add = servers.add_argument
    add("--serve-flags", default="", help="further flags of the server started")
    add("--api-key", help="sent with every request")
    traffic = parser.add_argument_group("traffic")
    add = traffic.add_argument
    add("--minutes", type=float, default=10.0, help="how long")
    add("--concurrency", type=int, default=8, help="clients at once, at least")
    add("--seed", type=int, default=0, help="of all that is drawn")
    switch = argparse.BooleanOptionalAction
    add("--resumes", action=switch, default=True, help="drop connections and resume")
    add("--cancels-by-id", action=switch, default=True, help="over HTTP")
    add(
        "--kills",
        action=switch,
        help="kill the engine of the server started, and in turn with it a gateway where there are "
        "several, which must be back within a minute; by default so, "
        "but not with --base-url",
    )
    add(
        "--attack",
        action="store_true",
        help="kills, freezes of gateways, engine and Redis, floods, silent handshakes, a log that "
        "is not read, and 4 MB prompts, one after the other; the server started has two gateways "
        "and a Redis of its own",
    )
    bounds = parser.add_argument_group("bounds")
    bounds.add_argument(
        "--max-memory-growth",
        type=float,
        default=Bounds().memory_kib_per_min,
        metavar="KIB_PER_MIN",
        help="of one process after the warm-up, the first third",
    )
    parser.add_argument("--plot", action=argparse.BooleanOptionalAction, default=True, help="draw")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Soak; print and write the report; 1 unless the verdict is clean. Raises ConfigError if the
    settings make no sense, or the server did not start."""
    if parsed.minutes <= 0 or parsed.concurrency < 1:
        raise ConfigError("--minutes and --concurrency must be more than 0")
    if parsed.serve_flags and parsed.base_url is not None:
        raise ConfigError("--serve-flags is for a penstock server that soak starts")
    if parsed.kills and parsed.base_url is not None:
        raise ConfigError("--kills is for a server that soak starts, not for --base-url")
    if parsed.attack and (parsed.base_url is not None or parsed.kills is False):
        raise ConfigError("--attack is for a server that soak starts, and has kills")
    end_as_interrupted()
    if parsed.base_url is not None:
        return soak_target(given_server(parsed.base_url), parsed)
    with own_server(parsed.model, parsed.serve_flags, is_attacked=parsed.attack) as target:
        return soak_target(target, parsed)


def end_as_interrupted() -> None:
    """A soak that is terminated ends what it started, and wakes what it froze: asyncio cancels the
    main task at SIGINT, if its handler is this one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def soak_target(target: Target, parsed: argparse.Namespace) -> int:
    """Soak a server; print and write the report; 1 unless the verdict is clean."""
    plan = Plan(
        duration_s=parsed.minutes * 60,
        concurrency=parsed.concurrency,
        seed=parsed.seed,
        has_resumes=parsed.resumes,
        has_cancels_by_id=parsed.cancels_by_id,
        has_kills=parsed.base_url is None if parsed.kills is None else parsed.kills,
        is_attack=parsed.attack,
        api_key=parsed.api_key,
    )
    has_redis = parsed.attack or "--redis-url" in parsed.serve_flags
    spare = _REDIS_CONNECTIONS if has_redis else 0
    bounds = Bounds(
        memory_kib_per_min=parsed.max_memory_growth,
        spare_descriptors=Bounds().spare_descriptors + spare,
    )
    attack = " under attack" if plan.is_attack else ""
    clients = f"{plan.concurrency} clients at once{attack}"
    title = f"{parsed.minutes:g} minutes of {clients}: {target.name}"
    print(title, flush=True)
    evidence = asyncio.run(soak(target, plan, bounds))
    found = findings(evidence, bounds)
    report = report_text(evidence, bounds, found)
    print(f"\n{report}")
    figures = {"title": title, "seed": plan.seed, **report_figures(evidence, bounds, found)}
    publish(
        parsed.out,
        "soak",
        title=f"Soak\n\n{title}",
        report=report,
        data=figures,
        draw=partial(draw_soak, evidence, found, title) if parsed.plot else None,
    )
    return int(bool(found))


# -- what is said of it -----------------------------------------------------------------------

_COLOURS = (BLUE, ORANGE, GREEN, SKY)
_MIB = 1 << 20
_FATES = (Fate.FAULTY, Fate.CARRIED, Fate.TURNED_AWAY, Fate.BROKEN)
_COST_NOTES = """\
Streams: those that met it; their faults are judged above. `/health` and gaps are as a process of
its own saw them, which reads four steady streams. MB kept: by the process that kept most, at its
best within 30 s, the worst time. Nothing: the traffic alone, right before the 4 MB prompts."""
_NOTES = """\
KiB/min: a straight line through the calmer half of a process's memory after its warm-up.
Descriptors and sockets: idle before → idle after. Turned away meanwhile: asked while what was
killed or frozen was not back. Broken by a kill: held by the gateway that was killed, and not
resumed by its client, as must be."""


def report_text(evidence: Evidence, bounds: Bounds, found: Sequence[Finding]) -> str:
    """Everything in Markdown, the verdict last."""
    journal = evidence.journal
    acts = ", ".join(f"{name} {num:,}" for name, num in sorted(journal.num_done.items()))
    streams = [[name, *(f"{count:,}" for count in counts)] for name, *counts in _streams(evidence)]
    victims = Counter(kill.victim for kill in journal.kills)
    kills = ", ".join(f"{victim} {num}" for victim, num in victims.items()) or "none"
    processes = _process_rows(evidence, bounds)
    return "\n\n".join(
        [
            table(("streams", "ended", *_FATES), streams),
            f"Acts: {acts}. Kills: {kills}.",
            *([_costs_table(evidence)] if evidence.kinds else []),
            table(("process", "MiB", "KiB/min", "descriptors", "sockets"), processes)
            if processes
            else "No process of the server is on this machine: memory was not watched.",
            _NOTES,
            _verdict(found),
        ]
    )


def report_figures(evidence: Evidence, bounds: Bounds, found: Sequence[Finding]) -> dict[str, Any]:
    """The same as data, with every sample. Times count from the first of them."""
    journal, began_s = evidence.journal, evidence.before.at_s
    samples = [
        {**asdict(sample), "at_s": round(sample.at_s - began_s, 3)}
        for sample in (evidence.before, *evidence.samples, evidence.after)
    ]
    names = ("actor", "ended", *(fate.name.lower() for fate in _FATES))
    return {
        "is_clean": not found,
        "findings": [asdict(finding) for finding in found],
        "bounds": asdict(bounds),
        "acts": dict(journal.num_done),
        "streams": [dict(zip(names, row, strict=True)) for row in _streams(evidence)],
        "kills": [
            {
                "victim": kill.victim,
                "killed_s": round(kill.killed_s - began_s, 3),
                "ready_s": round(kill.ready_s - began_s, 3),
            }
            for kill in journal.kills
        ],
        "adversities": [
            {**asdict(each), "began_s": each.began_s - began_s, "ended_s": each.ended_s - began_s}
            for each in journal.adversities
        ],
        "costs": [asdict(cost) for cost in evidence.costs()],
        "slopes": [asdict(slope) for slope in slopes(evidence.samples, bounds.warmup_share)],
        "samples": samples,
    }


def draw_soak(evidence: Evidence, found: Sequence[Finding], title: str, path: Path) -> None:
    """Memory, descriptors and streams over time. Raises ConfigError if matplotlib is not
    installed."""
    figure = new_figure(12, 8)
    verdict = "not clean" if found else "clean"
    figure.suptitle(f"{title}\n{verdict}", x=0.01, ha="left", size=12)
    memory, descriptors, streams = figure.subplots(3, 1, sharex=True)
    _draw_processes(memory, evidence, "rss_bytes", scale=1 / _MIB)
    memory.set_title("Memory of each process (MiB resident)")
    _draw_processes(descriptors, evidence, "num_fds", scale=1)
    descriptors.set_title("Open descriptors of each process")
    began_s = evidence.before.at_s
    times = [sample.at_s - began_s for sample in evidence.samples]
    open_streams = [sample.num_streams for sample in evidence.samples]
    running = [sample.metrics.get("num_requests_running", 0) for sample in evidence.samples]
    streams.plot(times, open_streams, color=SKY, label="that clients wait for")
    streams.plot(times, running, color=BLUE, label="that the server runs")
    streams.set_title("Streams")
    streams.set_xlabel("seconds")
    streams.legend(loc="upper left", bbox_to_anchor=(1, 1))
    for axes in (memory, descriptors, streams):
        axes.set_ylim(bottom=0)
        for kill in evidence.journal.kills:
            axes.axvspan(kill.killed_s - began_s, kill.ready_s - began_s, color=GREY, zorder=0)
    figure.savefig(path, dpi=150)


def _draw_processes(axes: Axes, evidence: Evidence, name: str, *, scale: float) -> None:
    points: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for sample in (evidence.before, *evidence.samples, evidence.after):
        for process in sample.processes:
            at_s = sample.at_s - evidence.before.at_s
            points[process.name].append((at_s, getattr(process, name) * scale))
    for index, (process_name, line) in enumerate(points.items()):
        times, values = zip(*line, strict=True)
        axes.plot(times, values, label=process_name, color=_COLOURS[index % len(_COLOURS)])
    if points:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def _streams(evidence: Evidence) -> list[tuple[Any, ...]]:
    """Of each kind of actor: its name, its streams, and those of each of `_FATES`."""
    journal = evidence.journal
    fates: defaultdict[str, Counter[Fate]] = defaultdict(Counter)
    for outcome in journal.outcomes:
        fates[outcome.actor][fate_of(outcome, journal.outages)] += 1
    return [
        (name, counts.total(), *(counts[fate] for fate in _FATES))
        for name, counts in sorted(fates.items())
    ]


def _costs_table(evidence: Evidence) -> str:
    def ms(seconds: float | None) -> str:
        return "–" if seconds is None else f"{seconds * 1000:,.0f}"

    shown = table_of(
        evidence.costs(),
        {
            "adversity": lambda cost: cost.kind.value,
            "times": lambda cost: f"{cost.num_times:,}",
            "s": lambda cost: f"{cost.seconds:,.0f}",
            "streams": lambda cost: f"{cost.num_streams:,}",
            "with a fault": lambda cost: f"{cost.num_broken:,}",
            "/health p99 ms": lambda cost: ms(cost.health_p99_s),
            "gap p99.9 ms": lambda cost: ms(cost.gap_p999_s),
            "largest": lambda cost: ms(cost.largest_gap_s),
            "MB kept": lambda cost: f"{cost.memory_bytes / 1e6:,.1f}",
            "prober's lag p99 ms": lambda cost: ms(cost.lag_p99_s),
        },
    )
    return f"{shown}\n\n{_COST_NOTES}"


def _process_rows(evidence: Evidence, bounds: Bounds) -> list[list[str]]:
    before = {process.name: process for process in evidence.before.processes}
    rates = {slope.pid: slope for slope in slopes(evidence.samples, bounds.warmup_share)}
    rows = []
    for process in evidence.after.processes:
        first = before.get(process.name, process)
        rate = rates.get(process.pid)
        rows.append(
            [
                process.name,
                f"{first.rss_bytes / _MIB:,.1f} → {process.rss_bytes / _MIB:,.1f}",
                "–" if rate is None else f"{rate.kib_per_min:,.0f}",
                f"{first.num_fds} → {process.num_fds}",
                f"{first.num_sockets} → {process.num_sockets}",
            ]
        )
    return rows


def _verdict(found: Sequence[Finding]) -> str:
    if not found:
        return "Verdict: clean."
    lines = [f"- {each.what}: {each.count:,}×, {each.detail}" for each in found]
    return "\n".join(["Verdict: not clean.", "", *lines])
