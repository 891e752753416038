"""What each kind of adversity cost: how `/health` answered, streams' gaps, memory; and bars for it.

Pure, as the verdict is: no clock, no process, no socket.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.load.soak.journal import Adversity, Journal, Kind, Point, Probing
from penstock.load.soak.prober import PROBE_EVERY_S
from penstock.load.soak.watch import Sample

# A gateway that is frozen or gone cannot answer.
_ANSWERS = (Kind.LARGE_PROMPTS, Kind.UNDRAINED_LOG, Kind.SILENCE, Kind.PIPELINE,
            Kind.CONNECTIONS, Kind.TRAILERS)  # fmt: skip
_MEMORY_BACK_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of all applications of one kind.

    Attributes:
        num_streams: that met it.
        num_broken: those of them that had a fault, excused or not.
        health_p99_s: of `/health`; a probe that hangs counts for those that were due meanwhile.
        gap_p999_s, largest_gap_s: between two events of a stream that begin meanwhile.
        memory_bytes: of the process that kept most afterwards: more than before.
        lag_p99_s: of the prober itself.
    """

    kind: Kind
    num_times: int
    seconds: float
    num_streams: int
    num_broken: int
    health_p99_s: float | None
    gap_p999_s: float | None
    largest_gap_s: float | None
    memory_bytes: int
    lag_p99_s: float | None


def costs(
    kinds: Sequence[Kind], journal: Journal, probing: Probing | None, samples: Sequence[Sample]
) -> list[Cost]:
    """Of the kinds that were to be applied."""
    seen = probing or Probing()
    health, gaps, lags = sorted(_due(seen.health)), _sorted(seen.gaps), _sorted(seen.lags)
    found = []
    for kind in kinds:
        times = [each for each in journal.adversities if each.kind is kind]
        met = [
            outcome
            for outcome in journal.outcomes
            if any(outcome.began_s <= t.ended_s and outcome.ended_s >= t.began_s for t in times)
        ]
        gaps_s = _within(gaps, times)
        found.append(
            Cost(
                kind=kind,
                num_times=len(times),
                seconds=sum(each.ended_s - each.began_s for each in times),
                num_streams=len(met),
                num_broken=sum(bool(outcome.faults) for outcome in met),
                health_p99_s=_percentile(_within(health, times), 0.99),
                gap_p999_s=_percentile(gaps_s, 0.999),
                largest_gap_s=_percentile(gaps_s, 1),
                memory_bytes=max((_kept_bytes(each, samples) for each in times), default=0),
                lag_p99_s=_percentile(_within(lags, times), 0.99),
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """What an adversity may cost.

    Attributes:
        large_health_p99_s: while large prompts are posted.
        health_p99_s: during whatever else leaves the gateways alive.
        gap_ratio: largest gap beside large prompts, by that without.
        memory_bytes: kept afterwards.
    """

    large_health_p99_s: float = 0.1
    health_p99_s: float = 2.0
    gap_ratio: float = 2.0
    memory_bytes: int = 50_000_000


def objections(found: Sequence[Cost], bars: Bars) -> Iterator[tuple[str, str]]:
    """What cost too much, was not measured or did not happen; and the figures."""
    by_kind = {cost.kind: cost for cost in found}
    for cost in found:
        if not cost.num_times:
            yield f"{cost.kind} never happened", "a longer soak is needed"
            continue
        if cost.kind in _ANSWERS:
            is_large = cost.kind is Kind.LARGE_PROMPTS
            bar_s = bars.large_health_p99_s if is_large else bars.health_p99_s
            if cost.health_p99_s is None:
                yield f"/health during {cost.kind}", "nothing was measured"
            elif cost.health_p99_s > bar_s:
                detail = f"p99 {_ms(cost.health_p99_s)}, the bar is {_ms(bar_s)}"
                yield f"/health during {cost.kind}", detail
        if cost.kind is not Kind.CALM and cost.memory_bytes > bars.memory_bytes:
            detail = (
                f"{cost.memory_bytes / 1e6:,.0f} MB were kept, {bars.memory_bytes / 1e6:g} may be"
            )
            yield f"memory after {cost.kind}", detail
    if Kind.LARGE_PROMPTS in by_kind and by_kind[Kind.LARGE_PROMPTS].num_times:
        yield from _gap_objections(by_kind[Kind.LARGE_PROMPTS], by_kind[Kind.CALM], bars)


def _gap_objections(large: Cost, calm: Cost, bars: Bars) -> Iterator[tuple[str, str]]:
    what = f"largest gap of other streams during {large.kind}"
    if large.largest_gap_s is None or calm.largest_gap_s is None:
        yield what, "nothing was measured"
    elif large.largest_gap_s > bars.gap_ratio * calm.largest_gap_s:
        yield (
            what,
            f"{_ms(large.largest_gap_s)}, without them {_ms(calm.largest_gap_s)}; "
            f"the bar is {bars.gap_ratio:g} times that",
        )


def _due(probes: Iterable[Point]) -> Iterator[Point]:
    """Also the probes that were due while an answer was awaited, and would have waited with it."""
    for at_s, took_s in probes:
        for number in range(int(took_s / PROBE_EVERY_S) + 1):
            yield at_s + number * PROBE_EVERY_S, took_s - number * PROBE_EVERY_S


def _sorted(points: Iterable[Point]) -> list[Point]:
    return sorted((at_s, value) for at_s, value in points)


def _within(points: Sequence[Point], times: Sequence[Adversity]) -> list[float]:
    """In order."""
    values = []
    for each in times:
        first = bisect.bisect_left(points, (each.began_s, -math.inf))
        last = bisect.bisect_right(points, (each.ended_s, math.inf))
        values += [value for _, value in points[first:last]]
    return sorted(values)


def _percentile(ordered: Sequence[float], share: float) -> float | None:
    """The least value that so many do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else None


def _kept_bytes(adversity: Adversity, samples: Sequence[Sample]) -> int:
    """How much more a process holds afterwards, at its best, than before; of the worst process."""
    until_s = adversity.ended_s + _MEMORY_BACK_WITHIN_S
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    for sample in samples:
        for process in sample.processes:
            pid, size = process.pid, process.rss_bytes
            if sample.at_s <= adversity.began_s:
                before[pid] = size
            elif adversity.ended_s <= sample.at_s <= until_s:
                after[pid] = min(after.get(pid, size), size)
    return max((after[pid] - before[pid] for pid in before.keys() & after.keys()), default=0)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
