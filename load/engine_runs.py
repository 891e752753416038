"""Runs requests through an engine core in this process, step by step.

All requests are submitted at once. The steps fall into three phases; only the first two say
something about the engine's speed:

    prefill    until every sequence has its first token
    decode     every sequence gets a token in each step
    tail       the first sequences have ended
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

from penstock.engine.engine_core import EngineCore
from penstock.engine.request import Request, SamplingParams
from penstock.kernels.cpu.program import CpuProgram

Phase = Literal["prefill", "decode", "tail"]


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration, with this thread's CPU time: in all, beside the kernels, beside the device."""

    phase: Phase
    step_s: float
    num_tokens: int
    cpu_s: float = 0.0
    python_s: float = 0.0
    policy_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All steps of one workload."""

    num_prompt_tokens: int
    steps: Sequence[Step]
    tokens: Sequence[Sequence[int]]  # the output of each request

    def phase(self, phase: Phase) -> list[Step]:
        return [step for step in self.steps if step.phase == phase]

    @property
    def cpu_s(self) -> float:
        return sum(step.cpu_s for step in self.steps)

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


def make_request(
    index: int, prompt: Iterable[int], num_output_tokens: int, temperature: float = 0.0
) -> Request:
    """A request for exactly `num_output_tokens`; lower indices arrive first."""
    return Request(
        request_id=str(index),
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(
            temperature=temperature, seed=index, max_tokens=num_output_tokens, ignore_eos=True
        ),
        arrival_s=float(index),
    )


def run_requests(core: EngineCore, requests: Sequence[Request]) -> Run:
    """Step until all requests have ended. Raises RuntimeError if a request did not get all its
    tokens."""
    for request in requests:
        core.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    wanted = [request.sampling_params.max_tokens for request in requests]
    steps: list[Step] = []
    cpu_s = defaultdict[str, float](float)
    submit = _timed(core._executor.submit, cpu_s, "device")
    run = _timed(CpuProgram.run, cpu_s, "kernels")
    with patch.object(CpuProgram, "run", run), patch.object(core._executor, "submit", submit):
        while core.wait():
            lengths = list(map(len, tokens.values()))
            phase: Phase = "decode" if all(map(int.__lt__, lengths, wanted)) else "tail"
            phase = phase if min(lengths) else "prefill"
            cpu_s.clear()
            began_s = time.perf_counter()
            outputs = _timed(core.step, cpu_s, "step")()
            step_s = time.perf_counter() - began_s
            for output in outputs:
                tokens[output.request_id].extend(output.token_ids)
            num_tokens = sum(len(output.token_ids) for output in outputs)
            cpu = (cpu_s["step"] - cpu_s[each] for each in ("nothing", "kernels", "device"))
            steps.append(Step(phase, step_s, num_tokens, *cpu))
    if list(map(len, tokens.values())) != wanted:
        raise RuntimeError("a request got fewer or more tokens than it asked for")
    return Run(
        num_prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        steps=steps,
        tokens=list(tokens.values()),
    )


def _timed(call: Callable[..., Any], cpu_s: dict[str, float], name: str) -> Callable[..., Any]:
    """The call, which adds the CPU seconds that it takes of this thread."""

    def timed(*args: Any, **named: Any) -> Any:
        began_s = time.thread_time()
        result = call(*args, **named)
        cpu_s[name] += time.thread_time() - began_s
        return result

    return timed


def _rate(steps: Sequence[Step], num_tokens: int) -> float:
    """Tokens per second; 0 without steps."""
    elapsed_s = sum(step.step_s for step in steps)
    return num_tokens / elapsed_s if elapsed_s else 0.0
