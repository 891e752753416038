"""Models and servers for whole-stack tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.engine.model_files import DEMO_MODEL_PATH

from ..clients.packages import langchain, node_modules
from .processes import Served, lengthen, serve

__all__ = ["demo_server", "langchain", "long_model", "node_modules", "tiny_model"]


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments of `serve`: the demo model with room for answers that do not end."""
    return lengthen(tmp_path_factory.mktemp("long"))


@pytest.fixture(scope="session")
def demo_server(
    long_model: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """One server of that model in fp32, for tests that leave it as it was."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(*long_model, "--dtype", "float32", log=log) as served:
        yield served


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
