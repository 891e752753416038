"""Judges what was seen in a soak: findings, or none. Pure: no clock, no process, no socket.

SOAK.md says what must hold, and which effects of a kill are excused.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from penstock.engine.preparation.resources import MAX_GRAMMAR_BYTES
from penstock.load.client.records import Fault
from penstock.load.soak.journal import Adversity, Journal, Kind, Outcome, Point, Probing
from penstock.load.soak.prober import PROBE_EVERY_S
from penstock.load.soak.watch import IDLE_METRICS, Sample

_MB = 1_000_000
_MEMORY_BACK_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one kind of adversity may cost."""

    health_p99_s: float = 2.0
    kept_bytes: float = 50 * _MB  # of memory, afterwards
    # Compared with 250 KB of plain text as often: the p99 of gaps, and events a second.
    is_compared: bool = False


GAP_RATIO, THROUGHPUT_RATIO = 2.0, 0.8
# Grammars that an engine keeps, and the usual beside them. After 260 of 25 to 38 MiB it had 155 MB
# more, of which 134 MB are the bound.
_COMPILED = Limits(kept_bytes=MAX_GRAMMAR_BYTES + 50 * _MB, is_compared=True)
_SILENT = Limits(health_p99_s=math.inf)  # a gateway that is frozen or gone cannot answer
LIMITS: Mapping[Kind, Limits] = {
    **{kind: Limits() for kind in Kind},
    Kind.CALM: Limits(health_p99_s=math.inf, kept_bytes=math.inf),
    **dict.fromkeys((Kind.KILL, *Kind.freezes()), _SILENT),
    Kind.LARGE_PROMPTS: Limits(health_p99_s=0.1),
    **dict.fromkeys((Kind.TOOL_SCHEMAS, Kind.RESPONSE_FORMATS, Kind.DEEP_SCHEMAS), _COMPILED),
    Kind.GRAMMARS: replace(_COMPILED, is_compared=False),
    **dict.fromkeys((Kind.TINY_MESSAGES, Kind.IMAGE_HOST), Limits(is_compared=True)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of all applications of one kind.

    A `/health` probe that hangs also counts for the probes due meanwhile. Gaps are between two
    events of a stream, and begin meanwhile.
    """

    kind: Kind
    num_times: int
    seconds: float
    num_streams: int  # that met it
    num_broken: int  # those of them that had a fault, excused or not
    health_p99_s: float | None
    gap_p99_s: float | None
    gap_p999_s: float | None
    largest_gap_s: float | None
    events_per_s: float  # of the steady streams
    memory_bytes: int  # growth of the process that kept most afterwards
    peak_bytes: int  # growth of the process that grew most, at its largest meanwhile
    lag_p99_s: float | None  # of the prober itself


def costs(evidence: Evidence) -> list[Cost]:
    """The costs of the kinds that were to be applied."""
    journal, seen = evidence.journal, evidence.probing or Probing()
    samples = [*evidence.samples, evidence.after]
    health, gaps, lags = map(sorted, (_due(seen.health), seen.gaps, seen.lags))
    begins_s, lengths_s = np.array(gaps, np.float64).reshape(-1, 2).T
    found = []
    for kind in evidence.kinds:
        times = journal.of(kind)
        met = [
            outcome
            for outcome in journal.outcomes
            if any(outcome.began_s <= t.ended_s and outcome.ended_s >= t.began_s for t in times)
        ]
        # Any part of a gap counts: a freeze's began with the event before it.
        is_met = [(begins_s <= t.ended_s) & (begins_s + lengths_s > t.began_s) for t in times]
        gaps_s = [float(gap_s) for each in is_met for gap_s in lengths_s[each]]
        seconds = sum(each.ended_s - each.began_s for each in times)
        found.append(
            Cost(
                kind=kind,
                num_times=len(times),
                seconds=seconds,
                num_streams=len(met),
                num_broken=sum(bool(outcome.faults) for outcome in met),
                health_p99_s=_percentile(_within(health, times), 0.99),
                gap_p99_s=_percentile(gaps_s, 0.99),
                gap_p999_s=_percentile(gaps_s, 0.999),
                largest_gap_s=_percentile(gaps_s, 1),
                events_per_s=len(_within(gaps, times)) / seconds if seconds else 0.0,
                memory_bytes=max((_grown_bytes(each, samples, min) for each in times), default=0),
                peak_bytes=max((_grown_bytes(each, samples, max) for each in times), default=0),
                lag_p99_s=_percentile(_within(lags, times), 0.99),
            )
        )
    return found


def _cost_findings(found: Sequence[Cost]) -> Iterator[Finding]:
    """What cost too much, was not measured or did not happen; with the figures."""
    by_kind = {cost.kind: cost for cost in found}
    plain, calm = by_kind.get(Kind.PLAIN_TEXT), by_kind.get(Kind.CALM)
    for cost in found:
        kind, limits = cost.kind, LIMITS[cost.kind]
        if not cost.num_times:
            yield Finding(f"{kind} never happened", "a longer soak is needed")
            continue
        if limits.health_p99_s < math.inf:
            detail = f"p99 {_ms(cost.health_p99_s)}, the bar is {_ms(limits.health_p99_s)}"
            yield from _above(
                f"/health during {kind}", cost.health_p99_s, limits.health_p99_s, detail
            )
        if cost.memory_bytes > limits.kept_bytes:
            detail = f"{cost.memory_bytes / _MB:,.0f} MB were kept, {limits.kept_bytes / _MB:g} may"
            yield Finding(f"memory after {kind}", detail)
        if limits.is_compared and plain is not None:
            what = f"other streams during {kind}"
            yield from _gaps(what, "p99 of their gaps", cost.gap_p99_s, plain.gap_p99_s)
            bar = THROUGHPUT_RATIO * plain.events_per_s
            if cost.gap_p99_s is not None and cost.events_per_s < bar:
                detail = f"{cost.events_per_s:,.0f} events a second, the bar is {bar:,.0f}"
                yield Finding(what, detail)
        if kind is Kind.LARGE_PROMPTS and calm is not None:
            what = f"largest gap of other streams during {kind}"
            yield from _gaps(what, "it is", cost.largest_gap_s, calm.largest_gap_s)


def _gaps(what: str, name: str, seen_s: float | None, without_s: float | None) -> Iterator[Finding]:
    """A gap that is more than twice what it is without."""
    bar_s = None if without_s is None else GAP_RATIO * without_s
    detail = f"{name} {_ms(seen_s)}, without {_ms(without_s)}; the bar is {GAP_RATIO:g} times that"
    yield from _above(what, seen_s, bar_s, detail)


def _above(what: str, seen: float | None, bar: float | None, detail: str) -> Iterator[Finding]:
    if seen is None or bar is None:
        yield Finding(what, "nothing was measured")
    elif seen > bar:
        yield Finding(what, detail)


def _due(probes: Iterable[Point]) -> Iterator[Point]:
    """The probes, and those due while an answer was awaited: they would have waited with it."""
    for at_s, took_s in probes:
        for number in range(int(took_s / PROBE_EVERY_S) + 1):
            yield at_s + number * PROBE_EVERY_S, took_s - number * PROBE_EVERY_S


def _within(points: Sequence[Point], times: Sequence[Adversity]) -> list[float]:
    """The values at these times."""
    values = []
    for each in times:
        first = bisect.bisect_left(points, (each.began_s, -math.inf))
        last = bisect.bisect_right(points, (each.ended_s, math.inf))
        values += [value for _, value in points[first:last]]
    return values


def _percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that this share does not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else None


def _grown_bytes(
    adversity: Adversity, samples: Sequence[Sample], pick: Callable[[int, int], int]
) -> int:
    """How much more memory the worst process holds than before: afterwards at its best (`min`), or
    from the beginning on at its worst (`max`)."""
    until_s = adversity.ended_s + _MEMORY_BACK_WITHIN_S
    from_s = adversity.ended_s if pick is min else adversity.began_s
    before: dict[tuple[str, int], int] = {}  # a template that became the engine is another process
    after: dict[tuple[str, int], int] = {}
    for sample in samples:
        for process in sample.processes:
            key, size = (process.name, process.pid), process.rss_bytes
            if sample.at_s <= adversity.began_s:
                before[key] = size
            if from_s <= sample.at_s <= until_s:
                after[key] = pick(after.get(key, size), size)
    return max((after[key] - before[key] for key in before.keys() & after.keys()), default=0)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1000:,.0f} ms"


# -- the verdict --------------------------------------------------------------------------------

# The effect of a killed gateway on a stream that is not resumed.
_BROKEN = frozenset({Fault.CUT, Fault.FAILED, Fault.REFUSED, Fault.UNREACHABLE})
_TURNED_AWAY = frozenset({Fault.REFUSED})
_WITHOUT_REDIS = frozenset({Fault.REFUSED, Fault.FAILED})
_KILL_MARGIN_S = 1.0  # clients and server notice late
_MIN_FIT_SAMPLES = 5
_KIB = 1 << 10
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of a clean soak. Growth up to `memory_floor_mib` is never a leak: an allocator
    takes memory in steps, which a short soak sees as a slope."""

    memory_kib_per_min: float = 512.0  # steady growth of one process, see `Slope`
    memory_floor_mib: float = 4.0
    min_slope_s: float = 40.0  # a slope over less is that of a start
    warmup_share: float = 0.3  # of a soak, from the start of each process: caches and stores fill
    spare_descriptors: int = 2  # growth that is no leak


class Fate(StrEnum):
    """How a stream ended."""

    CLEAN = "clean"
    CARRIED = "carried over"
    TURNED_AWAY = "turned away meanwhile"
    BROKEN = "broken by a kill"
    FAULTY = "faulty"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything seen; `before` and `after` are idle, with no client connected."""

    before: Sample
    samples: Sequence[Sample]  # of the traffic between
    after: Sample
    journal: Journal
    kinds: Sequence[Kind] = ()  # adversities that were to be applied; `probing` says what they cost
    probing: Probing | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong."""

    what: str
    detail: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """A process's memory after its warm-up.

    `kib_per_min` is of a straight line through the calmer of its halves, since an allocator
    takes some MiB at once now and then, but a leak goes on. `growth_mib` is from the first fifth
    to the last: the line overstates growth where samples are missing, as when the machine stood
    still.
    """

    name: str
    pid: int
    kib_per_min: float
    growth_mib: float
    duration_s: float


def findings(evidence: Evidence, bounds: Bounds) -> list[Finding]:
    """What is wrong, streams first; empty if the verdict is clean."""
    return [
        *_stream_findings(evidence.journal, began_s=evidence.before.at_s),
        *_problem_findings(evidence.journal),
        *_memory_findings(evidence.samples, bounds),
        *_idle_findings(evidence, bounds),
        *_process_findings(evidence),
        *_cost_findings(costs(evidence)),
    ]


def is_settled(before: Sample, sample: Sample, bounds: Bounds) -> bool:
    """Whether everything is as before."""
    is_told = bool(sample.metrics) or not before.metrics
    return is_told and sample.is_idle and not list(_held_findings(before, sample, bounds))


def fate_of(outcome: Outcome, outages: Sequence[Adversity]) -> Fate:
    """How a stream ended, and whether kills and freezes explain it."""
    met = [each for each in outages if _meets(each, outcome.began_s, outcome.ended_s)]
    faults = set(outcome.faults)
    if not faults:
        is_carried = any(outcome.began_s < each.began_s < outcome.ended_s for each in met)
        return Fate.CARRIED if is_carried else Fate.CLEAN
    if any(each.victim == "redis" for each in met) and faults <= _WITHOUT_REDIS:
        return Fate.TURNED_AWAY
    if not met or outcome.survives_kills:
        return Fate.FAULTY
    if faults <= _TURNED_AWAY:
        return Fate.TURNED_AWAY
    lost_its_gateway = any(each.kind is Kind.KILL and each.victim != "engine" for each in met)
    return Fate.BROKEN if lost_its_gateway and faults <= _BROKEN else Fate.FAULTY


def slopes(samples: Sequence[Sample], warmup_share: float) -> list[Slope]:
    """The slope of every process that outlived its warm-up."""
    if not samples:
        return []
    warmup_s = warmup_share * (samples[-1].at_s - samples[0].at_s)
    by_process: defaultdict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    for sample in samples:
        for process in sample.processes:
            by_process[process.name, process.pid].append((sample.at_s, process.rss_bytes))
    found = []
    for (name, pid), life in by_process.items():
        points = [point for point in life if point[0] >= life[0][0] + warmup_s]
        if len(points) >= _MIN_FIT_SAMPLES:
            times, sizes = zip(*points, strict=True)
            middle, fifth = len(points) // 2, max(1, len(points) // 5)
            halves = (np.array(half).T for half in (points[:middle], points[middle:]))
            bytes_per_s = min(
                float(np.polyfit(at_s - at_s[0], size, 1)[0]) for at_s, size in halves
            )
            growth = statistics.median(sizes[-fifth:]) - statistics.median(sizes[:fifth])
            found.append(
                Slope(
                    name=name,
                    pid=pid,
                    kib_per_min=bytes_per_s * 60 / _KIB,
                    growth_mib=growth / _MIB,
                    duration_s=times[-1] - times[0],
                )
            )
    return found


def _stream_findings(journal: Journal, *, began_s: float) -> Iterator[Finding]:
    bad: defaultdict[str, list[str]] = defaultdict(list)
    for outcome in journal.outcomes:
        if fate_of(outcome, journal.outages) is Fate.FAULTY:
            for fault in outcome.faults:
                when = f"{outcome.began_s - began_s:.0f} s to {outcome.ended_s - began_s:.0f} s"
                bad[f"{fault} ({outcome.actor})"].append(f"{when}: {outcome.detail}")
    for what, details in bad.items():
        yield Finding(what, "; ".join(details[:3]), len(details))


def _problem_findings(journal: Journal) -> Iterator[Finding]:
    bad: defaultdict[str, list[str]] = defaultdict(list)
    for problem in journal.problems:
        if not any(_meets(each, problem.at_s, problem.at_s) for each in journal.outages):
            bad[problem.actor].append(problem.detail)
    for actor, details in bad.items():
        yield Finding(actor, details[0], len(details))


def _memory_findings(samples: Sequence[Sample], bounds: Bounds) -> Iterator[Finding]:
    bound, floor = bounds.memory_kib_per_min, bounds.memory_floor_mib
    for slope in slopes(samples, bounds.warmup_share):
        is_judged = slope.duration_s >= bounds.min_slope_s
        if is_judged and slope.kib_per_min > bound and slope.growth_mib > floor:
            detail = (
                f"grows by {slope.kib_per_min:,.0f} KiB/min, by {slope.growth_mib:.1f} MiB in "
                f"{slope.duration_s:.0f} s; the bound is {bound:,.0f}"
            )
            yield Finding(f"memory of {slope.name}", detail)


def _idle_findings(evidence: Evidence, bounds: Bounds) -> Iterator[Finding]:
    if evidence.before.metrics and not evidence.after.metrics:
        yield Finding("/metrics", "not answered any more")
    for name in IDLE_METRICS:
        value = evidence.after.metrics.get(name, 0.0)
        if value:
            detail = f"{value:g} with no client connected"
            yield Finding(f"{name} when idle", detail)
    yield from _held_findings(evidence.before, evidence.after, bounds)


def _held_findings(before: Sample, after: Sample, bounds: Bounds) -> Iterator[Finding]:
    by_name = {process.name: process for process in before.processes}
    for process in after.processes:
        first = by_name.get(process.name, process)
        for what, num_before, num_after in (
            ("descriptors", first.num_fds, process.num_fds),
            ("sockets", first.num_sockets, process.num_sockets),
        ):
            if num_after > num_before + bounds.spare_descriptors:
                detail = f"{num_before} before, {num_after} after, with no client connected"
                yield Finding(f"{what} of {process.name}", detail, num_after - num_before)


def _process_findings(evidence: Evidence) -> Iterator[Finding]:
    """All must be alive, but for a template, and the same ones unless there were kills."""
    after = {process.name: process.pid for process in evidence.after.processes}
    for process in evidence.before.processes:
        if process.name not in after and process.name != "template":
            yield Finding(f"process {process.name}", "it is gone")
        elif after.get(process.name) != process.pid and not evidence.journal.of(Kind.KILL):
            yield Finding(f"process {process.name}", "it is another one now")


def _meets(outage: Adversity, began_s: float, ended_s: float) -> bool:
    return began_s <= outage.ended_s + _KILL_MARGIN_S and ended_s >= outage.began_s
