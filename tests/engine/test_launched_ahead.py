"""The engine as a GPU runs it, on a CPU: steps from graphs, two of them in flight.

The same code as on a card, but that graphs are recorded and streams do nothing (how those may be
late is in `runner/test_sampled_tokens`); its tokens are those of the engine that does one step
after the other, and of `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine.config import (
    CacheConfig,
    CudagraphMode,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.request import (
    BeamSearch,
    Request,
    SamplingParams,
    StructuredOutputs,
    ThoughtLimit,
)
from penstock.engine.runner import model_runner, sampled_tokens
from penstock.engine.runner.cuda_graphs import DecodeGraphs, GraphedModel
from penstock.engine.runner.model_runner import StepInFlight
from penstock.engine.startup import build_core
from tests.support.tiers import tiered

from .greedy_parity import NUM_NEW, check_greedy_parity, requests
from .lettered import lettered
from .runner.recorded_graphs import record_graphs

GRAPHS: tuple[CudagraphMode, ...] = ("none", "piecewise", "full")
# Each mode of graphs, then each other architecture.
GREEDY: list[tuple[str, CudagraphMode]] = [
    ("llama", "full"), ("experts", "piecewise"), ("mistral-window", "none"),
    ("llama-tied", "full"), ("qwen2", "full"), ("qwen3", "full"), ("experts", "full"),
]  # fmt: skip
TIGHT = 22  # blocks: the longest prompt with its answer takes 11, and a second beam as many
ROOMY = SchedulerConfig(max_num_batched_tokens=33, max_num_seqs=24)
KINDS = {
    "plain": {"temperature": 0.9, "top_p": 0.95},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "no early end": {
        "temperature": 0.0,
        "min_tokens": 21,
        "logit_bias": {2: 8.0},
        "ignore_eos": False,
    },
    "described": {"temperature": 0.7, "logprobs": 3, "prompt_logprobs": 2},
    "samples": {"temperature": 1.0, "n": 3},
    "grammar": {
        "temperature": 1.0,
        "n": 2,
        "structured_outputs": StructuredOutputs("regex", "[a-z]+(-[0-9]{1,9}){2,3}x*"),
    },
    "thought": {
        "temperature": 1.0,
        "n": 2,
        "thinking_token_budget": 9,
        "thought_limit": ThoughtLimit(
            begins=("<b>",),
            ends=("<e>",),
            marks=((70, "<e>"),),
            end_token_ids=(71, 70, 72),
            is_thinking=True,
        ),
    },
    "grammar of beams": {
        "temperature": 0.0,
        "beam_search": BeamSearch(width=2),
        "ignore_eos": False,
        "structured_outputs": StructuredOutputs("regex", "[a-z]+(-[0-9]{1,9}){2,3}x*"),
    },
}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[CudagraphMode], None]:
    """Call it with the mode of graphs before an engine is built."""

    def settle(mode: CudagraphMode) -> None:
        monkeypatch.setattr(model_runner, "cpu_kernels", lambda *_, **__: None)
        monkeypatch.setattr(sampled_tokens, "can_schedule_async", lambda _: True)
        record_graphs(monkeypatch, mode)

    return settle


def build(path: Path, schedule: SchedulerConfig, num_blocks: int = 400) -> EngineCore:
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(model=str(path), dtype="float32"),
            cache=CacheConfig(num_blocks=num_blocks, num_host_blocks=300),
            scheduler=schedule,
        )
    )
    return core


@dataclass
class Answer:
    """A branch: its tokens and its end, and what was said of tokens, the prompt's and its own."""

    tokens: list[Any] = field(default_factory=list)
    described: list[tuple[int, list[int]]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


Answers = dict[tuple[str, int], Answer]


def outputs(core: EngineCore, asked: list[Request]) -> Answers:
    found: Answers = {}
    for request in asked:
        core.add(request)
    while core.wait():
        for output in core.step():
            answer = found.setdefault((output.request_id, output.index), Answer())
            answer.tokens += output.token_ids
            if output.finish_reason is not None:
                answer.tokens.append(output.finish_reason)
            for entry in (*output.prompt_logprobs, *output.logprobs):
                answer.described.append((entry.token_id, [token_id for token_id, _ in entry.top]))
                answer.logprobs.append(entry.logprob)
        core.scheduler.blocks.check_integrity()
    assert core.scheduler.blocks.tiers.device.num_held == 0
    return found


def check_same(found: Answers, expected: Answers) -> None:
    assert found.keys() == expected.keys()
    for key, answer in found.items():
        assert answer.tokens == expected[key].tokens
        assert answer.described == expected[key].described
        assert answer.logprobs == pytest.approx(expected[key].logprobs, abs=1e-3)


@pytest.mark.parametrize(("name", "mode"), tiered(GREEDY, GREEDY[:2]))
def test_greedy_tokens_equal_transformers(
    name: str,
    mode: CudagraphMode,
    expected_tokens: Callable[[str], Any],
    as_on_a_gpu: Callable[[CudagraphMode], None],
) -> None:
    as_on_a_gpu(mode)
    check_greedy_parity(name, "chunked", expected_tokens)
    check_greedy_parity(name, "small pool", expected_tokens)


def one_by_one(
    kind: str, checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, list[Request], Answers]:
    """A model, requests of this kind, and their answers, by torch without graphs or overlap."""
    path = lettered(checkpoint, folder)
    asked = requests(SamplingParams(**({"max_tokens": NUM_NEW, "ignore_eos": True} | KINDS[kind])))
    with monkeypatch.context() as torch_alone:
        torch_alone.setattr(model_runner, "cpu_kernels", lambda *_, **__: None)
        return path, asked, outputs(build(path, replace(ROOMY, max_steps_in_flight=1)), asked)


SCHEDULES = {
    "roomy": (ROOMY, 400),
    "swapped": (replace(ROOMY, preemption="swap"), TIGHT),
    "recomputed, three in flight": (
        replace(ROOMY, preemption="recompute", max_steps_in_flight=3),
        TIGHT,
    ),
}
# Each kind but thoughts, which are masks as grammars are, with one schedule; then with another.
ASKED = [
    ("plain", "roomy"), ("penalties", "roomy"), ("samples", "swapped"),
    ("grammar of beams", "swapped"), ("no early end", "recomputed, three in flight"),
    ("described", "recomputed, three in flight"), ("grammar", "recomputed, three in flight"),
    ("plain", "swapped"), ("penalties", "recomputed, three in flight"), ("samples", "roomy"),
    ("grammar of beams", "recomputed, three in flight"), ("no early end", "swapped"),
    ("described", "swapped"), ("grammar", "swapped"), ("thought", "roomy"),
    ("thought", "recomputed, three in flight"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), tiered(ASKED, ASKED[: len(KINDS) - 1]))
def test_every_request_gets_what_it_gets_step_by_step(
    kind: str,
    name: str,
    tiny_checkpoint: Callable[..., Path],
    as_on_a_gpu: Callable[[CudagraphMode], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    checkpoint, (schedule, num_blocks) = tiny_checkpoint("LlamaForCausalLM"), SCHEDULES[name]
    path, asked, expected = one_by_one(kind, checkpoint, tmp_path / "model", monkeypatch)
    as_on_a_gpu("full")
    core = build(path, schedule, num_blocks)
    assert isinstance(core._executor._runner._model, GraphedModel)
    check_same(outputs(core, asked), expected)
    assert (core.scheduler.counters.num_preemptions > 0) == (num_blocks == TIGHT)


DRAFTED = [
    ("plain", "ngram"), ("grammar", "ngram"), ("plain", "draft_model"),
    ("penalties", "draft_model"), ("samples", "draft_model"), ("grammar of beams", "ngram"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "method"), tiered(DRAFTED, DRAFTED[1:3]))
def test_drafts_change_no_token(
    kind: str,
    method: str,
    tiny_checkpoint: Callable[..., Path],
    as_on_a_gpu: Callable[[CudagraphMode], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Those of a prediction that is right at times, and those of the model for itself."""
    checkpoint = tiny_checkpoint("LlamaForCausalLM")
    path, asked, expected = one_by_one(kind, checkpoint, tmp_path / "model", monkeypatch)
    as_on_a_gpu("full")
    if method == "ngram":
        asked = [
            msgspec.structs.replace(each, prediction_token_ids=_predicted(expected, each))
            for each in asked
        ]
    replayed: list[int] = []  # the most tokens of a sequence that the graphs are for
    replay = DecodeGraphs.replay

    def counted(graphs: DecodeGraphs, *args: Any) -> Any:
        hidden = replay(graphs, *args)
        replayed.extend([graphs._query_len] * (hidden is not None))
        return hidden

    monkeypatch.setattr(DecodeGraphs, "replay", counted)
    config = {"method": method} | ({} if method == "ngram" else {"model": str(path)})
    core = build(path, replace(ROOMY, max_num_seqs=5, speculative_config=config))
    check_same(outputs(core, asked), expected)
    counters = core.scheduler.drafting.counters
    if kind == "plain":
        assert 8 in replayed
        assert counters.num_accepted_tokens > 0
        assert method == "ngram" or counters.num_accepted_tokens == counters.num_draft_tokens


def _predicted(expected: Answers, request: Request) -> tuple[int, ...]:
    tokens = [each for each in expected[request.request_id, 0].tokens if isinstance(each, int)]
    tokens[len(tokens) // 2 : len(tokens) // 2 + 1] = [5]
    return tuple(tokens)


def test_the_next_step_is_launched_before_the_last_is_read(
    tiny_checkpoint: Callable[..., Path],
    as_on_a_gpu: Callable[[CudagraphMode], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nothing but penalties makes the host wait in between."""
    as_on_a_gpu("full")
    core = build(tiny_checkpoint("LlamaForCausalLM"), ROOMY)
    events: list[str] = []
    launch, result = core._executor.submit, StepInFlight.result

    def submit(batch: Any) -> Any:
        events.append("launch")
        return launch(batch)

    def read(self: Any) -> Any:
        events.append("read")
        return result(self)

    monkeypatch.setattr(core._executor, "submit", submit)
    monkeypatch.setattr(StepInFlight, "result", read)
    (request,) = requests(SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))[3:4]
    outputs(core, [request])
    assert events[:4] == ["launch", "launch", "read", "launch"]
    assert events.count("launch") == events.count("read") == 7  # the last one forgets it
