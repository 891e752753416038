"""A real encoder: all-MiniLM-L6-v2."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from penstock.engine import LLM
from tests.support.real_models import minilm_folder

pytestmark = [pytest.mark.exhaustive, pytest.mark.external]
TEXTS = (
    "A cat sits on the mat.",
    "A kitten rests on a rug.",
    "The stock market fell by three percent today.",
    "Ein Satz auf Deutsch, mit Umlauten: äöü ß — and 日本語.",
    "word " * 200,
)


@torch.inference_mode()
def test_vectors_are_those_of_transformers() -> None:
    path = minilm_folder()
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path)
    expected = []
    for text in TEXTS:
        encoded = tokenizer(text, return_tensors="pt")
        mean = model(**encoded).last_hidden_state.mean(dim=1)
        expected.append(torch.nn.functional.normalize(mean)[0])
    with LLM(str(path)) as llm:
        found = torch.tensor(llm.embed(TEXTS, use_tqdm=False))
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-5)
    near, far = found[0] @ found[1], found[0] @ found[2]
    assert near > far + 0.3
