"""Beam search through the whole engine core against `transformers.generate`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.request import (
    BeamSearch,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
)
from penstock.engine.startup import build_core
from tests.support.tiers import tiered

VOCAB_SIZE = 160
EOS = 2  # of the tiny checkpoints
NUM_NEW = 14
SEARCHES = (
    BeamSearch(width=1),
    BeamSearch(width=4),
    BeamSearch(width=3, length_penalty=0.0, early_stopping="never"),
    BeamSearch(width=5, length_penalty=2.0, early_stopping=True),
)
# Blocks of four tokens: a beam's heirs soon share blocks that only one of them may write.
SCHEDULES = {
    "roomy": (SchedulerConfig(), 400),
    "chunked": (SchedulerConfig(max_num_batched_tokens=24), 400),
    "two in flight": (SchedulerConfig(max_num_batched_tokens=24, max_steps_in_flight=2), 400),
    "swapped": (SchedulerConfig(preemption="swap"), 104),
    "recomputed": (SchedulerConfig(preemption="recompute"), 104),
}


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (5, 16, 33, 64)]


def engine(path: Path, schedule: str) -> EngineCore:
    scheduler, num_blocks = SCHEDULES[schedule]
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(model=str(path), dtype="float32", max_model_len=128),
            cache=CacheConfig(num_blocks=num_blocks, block_size=4, num_host_blocks=300),
            scheduler=scheduler,
        )
    )
    return core


def expected(
    model: Any, prompt: Sequence[int], search: BeamSearch, ends: Sequence[int]
) -> list[tuple[list[int], float]]:
    """Every hypothesis of the reference: generated tokens and score, best first."""
    result = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        custom_generate=type(model)._beam_search,  # generate() takes a width of one for greedy
        do_sample=False,
        num_beams=search.width,
        num_return_sequences=search.width,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        max_new_tokens=NUM_NEW,
        eos_token_id=[EOS, *ends],
        return_dict_in_generate=True,
        output_scores=True,
    )
    outputs = result.sequences[:, len(prompt) :].tolist()
    lengths = [
        next((i for i, token_id in enumerate(output, 1) if token_id in (EOS, *ends)), NUM_NEW)
        for output in outputs
    ]
    return [
        (output[:length], score)
        for output, length, score in zip(
            outputs, lengths, result.sequences_scores.tolist(), strict=True
        )
    ]


def run(core: EngineCore, requests: Sequence[Request]) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work():
        for output in core.step():
            outputs[output.request_id].append(output)
        core.scheduler.blocks.check_integrity()
    assert core.scheduler.blocks.tiers.device.num_held == 0
    return outputs


def hypotheses(outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """Those of one request, best first; notices of preemption left out."""
    found = [output for output in outputs if output.notice is None]
    assert [output.index for output in found] == list(range(len(found)))
    assert [output.is_last for output in found] == [False] * (len(found) - 1) + [True]
    assert all(output.finish_reason is not None for output in found)
    return found


def beam_request(name: str, prompt: Sequence[int], search: BeamSearch, **more: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling_params=SamplingParams(
            **({"n": search.width, "temperature": 0.0, "max_tokens": NUM_NEW} | more),
            beam_search=search,
        ),
    )


@pytest.fixture(scope="module")
def path_and_model(
    tiny_checkpoint: Callable[..., Path], reference: Callable[..., Any]
) -> tuple[Path, Any]:
    path = tiny_checkpoint("LlamaForCausalLM")
    return path, reference(path)


@pytest.fixture(scope="module")
def ends(path_and_model: tuple[Path, Any]) -> tuple[int, ...]:
    """Tokens that a search of each prompt meets half-way."""
    _, model = path_and_model
    found = [expected(model, prompt, BeamSearch(width=2), ())[1][0] for prompt in prompts()]
    return tuple({token_ids[NUM_NEW // 2] for token_ids in found})


@pytest.mark.parametrize("schedule", tiered(SCHEDULES, ["two in flight", "swapped"]))
def test_hypotheses_equal_those_of_transformers(
    schedule: str, path_and_model: tuple[Path, Any], ends: tuple[int, ...]
) -> None:
    """All searches together, beside streams that only decode."""
    path, model = path_and_model
    cases = {
        f"{place}-{number}": (prompt, search)
        for place, prompt in enumerate(prompts())
        for number, search in enumerate(SEARCHES)
    }
    core = engine(path, schedule)
    plain = [
        Request(
            request_id=f"greedy-{place}",
            prompt_token_ids=tuple(prompt),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        )
        for place, prompt in enumerate(prompts())
    ]
    searches = [
        beam_request(name, prompt, search, stop_token_ids=ends)
        for name, (prompt, search) in cases.items()
    ]
    outputs = run(core, [*plain, *searches])
    reasons = set()
    for name, (prompt, search) in cases.items():
        ours = hypotheses(outputs[name])
        theirs = expected(model, prompt, search, ends)
        assert [list(output.token_ids) for output in ours] == [item for item, _ in theirs]
        assert [output.score for output in ours] == pytest.approx(
            [score for _, score in theirs], rel=1e-4
        )
        reasons |= {output.finish_reason for output in ours}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    counters = core.scheduler.counters
    assert (counters.num_swaps > 0) == (schedule == "swapped")
    assert (counters.num_recomputes > 0) == (schedule == "recomputed")


def test_fewer_hypotheses_than_beams_with_their_logprobs(
    path_and_model: tuple[Path, Any], ends: tuple[int, ...]
) -> None:
    path, model = path_and_model
    prompt, search = prompts()[1], BeamSearch(width=4)
    request = beam_request("a", prompt, search, n=2, logprobs=3, stop_token_ids=ends)
    ours = hypotheses(run(engine(path, "roomy"), [request])["a"])
    theirs = expected(model, prompt, search, ends)[:2]
    assert [list(output.token_ids) for output in ours] == [item for item, _ in theirs]
    for output in ours:
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        assert {len(entry.top) for entry in output.logprobs} == {3}
        total = sum(entry.logprob for entry in output.logprobs)
        assert output.score == pytest.approx(total / len(output.token_ids))


def test_an_aborted_search_leaves_no_block(path_and_model: tuple[Path, Any]) -> None:
    path, _ = path_and_model
    core = engine(path, "roomy")
    core.add(beam_request("a", prompts()[3], BeamSearch(width=4)))
    for _ in range(4):
        core.step()
    assert core.scheduler.blocks.tiers.device.num_held > 0
    core.abort("a")
    while core.has_work():
        assert core.step() == []
    assert core.scheduler.blocks.tiers.device.num_held == 0
    core.scheduler.blocks.check_integrity()
