"""Requests as they come to a server, for engines that run in this process.

Random tokens of ShareGPT-like lengths; none ends before its length.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.load.kv.trace import TraceSpec, make_trace


@dataclass(frozen=True, slots=True)
class Job:
    """One request.

    Attributes:
        index: by its arrival, from 0.
    """

    index: int
    prompt: tuple[int, ...]
    num_output_tokens: int


def make_jobs(spec: TraceSpec, *, vocab_size: int, seed: int) -> list[Job]:
    """The jobs of a trace. Seeds differ in tokens, not in lengths."""
    rng, tokens = random.Random(seed), range(vocab_size)
    return [
        Job(
            index,
            prompt=tuple(rng.choices(tokens, k=request.num_prompt_tokens)),
            num_output_tokens=request.num_output_tokens,
        )
        for index, request in enumerate(make_trace(spec))
    ]


def by_prompt(jobs: Sequence[Job]) -> list[Job]:
    """Prompts of like lengths together: what a caller can do, since it knows them."""
    return sorted(jobs, key=lambda job: len(job.prompt))


def by_output(jobs: Sequence[Job]) -> list[Job]:
    """Outputs of like lengths together: a batch ends at once, but no caller knows them."""
    return sorted(jobs, key=lambda job: job.num_output_tokens)


def batches(jobs: Sequence[Job], size: int) -> Iterator[list[Job]]:
    """Static batches of neighbours, in random order: the first ones stand for all."""
    starts = list(range(0, len(jobs), size))
    random.Random(0).shuffle(starts)
    for start in starts:
        yield list(jobs[start : start + size])
