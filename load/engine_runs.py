"""Runs requests through an engine core in this process, step by step.

All requests are submitted at once. The steps fall into three phases; only the first two say
something about the engine's speed:

    prefill    until every sequence has its first token
    decode     every sequence gets a token in each step
    tail       the first sequences have ended
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.engine.engine_core import EngineCore
from penstock.engine.request import Request, SamplingParams

Phase = Literal["prefill", "decode", "tail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration."""

    phase: Phase
    step_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All steps of one workload."""

    num_prompt_tokens: int
    steps: Sequence[Step]
    tokens: Sequence[Sequence[int]]  # the output of each request

    def phase(self, phase: Phase) -> list[Step]:
        return [step for step in self.steps if step.phase == phase]

    @property
    def output_tokens_per_s(self) -> float:
        return _rate(self.steps, sum(map(len, self.tokens)))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second; steps that also decode count in full."""
        return _rate(self.phase("prefill"), self.num_prompt_tokens)

    @property
    def decode_tokens_per_s(self) -> float:
        steps = self.phase("decode")
        return _rate(steps, sum(step.num_tokens for step in steps))


def greedy_request(index: int, prompt: Iterable[int], num_output_tokens: int) -> Request:
    """A greedy request for exactly `num_output_tokens`; lower indices arrive first."""
    return Request(
        request_id=str(index),
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(
            temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True
        ),
        arrival_s=float(index),
    )


def make_requests(
    num_seqs: int, prompt_tokens: int, output_tokens: int, *, vocab_size: int, rng: random.Random
) -> list[Request]:
    """Greedy requests of random tokens: no two share a prefix, none ends early."""
    ids = range(vocab_size)
    return [
        greedy_request(index, rng.choices(ids, k=prompt_tokens), output_tokens)
        for index in range(num_seqs)
    ]


def run_requests(core: EngineCore, requests: Sequence[Request]) -> Run:
    """Step until all requests have ended. Raises RuntimeError if a request did not get all its
    tokens."""
    for request in requests:
        core.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    wanted = [request.sampling_params.max_tokens for request in requests]
    steps: list[Step] = []
    while core.wait():
        phase = _phase(list(map(len, tokens.values())), wanted)
        began_s = time.perf_counter()
        outputs = core.step()
        step_s = time.perf_counter() - began_s
        for output in outputs:
            tokens[output.request_id].extend(output.token_ids)
        num_tokens = sum(len(output.token_ids) for output in outputs)
        steps.append(Step(phase=phase, step_s=step_s, num_tokens=num_tokens))
    if list(map(len, tokens.values())) != wanted:
        raise RuntimeError("a request got fewer or more tokens than it asked for")
    return Run(
        num_prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        steps=steps,
        tokens=list(tokens.values()),
    )


def _phase(lengths: Sequence[int], wanted: Sequence[int]) -> Phase:
    if min(lengths) == 0:
        return "prefill"
    return "decode" if all(map(int.__lt__, lengths, wanted)) else "tail"


def _rate(steps: Sequence[Step], num_tokens: int) -> float:
    """Tokens per second; 0 without steps."""
    elapsed_s = sum(step.step_s for step in steps)
    return num_tokens / elapsed_s if elapsed_s else 0.0
