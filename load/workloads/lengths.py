"""Request lengths as servers see them: lognormal, from a seed.

The default means are those of ShareGPT conversations, as in PagedAttention (Kwon et al., SOSP
2023), section 6.1.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from penstock.engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec:
    """A workload. Means are in tokens, before both lengths are clipped to `shortest` and
    `longest`."""

    num_requests: int = 2000
    seed: int = 0
    prompt_mean: float = 161.0
    output_mean: float = 338.0
    sigma: float = 1.0  # of the logarithm of either length
    shortest: int = 4
    longest: int = 1024
    rate: float | None = None  # requests that arrive per step (Poisson); None: all at once

    def __post_init__(self) -> None:
        _check(self.num_requests >= 1, "--requests must be at least 1")
        _check(self.prompt_mean > 0, "--prompt-mean must be positive")
        _check(self.output_mean > 0, "--output-mean must be positive")
        _check(self.sigma >= 0, "--sigma must not be negative")
        _check(self.rate is None or self.rate > 0, "--rate must be positive")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace."""

    num_prompt_tokens: int
    num_output_tokens: int  # where it ends by itself; no allocator knows it beforehand
    arrival: float = 0.0  # in steps

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


def make_trace(spec: TraceSpec) -> tuple[TracedRequest, ...]:
    """The requests of a workload in order of arrival; the same for the same spec."""
    lengths, arrivals = random.Random(spec.seed), random.Random(f"arrivals {spec.seed}")
    trace, arrival = [], 0.0
    for _ in range(spec.num_requests):
        if spec.rate is not None:
            arrival += arrivals.expovariate(spec.rate)
        prompt = _draw(lengths, spec.prompt_mean, spec)
        output = _draw(lengths, spec.output_mean, spec)
        trace.append(TracedRequest(prompt, output, arrival))
    return tuple(trace)


def cut_outputs(trace: tuple[TracedRequest, ...], max_tokens: int) -> tuple[TracedRequest, ...]:
    """The same requests with outputs of at most `max_tokens`."""
    return tuple(
        replace(request, num_output_tokens=min(request.num_output_tokens, max_tokens))
        for request in trace
    )


def _draw(rng: random.Random, mean: float, spec: TraceSpec) -> int:
    # A lognormal's mean is exp(μ + σ²/2).
    mu = math.log(mean) - spec.sigma**2 / 2
    length = round(rng.lognormvariate(mu, spec.sigma))
    return min(max(length, spec.shortest), spec.longest)


def _check(is_valid: bool, rule: str) -> None:
    if not is_valid:
        raise ConfigError(rule)
