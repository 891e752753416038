"""Adapters of tiny random models, written by PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

MakeAdapter = Callable[..., Path]


@pytest.fixture(scope="session")
def make_adapter(tmp_path_factory: pytest.TempPathFactory) -> MakeAdapter:
    """A factory of adapter directories.

    Arguments: the base model's directory, a seed, and fields of PEFT's `LoraConfig`.
    """
    root = tmp_path_factory.mktemp("adapters")

    def make(base: Path, seed: int, *, dtype: str = "float32", **fields: Any) -> Path:
        path = root / f"{base.name}-{seed}-{len(list(root.iterdir()))}"
        settings = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **fields}
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
            generator = torch.Generator().manual_seed(seed)
            for name, parameter in adapted.named_parameters():
                if ".lora_" in name:
                    numbers = torch.randn(parameter.shape, generator=generator)
                    parameter.data = 0.15 * numbers
            adapted.to(getattr(torch, dtype)).save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def peft_tokens() -> Callable[..., list[int]]:
    """The greedy continuation of a prompt by PEFT, in float32."""
    models: dict[Path, Any] = {}

    def generate(base: Path, adapter: Path | None, prompt: list[int], num_tokens: int) -> list[int]:
        key = adapter or base
        if key not in models:
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            if adapter is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model = PeftModel.from_pretrained(model, str(adapter))
            models[key] = model.eval()
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = models[key].generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=-1,
            )
        return output[0, len(prompt) :].tolist()

    return generate
