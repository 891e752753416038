"""A draft model changes no token; and a model that drafts for itself is never wrong, however its
blocks are moved, shared, chunked or left behind."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine import ConfigError
from penstock.engine.config import ModelConfig, SchedulerConfig
from penstock.engine.model_files.resolve import DEMO_MODEL_PATH
from penstock.engine.request import Request
from penstock.engine.speculative.policy.drafting import DraftCounters
from tests.support.tiers import tiered

from ...conftest import TinyCheckpoint
from ..test_speculation import changed, core_with, requests, run

NUM_REQUESTS = 20
ITSELF = {"method": "draft_model", "model": "demo"}
KINDS: dict[str, dict[str, Any]] = {
    "alone": {},
    "together": {},
    "chunked": {"max_num_batched_tokens": 64},
    "swapped": {"num_blocks": 80, "block_size": 4, "preemption": "swap"},
    "recomputed": {"num_blocks": 80, "block_size": 4, "preemption": "recompute"},
    "in flight": {"max_steps_in_flight": 2},
}


def of_many_lengths() -> list[Request]:
    """The last of them run beside few others, so that there is room for drafts."""
    change = msgspec.structs.replace
    return [
        change(each, sampling_params=change(each.sampling_params, max_tokens=20 + 4 * number))
        for number, each in enumerate(requests(logprobs=2)[:NUM_REQUESTS])
    ]


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with noise on its weights, which agrees with it now and then."""
    path = tmp_path_factory.mktemp("noisy") / "model"
    shutil.copytree(DEMO_MODEL_PATH, path)
    torch.manual_seed(0)
    for file in path.glob("*.safetensors"):
        weights = load_file(file)
        for name, weight in weights.items():
            if weight.dim() == 2:
                weights[name] = weight + 0.15 * weight.std() * torch.randn_like(weight)
        save_file(weights, file, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("dtype", "kinds"),
    tiered(
        [("bfloat16", ("chunked", "swapped")), ("float32", tuple(KINDS))],
        [("bfloat16", ("chunked", "swapped"))],
    ),
)
def test_tokens_are_the_same_and_its_own_drafts_are_right(
    dtype: str, kinds: tuple[str, ...], noisy: Path
) -> None:
    plain = core_with(dtype)
    expected = run(plain, of_many_lengths())
    plain.close()
    for kind in kinds:
        core = core_with(dtype, speculative_config=ITSELF, **KINDS[kind])
        assert run(core, of_many_lengths(), at_once=kind != "alone") == expected, kind
        counters = core.scheduler.drafting.counters
        assert counters.num_accepted_tokens == counters.num_draft_tokens > 0, kind
        if kind in ("swapped", "recomputed"):
            assert core.scheduler.counters.num_preemptions > 0
        core.close()
    core = core_with(dtype, speculative_config={"model": str(noisy)})
    assert run(core, of_many_lengths(), at_once=False) == expected
    counters = core.scheduler.drafting.counters
    assert 0 < counters.num_accepted_tokens < counters.num_draft_tokens


def test_a_prefix_hit_has_its_drafts_too() -> None:
    """Of prompts that were computed, and of outputs that nobody drafted at the time."""
    core = core_with(speculative_config=ITSELF)
    asked = requests(max_tokens=50)[:9]  # too many at once for drafts
    answers = run(core, asked)
    counted = core.scheduler.drafting.counters
    before = replace(counted)
    longer = [
        msgspec.structs.replace(
            request,
            request_id=f"longer {request.request_id}",
            prompt_token_ids=(*request.prompt_token_ids, *answers[request.request_id, 0][0]),
        )
        for request in asked
    ]
    run(core, longer, at_once=False)
    assert core.scheduler.blocks.counters.prefix_hits > 9 * 30
    num_new = counted.num_draft_tokens - before.num_draft_tokens
    assert counted.num_accepted_tokens - before.num_accepted_tokens == num_new > 9 * 5


def test_a_prediction_comes_first() -> None:
    plain, core = core_with(), core_with(speculative_config=ITSELF)
    expected = run(plain, requests()[:NUM_REQUESTS])
    asked = requests(changed(expected))[:NUM_REQUESTS]
    assert run(core, asked, at_once=False) == expected
    counters: DraftCounters = core.scheduler.drafting.counters
    assert counters.num_accepted_tokens < counters.num_draft_tokens  # predictions may be wrong


def test_its_memory_counts() -> None:
    """A block takes both models' keys and values."""
    plain, core = core_with(), core_with(speculative_config=ITSELF)
    one, both = (each._executor.info for each in (plain, core))
    assert both.bytes_per_block == 2 * one.bytes_per_block
    assert both.weight_bytes == 2 * one.weight_bytes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "draft_model", "model": ""}, "needs a model"),
        ({"method": "draft_model", "model": 5}, "needs a model"),
        ({"method": "ngram", "model": "demo"}, "ngram has no model"),
    ],
)
def test_wrong_settings_are_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SchedulerConfig(speculative_config=value)


def test_another_vocabulary_is_refused(tmp_path: Path, tiny_checkpoint: TinyCheckpoint) -> None:
    with pytest.raises(ConfigError, match="needs the same tokens"):
        core_with(speculative_config={"model": str(tiny_checkpoint())})
    with pytest.raises(ConfigError, match=r"--speculative-config: .*config\.json"):
        core_with(speculative_config={"model": str(tmp_path)})


def test_the_model_that_is_drafted_for_may_be_quantized(noisy: Path) -> None:
    """The draft model too; names of modules in rules are those of the target."""
    rounded = ModelConfig(quantization="int8", quantization_override=("lm_head=none",))
    plain, core = (
        core_with(model=rounded, speculative_config=config)
        for config in (None, {"model": str(noisy)})
    )
    asked = requests()[:NUM_REQUESTS]
    assert run(core, asked, at_once=False) == run(plain, asked, at_once=False)
    assert core.scheduler.drafting.counters.num_accepted_tokens > 0
