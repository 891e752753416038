"""The lengths of a trace: their distribution, and that a seed says all."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist, fmean, stdev

import pytest

from penstock.engine.errors import ConfigError
from penstock.load.workloads.lengths import TraceSpec, cut_outputs, make_trace


def clipped_mean(mean: float, spec: TraceSpec) -> float:
    """The mean of a lognormal clipped to [shortest, longest], in closed form."""
    low, high, sigma = spec.shortest, spec.longest, spec.sigma
    mu = math.log(mean) - sigma**2 / 2
    cdf = NormalDist().cdf
    a, b = (math.log(low) - mu) / sigma, (math.log(high) - mu) / sigma
    return low * cdf(a) + mean * (cdf(b - sigma) - cdf(a - sigma)) + high * (1 - cdf(b))


@pytest.mark.parametrize(("prompt", "output"), [(161.0, 338.0), (19.0, 58.0)])
def test_lengths_are_lognormal_and_clipped(prompt: float, output: float) -> None:
    spec = TraceSpec(num_requests=20_000, prompt_mean=prompt, output_mean=output)
    trace = make_trace(spec)
    for lengths, mean in (
        ([request.num_prompt_tokens for request in trace], prompt),
        ([request.num_output_tokens for request in trace], output),
    ):
        error = stdev(lengths) / math.sqrt(len(lengths))
        assert abs(fmean(lengths) - clipped_mean(mean, spec)) < 4 * error
        assert min(lengths) == spec.shortest or mean > 300
        assert max(lengths) == spec.longest or mean < 60
        assert all(spec.shortest <= length <= spec.longest for length in lengths)


def test_the_seed_says_all() -> None:
    spec = TraceSpec(num_requests=100)
    assert make_trace(spec) == make_trace(spec)
    assert make_trace(spec) != make_trace(replace(spec, seed=1))
    assert make_trace(spec) == make_trace(replace(spec, num_requests=200))[:100]


def test_a_rate_spreads_the_same_requests_over_time() -> None:
    spec = TraceSpec(num_requests=4000)
    spread = make_trace(replace(spec, rate=0.25))
    assert [request.num_tokens for request in spread] == [
        request.num_tokens for request in make_trace(spec)
    ]
    arrivals = [request.arrival for request in spread]
    assert arrivals == sorted(arrivals)
    # The last of n arrivals at rate r comes at n ÷ r, with a standard deviation of √n ÷ r.
    assert abs(arrivals[-1] - 16_000) < 4 * math.sqrt(4000) / 0.25
    assert {request.arrival for request in make_trace(spec)} == {0.0}


def test_a_declared_maximum_cuts_outputs_alone() -> None:
    trace = make_trace(TraceSpec(num_requests=300))
    for before, after in zip(trace, cut_outputs(trace, 200), strict=True):
        assert after.num_output_tokens == min(before.num_output_tokens, 200)
        assert after.num_prompt_tokens == before.num_prompt_tokens


@pytest.mark.parametrize(
    "fault",
    [{"num_requests": 0}, {"prompt_mean": 0.0}, {"output_mean": -1.0}, {"sigma": -1.0},
     {"rate": 0.0}, {"sigma": math.nan}],
)  # fmt: skip
def test_what_is_no_workload(fault: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        TraceSpec(**fault)  # type: ignore[arg-type]
