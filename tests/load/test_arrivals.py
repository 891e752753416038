"""When dialogues start: the distribution of arrivals, and what is refused."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, stdev

import numpy as np
import pytest

from penstock.engine.errors import ConfigError
from penstock.load.workloads.driver import ClosedLoop, OpenLoop, gamma_offsets, ramp_offsets

NUM = 20_000


def gaps_of(offsets_s: tuple[float, ...]) -> list[float]:
    return [later - earlier for earlier, later in pairwise((0.0, *offsets_s))]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_are_gamma_distributed(burstiness: float) -> None:
    gaps_s = gaps_of(gamma_offsets(NUM, rate=8.0, burstiness=burstiness))
    mean_s = fmean(gaps_s)
    assert mean_s == pytest.approx(1 / 8)
    # A gamma distribution's coefficient of variation is 1 ÷ √shape, its skewness 2 ÷ √shape.
    assert stdev(gaps_s) / mean_s == pytest.approx(burstiness**-0.5, rel=0.05)
    skewness = fmean((gap - mean_s) ** 3 for gap in gaps_s) / stdev(gaps_s) ** 3
    assert skewness == pytest.approx(2 * burstiness**-0.5, rel=0.2)


def test_a_poisson_process_counts_like_one() -> None:
    counts, _ = np.histogram(gamma_offsets(NUM, rate=10.0), bins=np.arange(0, NUM / 10 + 1))
    # The variance of a Poisson count is its mean.
    assert counts.mean() == pytest.approx(10, rel=0.01)
    assert counts.var() == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_the_last_arrival_is_where_the_rate_says(seed: int) -> None:
    offsets_s = gamma_offsets(50, rate=2.5, burstiness=0.3, seed=seed)
    assert offsets_s[-1] == pytest.approx(20.0)
    assert list(offsets_s) == sorted(offsets_s)


def test_an_infinite_rate_is_all_at_once() -> None:
    assert gamma_offsets(4, rate=math.inf) == (0.0, 0.0, 0.0, 0.0)


def test_infinite_burstiness_is_even() -> None:
    assert gamma_offsets(4, rate=2.0, burstiness=math.inf) == pytest.approx((0.5, 1.0, 1.5, 2.0))


def test_a_ramp_goes_from_rate_to_rate() -> None:
    gaps_s = gaps_of(ramp_offsets(NUM, first_rate=2.0, last_rate=20.0))
    tenth = NUM // 10
    for place in range(10):
        rate = 2.0 + 18.0 * (place + 0.5) / 10
        mean_gap_s = fmean(gaps_s[place * tenth : (place + 1) * tenth])
        assert mean_gap_s == pytest.approx(1 / rate, rel=0.1)


def test_a_ramp_down_is_one_too() -> None:
    offsets_s = ramp_offsets(3, first_rate=4.0, last_rate=2.0, burstiness=math.inf)
    assert gaps_of(offsets_s) == pytest.approx([1 / 4, 1 / 3, 1 / 2])


def test_the_seed_says_all() -> None:
    assert gamma_offsets(10, rate=1.0, seed=3) == gamma_offsets(10, rate=1.0, seed=3)
    assert gamma_offsets(10, rate=1.0, seed=3) != gamma_offsets(10, rate=1.0, seed=4)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan])
def test_a_rate_must_be_positive(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        gamma_offsets(3, rate=rate)
    with pytest.raises(ConfigError, match="rate"):
        ramp_offsets(3, first_rate=1.0, last_rate=rate)


def test_burstiness_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="--burstiness"):
        gamma_offsets(3, rate=1.0, burstiness=0.0)


def test_a_cap_holds_at_least_one() -> None:
    with pytest.raises(ConfigError, match="--max-concurrency"):
        ClosedLoop(0)
    with pytest.raises(ConfigError, match="--max-concurrency"):
        OpenLoop((0.0,), max_concurrency=0)
