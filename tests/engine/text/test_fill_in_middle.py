"""The tokens around a gap, by the names that families give them or by a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from penstock.engine.text import Tokenizer
from penstock.engine.text.fill_in_middle import FillInMiddle

BEFORE, AFTER = [1, 2], [3]


def tokenizer_with(*added: str, begins: bool = False) -> Tokenizer:
    """Ten words, and after them the added tokens."""
    words = {"<s>": 0, **{chr(ord("a") + number): number + 1 for number in range(9)}}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(list(added))
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("added", "prompt", "ends"),
    [
        (
            ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
             "<|file_sep|>"],
            [10, 1, 2, 12, 3, 11], {10, 11, 12, 13, 14, 15},
        ),
        (["<fim_prefix>", "<fim_middle>", "<fim_suffix>"], [10, 1, 2, 12, 3, 11], {10, 11, 12}),
        (
            ["<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"],
            [11, 1, 2, 10, 3, 12], {10, 11, 12},
        ),
        (
            ["▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"],
            [10, 1, 2, 12, 3, 11], {10, 11, 12, 13},
        ),
        (["[SUFFIX]", "[PREFIX]", "[MIDDLE]"], [10, 3, 11, 1, 2], {10, 11}),
    ],
    ids=["Qwen", "StarCoder", "DeepSeek", "CodeLlama", "Codestral"],
)  # fmt: skip
def test_the_tokens_of_a_family(
    added: list[str], prompt: list[int], ends: set[int], tmp_path: Path
) -> None:
    found = FillInMiddle.read(tmp_path, tokenizer_with(*added))
    assert found is not None
    assert found.prompt(BEFORE, AFTER) == prompt
    assert set(found.ends) == ends
    assert found.num_tokens == len(prompt) - 3


def test_a_prompt_begins_as_every_text_does(tmp_path: Path) -> None:
    tokenizer = tokenizer_with("<fim_prefix>", "<fim_middle>", "<fim_suffix>", begins=True)
    found = FillInMiddle.read(tmp_path, tokenizer)
    assert found is not None
    assert found.prompt(BEFORE, AFTER) == [0, 10, 1, 2, 12, 3, 11]
    assert found.prompt(BEFORE, AFTER, has_start=False) == [10, 1, 2, 12, 3, 11]
    assert found.prompt(BEFORE, AFTER, context=[7])[:2] == [7, 0]


@pytest.mark.parametrize("added", [[], ["<fim_prefix>", "<|fim_middle|>", "<fim_suffix>"]])
def test_a_model_without_them(added: list[str], tmp_path: Path) -> None:
    assert FillInMiddle.read(tmp_path, tokenizer_with(*added)) is None
