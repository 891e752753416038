"""Tiny random checkpoints, written by transformers, and the models transformers reads back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.kernels.cache_folder import CACHE_VARIABLE, cache_dir
from penstock.kernels.cpu.library import load_library

from .greedy_parity import reference_tokens
from .model_families import tiny_config

TinyCheckpoint = Callable[..., Path]
Reference = Callable[..., PreTrainedModel]


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, empty but for kernels in fp32, which are compiled only once."""
    load_library(torch.float32)
    cache = tmp_path / "cache"
    cache.mkdir()
    for file in cache_dir().glob("kernels-*"):
        (cache / file.name).symlink_to(file)
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    return cache


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    """A factory of model directories; equal arguments share one, so leave them as they are.

    Arguments: architecture, dtype, max_shard_size (as transformers takes it), and any field
    of the model's config.
    """
    root = tmp_path_factory.mktemp("checkpoints")

    def build(
        architecture: str = "LlamaForCausalLM",
        *,
        dtype: str = "float32",
        max_shard_size: str = "1GB",
        **overrides: Any,
    ) -> Path:
        options = [architecture, dtype, max_shard_size, overrides]
        name = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:16]
        path = root / name
        if not path.exists():
            model = _random_model(architecture, overrides).to(getattr(torch, dtype))
            model.save_pretrained(path, max_shard_size=max_shard_size)
        return path

    return build


def _random_model(architecture: str, overrides: dict[str, Any]) -> PreTrainedModel:
    config = tiny_config(architecture, **overrides)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of one and biases of zero would hide mistakes
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="session")
def expected_tokens(tiny_checkpoint: TinyCheckpoint) -> Callable[[str], Any]:
    """The reference's model and its greedy tokens, once per architecture."""
    return reference_tokens(tiny_checkpoint)


@pytest.fixture(scope="session")
def reference() -> Reference:
    """transformers' own model of a directory, in float32 unless told otherwise."""

    def load(path: Path, dtype: str = "float32", attention: str = "eager") -> PreTrainedModel:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), attn_implementation=attention
        )
        model.generation_config.pad_token_id = 0
        return model.eval()

    return load
