"""The demo model's vocabulary."""

from __future__ import annotations

import pytest

from penstock.engine.config import ModelConfig
from penstock.engine.model_files import resolve_model
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.text import Tokenizer

PATH = resolve_model(ModelConfig(), weights=False)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(PATH)


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(PATH, vocab_size=1024, eos_token_ids=(4,))
