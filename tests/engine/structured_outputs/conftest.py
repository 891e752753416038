"""The demo model's vocabulary."""

from __future__ import annotations

import pytest

from penstock.engine.config import ModelConfig
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.engine.text import Tokenizer

PATH = resolve_model(ModelConfig(), weights=False)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(PATH)


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(PATH, vocab_size=1024, eos_token_ids=(4,))


def check_texts(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    grammar: StructuredOutputs | None,
    *,
    matching: list[str],
    others: list[str],
) -> None:
    """A grammar takes the texts that match, whole, and not the others."""
    assert grammar is not None
    for text in (*matching, *others):
        matcher = compiler.matcher(grammar)
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        is_match = matcher.try_consume_tokens(token_ids) == len(token_ids)
        assert (is_match and matcher.is_accepting()) == (text in matching), text
