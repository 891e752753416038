"""`--deterministic`: the same bits, whatever is computed beside a request, and whatever was before.

64 prompts are answered one by one, each by an empty cache. Then again in every other way an engine
may go about it: each row of logits that a token was drawn from must be the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    KVCacheDType,
    ModelConfig,
    ModelImpl,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError
from penstock.engine.executor.in_process import InProcessExecutor
from penstock.engine.models import cpu_model
from penstock.engine.models.language_model import StepOutput
from penstock.engine.request import Request, RequestOutput, SamplingParams
from penstock.engine.startup import build_core
from penstock.gateway.launch.cli import _parser
from penstock.gateway.launch.settings import engine_config, resolve_settings
from penstock.kernels.cpu.isa import ISA_VARIABLE
from tests.support.tiers import tiered

VOCAB_SIZE = 160
NUM_NEW = 16
CONTEXT = 512
MAX_MODEL_LEN = 384  # of an engine, which scarce memory has to hold
MODELS: dict[str, dict[str, Any]] = {
    "bfloat16": {"architecture": "LlamaForCausalLM", "dtype": "bfloat16"},
    "float32": {"architecture": "LlamaForCausalLM", "dtype": "float32"},
    "int8 cache": {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "kv_cache_dtype": "int8",
    },
    "window": {"architecture": "MistralForCausalLM", "dtype": "bfloat16", "sliding_window": 40},
    "experts": {
        "architecture": "Qwen3MoeForCausalLM",
        "dtype": "bfloat16",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "dynamic": {  # rotary frequencies that depend on the length
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "max_position_embeddings": CONTEXT // 8,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
    },
}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.9, "top_p": 0.95, "frequency_penalty": 0.3},
    {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.1, "n": 2},
    {"temperature": 1.2, "min_p": 0.02, "logprobs": 3, "top_n_sigma": 2.5},
    {"temperature": 0.0, "logit_bias": {5: 1.5}},
)


@dataclass(frozen=True, kw_only=True)
class Way:
    """How the prompts are answered, and what must have come of it."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cache: CacheConfig = field(default_factory=lambda: CacheConfig(num_blocks=2000))
    num_threads: int = 1
    is_preempting: bool = False


def chunks(budget: int, **settings: Any) -> SchedulerConfig:
    return SchedulerConfig(max_num_batched_tokens=budget, **settings)


SCARCE = CacheConfig(num_blocks=96, block_size=4, num_host_blocks=1000)
WAYS = {
    "whole": Way(scheduler=chunks(20_000)),
    "chunks of 5": Way(scheduler=chunks(5)),
    "chunks of 100": Way(scheduler=chunks(100, max_num_seqs=11)),
    "two steps in flight": Way(scheduler=chunks(300, max_steps_in_flight=2)),
    "swap": Way(scheduler=chunks(256, preemption="swap"), cache=SCARCE, is_preempting=True),
    "recompute": Way(
        scheduler=chunks(256, preemption="recompute"), cache=SCARCE, is_preempting=True
    ),
    "blocks of 128": Way(cache=CacheConfig(num_blocks=400, block_size=128)),
    "two threads": Way(num_threads=2),
}


def requests() -> list[Request]:
    """Prompts of 1 to 300 tokens, of which two thirds begin like others."""
    rng = random.Random(7)
    stems = [rng.choices(range(3, VOCAB_SIZE), k=length) for length in (0, 37, 130)]
    edges = (1, 2, 15, 16, 17, 255, 256, 257, 300)
    found = []
    for number in range(64):
        stem = stems[number % 3]
        length = rng.choice((*edges, rng.randint(1, 300)))
        rest = rng.choices(range(3, VOCAB_SIZE), k=max(1, length - len(stem)))
        params = SamplingParams(
            **KINDS[number % len(KINDS)], seed=number, max_tokens=NUM_NEW, ignore_eos=True
        )
        found.append(
            Request(
                request_id=str(number),
                prompt_token_ids=(*stem, *rest),
                sampling_params=params,
                arrival_s=float(number),
            )
        )
    return found


@dataclass(frozen=True)
class Answers:
    """What came of all requests.

    Attributes:
        logits: tokens so far → the bytes of the logits for the next; of one kind, if they hold it.
        outputs: (request, branch) → tokens, their log-probabilities, and the prompt's.
    """

    logits: dict[tuple[int, ...], set[bytes]] = field(default_factory=dict)
    outputs: dict[tuple[str, int], tuple[list[Any], list[Any], list[Any]]] = field(
        default_factory=dict
    )

    def add(self, output: RequestOutput) -> None:
        tokens, logprobs, prompt = self.outputs.setdefault(
            (output.request_id, output.index), ([], [], [])
        )
        tokens.extend(output.token_ids)
        logprobs.extend(output.logprobs)
        prompt.extend(output.prompt_logprobs)


class Watch:
    """Stands before a runner and keeps the logits of every token that is drawn."""

    def __init__(self, runner: Any, answers: Answers) -> None:
        self._runner = runner
        self._model = runner._model
        self._answers = answers
        self._tokens: dict[int, list[int]] = {}
        self._given: list[Tensor] = []
        runner._model = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model if hasattr(self._model, name) else self._runner, name)

    def step(self, *args: Any) -> StepOutput:
        output: StepOutput = self._model.step(*args)
        self._given.append(output.logits.clone())
        return output

    def execute(self, batch: Batch) -> BatchResult:
        self._given.clear()
        for item in batch.scheduled:
            if item.entry is not None:
                self._tokens[item.seq_id] = list(item.entry.token_ids)
        result = self._runner.execute(batch)
        num_drafts = {item.seq_id: item.num_drafts for item in batch.scheduled}
        rows = iter(self._given[0] if self._given else ())
        for seq_id, drawn in result.token_ids.items():
            tokens = self._tokens[seq_id]
            of_sequence = [next(rows) for _ in range(1 + num_drafts[seq_id])]
            for row, token_id in zip(of_sequence, drawn, strict=False):  # up to a wrong draft
                data = row.view(torch.uint8).numpy().tobytes()
                self._answers.logits.setdefault(tuple(tokens), set()).add(data)
                tokens.append(token_id)
        assert next(rows, None) is None
        return result


def answer(
    core: EngineCore, *, one_by_one: bool = False, num_requests: int | None = None
) -> Answers:
    """What the first so many requests come to, all if none is said."""
    answers = Answers()
    executor = core._executor
    runner = executor._runner
    core._executor = InProcessExecutor(Watch(runner, answers))
    for request in requests()[:num_requests]:
        core.add(request)
        while one_by_one and core.has_work():
            _step(core, answers)
    while core.has_work():
        _step(core, answers)
    core._executor, runner._model = executor, runner._model._model
    return answers


def _step(core: EngineCore, answers: Answers) -> None:
    for output in core.step():
        answers.add(output)


def build(
    path: Path,
    way: Way,
    *,
    deterministic: bool = True,
    kv_cache_dtype: KVCacheDType = "auto",
    model_impl: ModelImpl = "auto",
) -> EngineCore:
    core, info = build_core(
        EngineConfig(
            model=ModelConfig(model=str(path), max_model_len=MAX_MODEL_LEN, model_impl=model_impl),
            cache=replace(way.cache, kv_cache_dtype=kv_cache_dtype),
            scheduler=way.scheduler,
            device=DeviceConfig(
                device="cpu", num_threads=way.num_threads, deterministic=deterministic
            ),
        )
    )
    assert info.num_threads >= way.num_threads
    return core


@pytest.fixture(scope="module")
def model(
    request: pytest.FixtureRequest, tiny_checkpoint: Callable[..., Path]
) -> Callable[[Way], EngineCore]:
    """Builds an engine for it."""
    fields = {"max_position_embeddings": CONTEXT, **MODELS[request.param]}
    kv_cache_dtype = fields.pop("kv_cache_dtype", "auto")
    path = tiny_checkpoint(fields.pop("architecture"), **fields)
    return partial(build, path, kv_cache_dtype=kv_cache_dtype)


@pytest.fixture(scope="module")
def alone(model: Callable[[Way], EngineCore]) -> Answers:
    """Each prompt by itself, its KV computed anew."""
    cache = CacheConfig(num_blocks=100, enable_prefix_caching=False)
    answers = answer(model(Way(cache=cache)), one_by_one=True)
    assert len(answers.outputs) == 77
    assert {len(kinds) for kinds in answers.logits.values()} == {1}
    return answers


# Every way for one model, and for the others those that differ most in what a step computes.
ANSWERED = [
    ("bfloat16", "two steps in flight"), ("bfloat16", "swap"), ("experts", "recompute"),
    ("int8 cache", "chunks of 5"), ("bfloat16", "chunks of 5"), ("bfloat16", "two threads"),
    *(("bfloat16", name) for name in ("whole", "chunks of 100", "recompute", "blocks of 128")),
    *product(("float32", "window", "dynamic"), ("chunks of 5", "recompute")),
    *product(("experts", "int8 cache"), ("whole", "swap")),
]  # fmt: skip


@pytest.mark.parametrize(("model", "name"), tiered(ANSWERED, ANSWERED[:4]), indirect=["model"])
def test_the_way_changes_no_bit(
    model: Callable[[Way], EngineCore],
    alone: Answers,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    way = WAYS[name]
    if way.num_threads > 1:
        monkeypatch.setattr(cpu_model, "_MIN_SHARED_S", 0.0)  # else small steps run on one
    core = model(way)
    assert answer(core) == alone
    counters = core.scheduler.counters
    assert (counters.num_preemptions > 5) == way.is_preempting
    assert counters.num_fallbacks == 0


@pytest.mark.parametrize(
    ("model", "one_by_one"),
    tiered(
        [("bfloat16", False), ("bfloat16", True), ("int8 cache", False), ("dynamic", True)],
        [("bfloat16", False)],
    ),
    indirect=["model"],
)
def test_a_warm_cache_changes_no_bit(
    model: Callable[[Way], EngineCore], alone: Answers, one_by_one: bool
) -> None:
    core = model(Way())
    counters = core.scheduler.blocks.counters
    assert answer(core, one_by_one=one_by_one) == alone
    cold = counters.prefix_hits
    assert answer(core, one_by_one=one_by_one) == alone
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests())
    assert counters.prefix_hits - cold > num_prompt_tokens / 2 > cold


@pytest.mark.exhaustive
def test_a_model_through_transformers(tiny_checkpoint: Callable[..., Path]) -> None:
    """Whose operations are the kernels' or each row's own."""
    path = tiny_checkpoint("HeliumForCausalLM", dtype="bfloat16", max_position_embeddings=CONTEXT)
    by_one = Way(cache=CacheConfig(num_blocks=100, enable_prefix_caching=False))
    expected = answer(build(path, by_one), one_by_one=True, num_requests=20)
    for name in ("whole", "chunks of 5", "swap"):
        assert answer(build(path, WAYS[name]), num_requests=20) == expected, name


# -- where it cannot be held --------------------------------------------------------------------


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA_VARIABLE, "none")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.usefixtures("no_kernels")
def test_torch_would_not_hold_it(dtype: str, tiny_checkpoint: Callable[..., Path]) -> None:
    path = tiny_checkpoint(dtype=dtype, max_position_embeddings=CONTEXT)
    core = build(path, Way(), deterministic=False)
    alone = answer(core, one_by_one=True, num_requests=12).logits
    together = answer(core, num_requests=12).logits
    assert any(alone[tokens] != together[tokens] for tokens in alone.keys() & together.keys())


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_it_is_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"--deterministic .* could not be compiled"):
        build(tiny_checkpoint(max_position_embeddings=CONTEXT), Way())


def test_shapes_that_the_kernels_do_not_take_are_refused(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    with pytest.raises(ConfigError, match=r"--deterministic .* head size 24, hidden size 64"):
        build(tiny_checkpoint(head_dim=24, max_position_embeddings=CONTEXT), Way())


def test_operations_that_depend_on_the_batch_are_named(
    tiny_checkpoint: Callable[..., Path],
) -> None:
    path = tiny_checkpoint(
        "MixtralForCausalLM", num_local_experts=4, max_position_embeddings=CONTEXT
    )
    with pytest.raises(
        ConfigError, match=r"MixtralForCausalLM through transformers leaves .*linear"
    ):
        build(path, Way(), model_impl="transformers")


def test_it_is_a_flag() -> None:
    given = vars(_parser().parse_args(["serve", "--deterministic"]))
    assert engine_config(resolve_settings(given, {})).device.deterministic
    assert not engine_config(resolve_settings({}, {})).device.deterministic
