"""Models for whole-stack tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engine.model_files.resolve import DEMO_MODEL_PATH

from ..clients.packages import langchain, node_modules

__all__ = ["langchain", "node_modules", "tiny_model"]


@pytest.fixture
def tiny_model(tmp_path: Path) -> Callable[..., Path]:
    """A tiny random Llama of this test's own, to be broken at will."""

    def build() -> Path:
        path = tmp_path / "model"
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=320,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
        transformers.utils.logging.disable_progress_bar()
        LlamaForCausalLM(config).save_pretrained(path)
        shutil.copy(DEMO_MODEL_PATH / "tokenizer.json", path)
        return path

    return build
