"""Adapters written by PEFT, and its answers."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def write_adapter(
    base: Path,
    path: Path,
    seed: int,
    *,
    std: float = 0.15,
    dtype: str = "float32",
    auto: Any = AutoModelForCausalLM,
    **fields: Any,
) -> None:
    """A directory with an adapter of normal numbers.

    Args:
        auto: the class of `transformers` that reads the base.
        fields: of PEFT's `LoraConfig`.
    """
    settings = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **fields}
    model = auto.from_pretrained(base, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(**settings))
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.data = std * torch.randn(parameter.shape, generator=generator)
        adapted.to(getattr(torch, dtype)).save_pretrained(path)


def read_adapted(base: Path, adapter: Path | None, auto: Any = AutoModelForCausalLM) -> Any:
    """The model in directory `base`, with an adapter if there is one, in float32."""
    model = auto.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(model, str(adapter))
    return model.eval()


class PeftAnswers:
    """Greedy continuations by PEFT, in float32; models are kept."""

    def __init__(self) -> None:
        self._models: dict[Path, Any] = {}

    def __call__(
        self, base: Path, adapter: Path | None, prompt: list[int], num_tokens: int
    ) -> list[int]:
        """Args:
        adapter: None: the base model's own.
        """
        key = adapter or base
        if key not in self._models:
            self._models[key] = read_adapted(base, adapter)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self._models[key].generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=-1,
            )
        token_ids: list[int] = output[0, len(prompt) :].tolist()
        return token_ids
