"""Runs requests of equal lengths through an engine core in this process, step by step.

All requests are submitted at once. The steps fall into three phases; only the first two say
something about the engine's speed:

    prefill    until every sequence has its first token
    decode     every sequence gets a token in each step
    tail       the first sequences have ended
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    ModelImpl,
    Quantization,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.models.language_model import DrawnTokens
from penstock.engine.request import Request, RequestOutput, SamplingParams
from penstock.engine.runner import model_runner
from penstock.engine.runner.input_batch import InputBatch
from penstock.engine.sampling.sampler import ChosenTokens, Sampler
from penstock.engine.scheduling import Scheduler
from penstock.engine.startup import build_core
from penstock.engine.text import Tokenizer
from penstock.engine.text.detokenizer import OutputText
from penstock.engine.transport.messages import EngineInfo
from penstock.load.machine import CallTimer, Places, no_wait

# The parts of an engine's step, and the calls that make them up.
#
# Everything else is `other`: moving blocks, making the result, the step loop itself.

_PLACES: Places = {
    "schedule": ((Scheduler, "schedule"),),
    "prepare": ((InputBatch, "update"), (InputBatch, "prepare")),
    "forward": (
        (model_runner, "run_step"),  # on a CPU it draws too
    ),
    "sample": ((Sampler, "choose"), (ChosenTokens, "read"), (DrawnTokens, "read")),
    "update": ((Scheduler, "update"),),
}
OTHER = "other"
PARTS = (*_PLACES, OTHER)


def step_timer(device: str) -> CallTimer:
    """A timer of a step's parts; on a GPU it waits for the device after each part."""
    is_cuda = torch.device(device).type == "cuda"
    return CallTimer(_PLACES, wait=torch.cuda.synchronize if is_cuda else no_wait)


def split_step(timer: CallTimer, step_s: float) -> dict[str, float]:
    """Seconds of every part of the step that just took `step_s`; their sum is `step_s`."""
    parts = timer.take()
    return {**parts, OTHER: step_s - sum(parts.values())}


Phase = Literal["prefill", "decode", "tail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of each prompt and of each output."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration; `parts_s` are the seconds of its parts, empty where they were not timed."""

    phase: Phase
    step_s: float
    num_tokens: int
    parts_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All steps of one workload."""

    lengths: Lengths
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
        return _rate(self.phase("prefill"), len(self.tokens) * self.lengths.prompt_tokens)

    @property
    def decode_tokens_per_s(self) -> float:
        steps = self.phase("decode")
        return _rate(steps, sum(step.num_tokens for step in steps))


def build_engine(
    parsed: argparse.Namespace,
    quantization: Quantization,
    device: DeviceConfig,
    *,
    quantize_activations: bool = True,
    kv_cache_dtype: KVCacheDType = "auto",
    model_impl: ModelImpl = "auto",
) -> tuple[EngineCore, EngineInfo]:
    """An engine core by a bench's flags, in which `--num-seqs` sequences run at once."""
    max_num_seqs = max(SchedulerConfig().max_num_seqs, *parsed.num_seqs)
    model = ModelConfig(
        model=parsed.model,
        model_impl=model_impl,
        dtype=parsed.dtype,
        quantization=quantization,
        quantize_activations=quantize_activations,
    )
    scheduler = SchedulerConfig(max_num_seqs=max_num_seqs)
    cache = CacheConfig(kv_cache_dtype=kv_cache_dtype)
    return build_core(EngineConfig(model=model, cache=cache, scheduler=scheduler, device=device))


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
    num_seqs: int, lengths: Lengths, *, vocab_size: int, rng: random.Random
) -> list[Request]:
    """Greedy requests of random tokens: no two share a prefix, none ends early."""
    ids, num_prompt = range(vocab_size), lengths.prompt_tokens
    return [
        greedy_request(index, rng.choices(ids, k=num_prompt), lengths.output_tokens)
        for index in range(num_seqs)
    ]


def run_requests(
    core: EngineCore,
    requests: Sequence[Request],
    lengths: Lengths,
    *,
    timer: CallTimer | None = None,
) -> Run:
    """Step until all requests have ended; an attached timer splits each step. Raises RuntimeError
    if a request did not get all its tokens."""
    for request in requests:
        core.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    steps: list[Step] = []
    while core.has_work():
        phase = _phase(tokens, lengths)
        began_s = time.perf_counter()
        outputs = core.step()
        step_s = time.perf_counter() - began_s
        steps.append(
            Step(
                phase=phase,
                step_s=step_s,
                num_tokens=_collect(outputs, tokens),
                parts_s=split_step(timer, step_s) if timer is not None else {},
            )
        )
    if any(len(each) != lengths.output_tokens for each in tokens.values()):
        raise RuntimeError(f"outputs of other lengths than {lengths.output_tokens}")
    return Run(lengths=lengths, steps=steps, tokens=list(tokens.values()))


def detokenize_s_per_token(tokens: Sequence[Sequence[int]], tokenizer: Tokenizer) -> float:
    """Seconds to turn one token into text as it streams, sequence after sequence in each step."""
    params = SamplingParams()
    texts = [OutputText(tokenizer, params) for _ in tokens]
    began_s = time.perf_counter()
    for step in zip(*tokens, strict=True):
        for text, token_id in zip(texts, step, strict=True):
            text.push((token_id,))
    return (time.perf_counter() - began_s) / sum(map(len, tokens))


def _phase(tokens: Mapping[str, Sequence[int]], lengths: Lengths) -> Phase:
    counts = list(map(len, tokens.values()))
    if min(counts) == 0:
        return "prefill"
    return "decode" if max(counts) < lengths.output_tokens else "tail"


def _collect(outputs: Sequence[RequestOutput], tokens: Mapping[str, list[int]]) -> int:
    """Append a step's new tokens to their requests; return how many there were."""
    for output in outputs:
        tokens[output.request_id].extend(output.token_ids)
    return sum(len(output.token_ids) for output in outputs)


def _rate(steps: Sequence[Step], num_tokens: int) -> float:
    """Tokens per second; 0 without steps."""
    elapsed_s = sum(step.step_s for step in steps)
    return num_tokens / elapsed_s if elapsed_s else 0.0
