"""JSON that matches a schema, in a quarter of the memory it needs: the bytes are the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from penstock.engine import LLM, BeamSearch, SamplingParams
from penstock.engine.structured_outputs.forms import structured_outputs

SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["fox", "crow", "stone"]},
            "age": {"type": "integer", "minimum": 0, "maximum": 200},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
        },
        "required": ["name", "kind", "age", "tags"],
        "additionalProperties": False,
    },
    "minItems": 4,
    "maxItems": 7,
}
WANTED = structured_outputs(json_schema=SCHEMA)
PROMPTS = [f"The animals of forest {number} are these: " for number in range(12)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.0, "seed": 8, "n": 3},
    {"temperature": 0.0, "n": 2, "beam_search": BeamSearch(width=3)},
    {"temperature": 0.0, "structured_outputs": None, "ignore_eos": True, "max_tokens": 200},
]
NUM_BLOCKS = 400  # of 16 tokens: some 12 requests of 250 tokens, with 22 sequences


def answers(**settings: Any) -> tuple[list[Any], Any]:
    """Text and finish reason of each output, with the engine's counters."""
    with LLM(
        "demo", dtype="float32", max_model_len=1024, num_host_blocks=4 * NUM_BLOCKS, **settings
    ) as llm:
        params = [
            SamplingParams(**{"max_tokens": 500, "structured_outputs": WANTED} | KINDS[number % 6])
            for number in range(len(PROMPTS))
        ]
        results = llm.generate(PROMPTS, params, use_tqdm=False)
        outputs = [
            [(output.text, output.token_ids, output.finish_reason) for output in result.outputs]
            for result in results
        ]
        return outputs, llm._core.scheduler.counters


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    outputs, counters = answers(num_blocks=4 * NUM_BLOCKS)
    assert counters.num_preemptions == 0
    validator = Draft202012Validator(SCHEMA)
    for number, result in enumerate(outputs):
        for text, _, reason in result:
            if KINDS[number % 6].get("structured_outputs", WANTED) is not None:
                assert reason in ("stop", "length")
                if reason == "stop":
                    validator.validate(json.loads(text))
    assert any(reason == "stop" for result in outputs for _, _, reason in result)
    return outputs


@pytest.mark.parametrize(
    "settings",
    [
        {"preemption": "swap"},
        pytest.param(
            {"preemption": "recompute", "max_steps_in_flight": 2, "enable_prefix_caching": False},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["swap", "recompute"],
)
def test_the_bytes_do_not_depend_on_memory(expected: list[Any], settings: dict[str, Any]) -> None:
    outputs, counters = answers(num_blocks=NUM_BLOCKS // 4, **settings)
    num_victims = {"swap": counters.num_swaps, "recompute": counters.num_recomputes}
    assert num_victims[settings["preemption"]] > 10
    assert outputs == expected
