"""A real model: SmolLM2-135M-Instruct as a GGUF file, which is fetched once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.engine import LLM, SamplingParams
from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.request import Request, StructuredOutputs
from penstock.engine.startup import build_core
from penstock.engine.text import ChatTemplate, Tokenizer
from tests.support.real_models import smollm2_file

from .greedy_parity import NEAR_TIE, run
from .smollm2_reference import NUM_NEW, answers, computed

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW)


@pytest.fixture(scope="module")
def file() -> Path:
    return smollm2_file()


def test_prompts_equal_those_of_transformers(file: Path) -> None:
    path = resolve_model(ModelConfig(model=str(file)), weights=False)
    template, tokenizer = ChatTemplate.from_directory(path), Tokenizer.from_directory(path)
    for answer in answers():
        text = answer.text
        if answer.is_chat:
            text = template.render([{"role": "user", "content": text}])
        assert tokenizer.encode(text, add_special_tokens=False) == answer.prompt_token_ids
        assert tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("schedule", "num_blocks", "asked"),
    [
        pytest.param(
            SchedulerConfig(max_num_batched_tokens=96),
            800,
            slice(None),
            marks=pytest.mark.exhaustive,
        ),
        (SchedulerConfig(max_num_batched_tokens=96, preemption="swap"), 60, slice(None)),
        # For `make arm`, where a processor is emulated.
        pytest.param(SchedulerConfig(), 60, slice(3, 4), marks=pytest.mark.exhaustive),
    ],
    ids=["plenty", "swapped", "one"],
)
def test_greedy_tokens_equal_transformers(
    file: Path, schedule: SchedulerConfig, num_blocks: int, asked: slice
) -> None:
    """In fp32, near ties apart; with memory for all, and for a few at a time."""
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(
                model=str(file), dtype="float32", quantize_activations=False, max_model_len=224
            ),
            cache=CacheConfig(num_blocks=num_blocks, num_host_blocks=800, block_size=4),
            scheduler=schedule,
            device=DeviceConfig(device="cpu"),
        )
    )
    expected = {f"r{number}": answer for number, answer in enumerate(answers()[asked])}
    requests = [
        Request(
            request_id=name,
            prompt_token_ids=tuple(answer.prompt_token_ids),
            sampling_params=GREEDY,
            arrival_s=float(number),
        )
        for number, (name, answer) in enumerate(expected.items())
    ]
    found = run(core, requests)
    counters = core.scheduler.counters
    core.close()
    assert (counters.num_swaps > 0) == (schedule.preemption == "swap")
    for name, answer in expected.items():
        pairs = zip(found[name], answer.token_ids, strict=False)
        place = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
        if place is None:
            assert len(found[name]) == len(answer.token_ids), answer.text
        else:
            assert answer.gaps[place] < NEAR_TIE, answer.text


_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_an_answer_in_a_schema_makes_sense(file: Path) -> None:
    """As the model is served: in bf16, with rounded activations."""
    schema = StructuredOutputs("json_schema", json.dumps(_PERSON))
    params = SamplingParams(temperature=0.0, max_tokens=96, structured_outputs=schema)
    people = {"Ada": 36, "Tom": 12}
    talks = [
        [{"role": "user", "content": f"My name is {name} and I am {age} years old."}]
        for name, age in people.items()
    ]
    with LLM(str(file), max_model_len=512) as llm:
        results = llm.chat(talks, params, use_tqdm=False)
    found = [json.loads(result.outputs[0].text) for result in results]
    assert found == [{"name": name, "age": age} for name, age in people.items()]


@pytest.mark.exhaustive
def test_what_is_kept_of_transformers_is_what_it_says_now() -> None:
    for kept, now in zip(answers()[:3], computed([(e.text, e.is_chat) for e in answers()[:3]]),
                         strict=True):  # fmt: skip
        assert now.prompt_token_ids == kept.prompt_token_ids
        assert now.token_ids == kept.token_ids
        assert now.gaps == pytest.approx(kept.gaps, abs=1e-3)
