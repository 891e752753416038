from __future__ import annotations

import pytest

from penstock.engine import ModelLoadError
from penstock.engine.model_files.gguf.choice import choose_gguf, labels

FILES = (
    "README.md",
    "mmproj-model-f16.gguf",
    "model-Q4_K_M.gguf",
    "model-Q4_K_S.gguf",
    "model.IQ4_NL.gguf",
    "model-UD-Q8_0-00002-of-00002.gguf",
    "model-UD-Q8_0-00001-of-00002.gguf",
    "BF16/model-00001-of-00002.gguf",
    "BF16/model-00002-of-00002.gguf",
)


@pytest.mark.parametrize(
    ("label", "first", "num_parts"),
    [
        ("Q4_K_M", "model-Q4_K_M.gguf", 1),
        ("q4_k_s", "model-Q4_K_S.gguf", 1),
        ("IQ4_NL", "model.IQ4_NL.gguf", 1),
        ("UD-Q8_0", "model-UD-Q8_0-00001-of-00002.gguf", 2),
        ("Q8_0", "model-UD-Q8_0-00001-of-00002.gguf", 2),
        ("BF16", "BF16/model-00001-of-00002.gguf", 2),
    ],
)
def test_by_its_quantization(label: str, first: str, num_parts: int):
    found = choose_gguf(FILES, label, "here")
    assert (found[0], len(found)) == (first, num_parts)


def test_the_only_one():
    assert choose_gguf(FILES[:3], "", "here") == ("model-Q4_K_M.gguf",)
    assert choose_gguf(FILES[:2], "", "here") == ()


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("Q4_K", "here has no GGUF file of 'Q4_K'; it has BF16/model, model-Q4_K_M,"),
        ("", "here has 5 GGUF models, name one of them: BF16/model, "),
    ],
)
def test_what_is_not_clear_is_refused(label: str, message: str):
    with pytest.raises(ModelLoadError, match=message):
        choose_gguf(FILES, label, "here")


def test_each_has_a_label_that_finds_it():
    found = list(labels(FILES))
    assert [label for label, _ in found] == [
        "BF16/model", "Q4_K_M", "Q4_K_S", "Q8_0", "IQ4_NL"
    ]  # fmt: skip
    for label, files in found:
        assert choose_gguf(FILES, label, "here") == files
    assert dict(labels(["a.gguf", "a-Q4_0.gguf"])) == {"": ("a.gguf",), "Q4_0": ("a-Q4_0.gguf",)}
