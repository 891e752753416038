"""From single measurements to what the report says: the setting that counts, medians, ratios.

A pair is ours and a rival's, one after the other in the same round. Machines drift, so a ratio is
made of each pair, and only then is the median taken. Knows no process and no file.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OURS = "penstock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One workload, once, by one system as it was started.

    Attributes:
        setting: by name; `flags` says all of it.
        round: from 0.
        pair: the rival of the pair; a rival's own name for itself.
        turn_ttft_ms: median of each turn, in conversations.
        cpu_s_per_1k_tokens: of output, by process.
        faults: requests by kind of fault; an observation with any counts for nothing.
    """

    model: str
    workload: str
    system: str
    setting: str
    flags: str
    round: int
    pair: str
    output_tokens_per_s: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    itl_ms_p50: float
    itl_ms_p99: float
    turn_ttft_ms: tuple[float, ...] = ()
    cpu_s_per_1k_tokens: Mapping[str, float] = field(default_factory=dict)
    ready_s: float = 0.0
    idle_memory_bytes: int = 0
    num_cached_tokens: int = 0
    client_cpu_share: float = 0.0
    faults: Mapping[str, int] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        return not self.faults and self.output_tokens_per_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one system did with one workload, with the best of its settings.

    Attributes:
        best: the observations of that setting.
        ratios: of each pair, the rival's tokens per second by ours; none for ours.
    """

    model: str
    workload: str
    system: str
    best: Sequence[Observation]
    ratios: Sequence[float]

    def median(self, figure: Callable[[Observation], float]) -> float:
        return statistics.median(map(figure, self.best))

    @property
    def tokens_per_s(self) -> float:
        return self.median(lambda each: each.output_tokens_per_s)

    @property
    def ratio(self) -> float | None:
        """To ours; None where no pair is whole."""
        if self.system == OURS:
            return 1.0
        return statistics.median(self.ratios) if self.ratios else None

    def turn_ttft_ms(self) -> list[float]:
        """Median of each turn."""
        turns = zip(*(each.turn_ttft_ms for each in self.best), strict=True)
        return [statistics.median(turn) for turn in turns]

    def cpu_s_per_1k_tokens(self) -> dict[str, float]:
        names = sorted({name for each in self.best for name in each.cpu_s_per_1k_tokens})
        return {
            name: statistics.median(each.cpu_s_per_1k_tokens.get(name, 0.0) for each in self.best)
            for name in names
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "workload": self.workload,
            "system": self.system,
            "settings": self.best[0].flags,
            "output_tokens_per_s": self.tokens_per_s,
            "ttft_ms_p50": self.median(lambda each: each.ttft_ms_p50),
            "ttft_ms_p99": self.median(lambda each: each.ttft_ms_p99),
            "itl_ms_p50": self.median(lambda each: each.itl_ms_p50),
            "itl_ms_p99": self.median(lambda each: each.itl_ms_p99),
            "repeats": len(self.best),
            "ratio_to_penstock": self.ratio,
            "ratio_min": min(self.ratios, default=self.ratio),
            "ratio_max": max(self.ratios, default=self.ratio),
            "turn_ttft_ms": self.turn_ttft_ms(),
            "cpu_s_per_1k_tokens": self.cpu_s_per_1k_tokens(),
            "ready_s": self.median(lambda each: each.ready_s),
            "idle_memory_bytes": self.median(lambda each: each.idle_memory_bytes),
            "client_cpu_share": self.median(lambda each: each.client_cpu_share),
        }


def chosen_setting(observations: Iterable[Observation], key: tuple[str, str, str]) -> str | None:
    """The setting that was fastest when each was first measured; it stays so for the run.

    Args:
        key: model, workload, system.
    """
    first: dict[str, float] = {}
    for each in observations:
        if _key(each) == key and each.counts:
            first.setdefault(each.setting, each.output_tokens_per_s)
    return max(first, key=first.__getitem__, default=None)


def cells(observations: Sequence[Observation]) -> list[Cell]:
    """In the order of the observations, ours before rivals."""
    keys = dict.fromkeys(_key(each) for each in observations)
    return [
        cell
        for key in sorted(keys, key=lambda key: key[2] != OURS)  # stable
        if (cell := _cell(observations, key)) is not None
    ]


def _cell(observations: Sequence[Observation], key: tuple[str, str, str]) -> Cell | None:
    best = _best(observations, key)
    if not best:
        return None
    model, workload, system = key
    ours = {
        each.round: each.output_tokens_per_s
        for each in _best(observations, (model, workload, OURS))
        if each.pair == system
    }
    ratios = [each.output_tokens_per_s / ours[each.round] for each in best if each.round in ours]
    return Cell(model=model, workload=workload, system=system, best=best, ratios=ratios)


def _best(observations: Sequence[Observation], key: tuple[str, str, str]) -> list[Observation]:
    setting = chosen_setting(observations, key)
    return [
        each
        for each in observations
        if _key(each) == key and each.setting == setting and each.counts
    ]


def _key(observation: Observation) -> tuple[str, str, str]:
    return observation.model, observation.workload, observation.system
