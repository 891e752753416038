"""The models of the comparison: what greedy decoding may pick."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from penstock.load.peers import models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make("T", tmp_path_factory.mktemp("models") / "T")


@pytest.mark.parametrize("name", ["S", "M"])
def test_a_vocabulary_has_every_id_once_and_ends_with_words(name: str) -> None:
    size = models.SHAPES[name].fields["vocab_size"]
    tokens, _, first_word_id = models.vocabulary(size)
    assert len(tokens) == len(set(tokens)) == size
    assert all(text[0] == "Ġ" for text in tokens[first_word_id:])
    assert len(models.word_ids(name)) > 0.9 * size


def test_words_come_back_as_the_tokens_they_were(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    ids = [*models.word_ids("T")][::-1]
    assert tokenizer.encode(tokenizer.decode(ids)).ids == ids


def test_greedy_decoding_picks_words_alone(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        words = torch.tensor(models.word_ids("T")).split(64)[:32]
        logits = model(torch.stack(words)).logits
    assert logits.argmax(-1).min() >= models.word_ids("T").start


def test_the_same_weights_every_time(tiny: Path, tmp_path: Path) -> None:
    again = models.make("T", tmp_path / "T")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (tiny / name).read_bytes()
