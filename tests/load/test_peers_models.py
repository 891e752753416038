"""The models of the comparison: what greedy decoding may pick, and that text gives it back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.load.peers import models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make("T", tmp_path_factory.mktemp("models") / "T")


@pytest.mark.parametrize("name", ["S", "M"])
def test_a_vocabulary_has_every_id_once_and_ends_with_words(name: str) -> None:
    size = models.SHAPES[name].fields["vocab_size"]
    vocabulary = models.vocabulary(size)
    assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == size
    assert all(text[0] == " " for text in list(models.words(name))[vocabulary.first_word_id :])
    assert len(models.word_ids(name)) > 0.9 * size


def test_words_come_back_as_the_tokens_they_were(tiny: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny / "tokenizer.json"))
    ids = [*models.word_ids("T")][::-1]
    text = tokenizer.decode(ids)
    words = models.words("T")
    assert text == "".join(words[token_id] for token_id in ids)
    assert tokenizer.encode(text).ids == ids


def test_a_conversation_keeps_the_tokens_of_its_answers(tiny: Path) -> None:
    """The rendered history begins with the very tokens that were computed."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    answer_ids = list(models.word_ids("T"))[7:20]

    def render(messages: list[dict[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    first = [{"role": "user", "content": models.words("T")[900]}]
    answer = {"role": "assistant", "content": tokenizer.decode(answer_ids)}
    second = [*first, answer, {"role": "user", "content": models.words("T")[901]}]
    computed = render(first) + answer_ids
    assert render(second)[: len(computed)] == computed


def test_greedy_decoding_picks_words_alone(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        words = torch.tensor(models.word_ids("T")).split(64)[:32]
        answer_begins = models.SPECIAL_TOKENS.index(models.ANSWER_BEGINS)
        prompts = torch.nn.functional.pad(torch.stack(words), (0, 1), value=answer_begins)
        logits = model(prompts).logits
    assert logits.argmax(-1).min() >= models.word_ids("T").start


def test_the_same_weights_every_time(tiny: Path, tmp_path: Path) -> None:
    again = models.make("T", tmp_path / "T")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (tiny / name).read_bytes()
