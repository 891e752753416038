"""What a soak showed, for people and for programs: tables, JSON, a picture over time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.load.plotting import BLUE, GREEN, GREY, ORANGE, SKY, new_figure
from penstock.load.soak.verdict import Bounds, Evidence, Fate, Finding, fate_of, slopes
from penstock.load.tables import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = (BLUE, ORANGE, GREEN, SKY)
_MIB = 1 << 20
_FATES = (Fate.FAULTY, Fate.CARRIED, Fate.TURNED_AWAY, Fate.BROKEN)
_COST_COLUMNS = ("adversity", "times", "s", "streams", "with a fault", "/health p99 ms",
                 "gap p99.9 ms", "largest", "MB kept", "prober's lag p99 ms")  # fmt: skip
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


def draw_soak(evidence: Evidence, found: Sequence[Finding], *, title: str, path: Path) -> None:
    """Memory, descriptors and streams over time.

    Raises:
        ConfigError: matplotlib is not installed.
    """
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

    rows = [
        [
            cost.kind.value,
            f"{cost.num_times:,}",
            f"{cost.seconds:,.0f}",
            f"{cost.num_streams:,}",
            f"{cost.num_broken:,}",
            ms(cost.health_p99_s),
            ms(cost.gap_p999_s),
            ms(cost.largest_gap_s),
            f"{cost.memory_bytes / 1e6:,.1f}",
            ms(cost.lag_p99_s),
        ]
        for cost in evidence.costs()
    ]
    return table(_COST_COLUMNS, rows) + "\n\n" + _COST_NOTES


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
