"""When dialogues start: as fast as earlier ones end, or at times drawn beforehand.

`--request-rate`, `--burstiness` and a linear ramp mean what they mean in `vllm bench serve`. Knows
no dialogue and no clock: offsets are seconds from the start of a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from penstock.engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many dialogues in flight; the next starts when one ends.

    A slow server is then asked less: queueing does not show as it would to independent users.
    """

    max_concurrency: int

    def __post_init__(self) -> None:
        _check(self.max_concurrency >= 1, "--max-concurrency must be at least 1")


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Each dialogue starts at its time, whatever became of the others.

    Attributes:
        offsets_s: one for each dialogue, ascending.
        max_concurrency: so many dialogues in flight at most. One that must wait for that still
            counts its latency from its offset, where `vllm bench serve` forgets the wait.
    """

    offsets_s: tuple[float, ...]
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        _check(
            self.max_concurrency is None or self.max_concurrency >= 1,
            "--max-concurrency must be at least 1",
        )


Arrivals: TypeAlias = ClosedLoop | OpenLoop


def gamma_offsets(
    num: int, *, rate: float, burstiness: float = 1.0, seed: int = 0
) -> tuple[float, ...]:
    """Arrivals at a constant rate, the gaps gamma-distributed around 1 ÷ rate.

    The gaps are scaled so that the last arrival comes at num ÷ rate exactly: runs of different
    seeds then offer the same load.

    Args:
        rate: per second; infinite: all at once.
        burstiness: the gamma distribution's shape. 1 is a Poisson process, less comes in bursts,
            more is more even; infinite: equal gaps.

    Raises:
        ConfigError: a rate or burstiness that is not positive.
    """
    gaps_s = _gaps(np.full(num, float(rate)), burstiness, seed)
    total_s = gaps_s.sum()
    if total_s > 0:
        gaps_s *= num / rate / total_s
    return tuple(np.cumsum(gaps_s).tolist())


def ramp_offsets(
    num: int, *, first_rate: float, last_rate: float, burstiness: float = 1.0, seed: int = 0
) -> tuple[float, ...]:
    """Arrivals whose rate goes linearly, by request, from the first to the last; not scaled.

    Raises:
        ConfigError: a rate or burstiness that is not positive.
    """
    return tuple(
        np.cumsum(_gaps(np.linspace(first_rate, last_rate, num), burstiness, seed)).tolist()
    )


def _gaps(rates: np.ndarray, burstiness: float, seed: int) -> np.ndarray:
    """A gap before each arrival, in seconds: gamma with mean 1 ÷ rate."""  # [num], [num]
    _check(bool((rates > 0).all()), "a request rate must be positive")
    _check(burstiness > 0, "--burstiness must be positive")
    if math.isinf(burstiness):
        return 1.0 / rates
    return np.random.default_rng(seed).gamma(burstiness, 1.0 / (rates * burstiness))


def _check(is_valid: bool, rule: str) -> None:
    if not is_valid:
        raise ConfigError(rule)
