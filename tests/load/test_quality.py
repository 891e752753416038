"""The quality bench: its figures are those of their definitions, and of transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.text import Tokenizer
from penstock.load.engine import Setting
from penstock.load.quality import (
    CORPUS,
    LoadedModel,
    Quality,
    Text,
    compare,
    corpus_texts,
    held_out_texts,
)

from .conftest import Penstock

DEMO = resolve_model(ModelConfig(), weights=True)
CALIBRATION = Path(__file__).parents[2] / "engine" / "weights" / "calibration.txt"


def load(setting: str) -> LoadedModel:
    return LoadedModel(Setting.parse(setting).config("demo"))


def qualities(texts: Sequence[Text], *settings: str) -> Mapping[str, Quality]:
    models = {setting: load(setting) for setting in settings}
    return {each.setting: each for each in compare(load("dtype=float32"), models, texts)}


@pytest.fixture(scope="module")
def conversations() -> list[Text]:
    return held_out_texts(DEMO, num_texts=12, seed=1, context_len=2048)


@torch.inference_mode()
def test_float32_has_the_perplexity_of_transformers() -> None:
    tokenizer = Tokenizer.from_directory(DEMO)
    texts = corpus_texts(CORPUS, tokenizer, num_tokens=300, skip=20)[::60]
    assert len(texts) > 5
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    losses = []
    for text in texts:
        ids = torch.tensor([text.token_ids])
        logits = model(ids).logits[0, text.start - 1 : -1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[0, text.start :]))
    exact = math.exp(float(torch.stack(losses).double().mean()))
    found = qualities(texts)["reference"]
    assert found.perplexity == pytest.approx(exact, rel=0.001)
    assert found.num_tokens == sum(len(text.token_ids) - text.start for text in texts)


@pytest.mark.exhaustive
def test_fewer_bits_leave_the_demo_model_its_answers(conversations: list[Text]) -> None:
    """The tolerances, in the order of what they keep; every setting changes something."""
    bars = {"none": 0.0002, "int8": 0.001, "fp8": 0.002, "int4": 0.02}
    bars |= {"kv-cache-dtype=int8": 0.001, "kv-cache-dtype=fp8": 0.002}
    found = qualities(conversations, *bars)
    for name, bar in bars.items():
        assert 0.0 < found[name].kl_mean < bar, name
        assert found[name].kl_mean < found[name].kl_high
        assert found[name].same_top_share > 0.99
        # Answers to known questions: a shifted token would be far off.
        assert found[name].perplexity < 1.1
        assert abs(found[name].loss) < 0.05
    assert len({each.kl_mean for each in found.values()}) == len(found)
    sizes = [found[name].weight_bytes for name in ("reference", "none", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 5 * sizes[-1]


class _Told:
    """A model whose logits are given."""

    vocab_size, weight_bytes = 2, 8

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        assert len(token_ids) == len(self._logits)
        return self._logits

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        return hidden.log_softmax(1)


def test_figures_are_those_of_their_definitions() -> None:
    """Of three tokens the last two are judged, by what was predicted before them."""
    exact, rounded = torch.tensor([[0.75, 0.25], [0.5, 0.5], [1, 0]]), torch.full((3, 2), 0.5)
    rounded[0, 1] = 1.5  # likelier now: 0.25 and 0.75
    reference, model = (cast("LoadedModel", _Told(each.log())) for each in (exact, rounded))
    own, found = compare(reference, {"other": model}, [Text([1, 0, 1], 1)])
    kl = 0.75 * math.log(3) - 0.25 * math.log(3)
    assert found.num_tokens == 2
    assert found.kl_mean == pytest.approx(kl / 2)
    assert found.kl_high == pytest.approx(0.999 * kl)
    assert found.same_top_share == 0.5
    assert own.perplexity == pytest.approx(1 / math.sqrt(0.75 * 0.5))
    assert found.perplexity == pytest.approx(1 / math.sqrt(0.25 * 0.5))
    assert found.loss == pytest.approx(math.sqrt(3) - 1)


# -- texts ---------------------------------------------------------------------------------------


class _Words:
    """A tokenizer whose tokens are words, by their lengths, after a begin token 0."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + list(map(len, text.split()))


def test_a_corpus_in_chunks(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("four five six seven eight nine ten")
    (tmp_path / "a.txt").write_text("one two three ")
    (tmp_path / "README.md").write_text("not of the corpus")
    tokenizer = cast("Tokenizer", _Words())
    texts = corpus_texts(tmp_path, tokenizer, num_tokens=4)
    assert [text.token_ids for text in texts] == [[0, 3, 3, 5], [0, 4, 4, 3], [0, 5, 5, 4]]
    assert {text.start for text in texts} == {1}
    assert {each.start for each in corpus_texts(tmp_path, tokenizer, num_tokens=4, skip=2)} == {2}
    assert corpus_texts(tmp_path / "a.txt", tokenizer, num_tokens=4) == texts[:1]
    with pytest.raises(ConfigError, match=r"a\.txt: 3 tokens are less than a chunk"):
        corpus_texts(tmp_path / "a.txt", tokenizer, num_tokens=5)
    with pytest.raises(ConfigError, match=r"c\.txt: .*No such file"):
        corpus_texts(tmp_path / "c.txt", tokenizer, num_tokens=4)
    with pytest.raises(ConfigError, match="--skip 4 leaves nothing of chunks of 4 tokens"):
        corpus_texts(tmp_path, tokenizer, num_tokens=4, skip=4)


def test_the_text_for_calibration_is_not_in_the_corpus() -> None:
    """No 80 characters of it, wherever they begin."""
    corpus = "".join(file.read_text("utf-8") for file in CORPUS.glob("*.txt"))
    assert len(corpus.encode()) > 220_000
    calibration = CALIBRATION.read_text("utf-8")
    assert len(calibration.encode()) < 14_000  # 4,000 tokens
    there = {corpus[at : at + 80] for at in range(len(corpus) - 80)}
    pieces = (calibration[at : at + 80] for at in range(len(calibration) - 80))
    assert [piece for piece in pieces if piece in there] == []


# -- the command ----------------------------------------------------------------------------------


def test_it_prints_and_writes_what_it_measured(penstock: Penstock, tmp_path: Path) -> None:
    done = penstock(
        "bench", "quality", "--settings", "int8", "kv-cache-dtype=int8", "--num-texts", "2",
        "--out", str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 3
    assert set(rows) <= set((tmp_path / "quality.md").read_text().splitlines())
    figures = json.loads((tmp_path / "quality.json").read_text())
    assert (figures["model"], figures["num_texts"]) == ("demo", 2)
    names = [each["setting"] for each in figures["qualities"]]
    assert names == ["reference", "int8", "kv-cache-dtype=int8"]
