"""Gemma 3 270M as a GGUF file of type Q4_K_M. Gemma's terms keep it out of the first tier."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.request import Request, SamplingParams
from penstock.engine.startup import build_core
from penstock.engine.text import Tokenizer
from tests.support.real_models import gemma_file

from .greedy_parity import NEAR_TIE, excuse, expected_tokens, gguf_read_once, run

pytestmark = [pytest.mark.exhaustive, pytest.mark.external]
NUM_NEW = 16
TEXTS = (
    "The capital of France is",
    "Once upon a time",
    "  def f(x):\n    return",
    "日本の首都は 🙂",
)


def test_greedy_tokens_equal_transformers() -> None:
    """In fp32, near ties apart."""
    file = gemma_file()
    core, _ = build_core(
        EngineConfig(
            model=ModelConfig(
                model=str(file), dtype="float32", quantize_activations=False, max_model_len=128
            ),
            cache=CacheConfig(num_blocks=100),
            device=DeviceConfig(device="cpu"),
        )
    )
    tokenizer = Tokenizer.from_directory(resolve_model(ModelConfig(model=str(file)), weights=False))
    source: dict[str, Any] = {"gguf_file": file.name}
    with gguf_read_once():
        reference = AutoTokenizer.from_pretrained(file.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    assert prompts == [reference.encode(text) for text in TEXTS]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    found = run(
        core,
        [
            Request(
                request_id=f"r{number}", prompt_token_ids=tuple(prompt), sampling_params=params,
                arrival_s=float(number),
            )
            for number, prompt in enumerate(prompts)
        ],
    )  # fmt: skip
    core.close()
    for number, prompt in enumerate(prompts):
        expected = expected_tokens(model, prompt, NUM_NEW)
        got = found[f"r{number}"]
        assert got == expected or excuse(model, prompt, got, expected) < NEAR_TIE
