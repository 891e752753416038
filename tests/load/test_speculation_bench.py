"""Models whose text is known, and the bench that lets drafts meet it."""

from __future__ import annotations

import argparse
import json
import random
from itertools import chain
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.load.bench import speculation
from penstock.load.peers import cycles, models

WORDS = models.word_ids("T-cycles")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def _own_models(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of these tests goes to the build folder of the checkout."""
    monkeypatch.setattr(models, "MODELS", folder)


def likeliest_next(name: str, token_ids: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(models.make(name))
    with torch.no_grad():
        found: list[int] = model(torch.tensor([token_ids])).logits[0].argmax(-1).tolist()
    return found


def test_cycles_have_every_word_once() -> None:
    short, long = cycles.short_cycles(WORDS), cycles.long_cycle(WORDS)
    assert {len(cycle) for cycle in short} == {cycles.SHORT_CYCLE}
    assert sorted([*chain(*short), *long]) == list(WORDS)
    assert len(long) > len(WORDS) // 2


def test_the_next_word_is_known_whatever_came_before() -> None:
    """After all words in an order that is no text of the model."""
    words = random.Random(0).sample(WORDS, len(WORDS))
    following = cycles.next_words(WORDS)
    assert likeliest_next("T-cycles", words) == [following[word] for word in words]


def test_the_layers_are_those_of_random_weights() -> None:
    """They are not made smaller; only the first and the last matrix are others."""
    model = AutoModelForCausalLM.from_pretrained(models.make("T-cycles"))
    for name, weights in model.named_parameters():
        if weights.ndim == 2 and "layers" in name:
            assert float(weights.detach().std()) == pytest.approx(0.02, rel=0.05), name
            assert (weights != 0).all(), name


def test_a_prompt_is_copied_and_a_novel_text_has_no_repeats() -> None:
    following = cycles.next_words(WORDS)
    echoed, other = cycles.echoed_prompts(WORDS, 2)
    assert echoed != other
    assert cycles.continuation(echoed, following, len(echoed)) == echoed
    assert cycles.repeat_rate(echoed * 2, len(echoed)) > 0.97
    for prompt in cycles.novel_prompts(WORDS, 3, 128):
        output = cycles.continuation(prompt, following, 128)
        assert len({*prompt, *output}) == 256
        assert cycles.repeat_rate(prompt + output, 128) == 0.0
        misled = cycles.misled(prompt, output)
        assert len(misled) == 128
        assert cycles.continuation(misled, following, 128) == output
        assert cycles.repeat_rate(misled + output, 128, size=3) > 0.2
        assert cycles.repeat_rate(misled + output, 128) == 0.0


def test_repeats_are_counted_in_the_output() -> None:
    """Those that end in it, by its tokens; repeats within the prompt do not count."""
    assert cycles.repeat_rate([1, 1, 1, 1, 1, 2], 5) == 0.0
    assert cycles.repeat_rate([1, 2, 3, 4, 1, 2, 3, 4], 4) == 1 / 4
    assert cycles.repeat_rate([1, 2, 3, 4, 5, 6], 4) == 0.0


def test_a_draft_model_agrees_as_often_as_it_should() -> None:
    """In all words; the share of a text is near that."""
    words = list(WORDS)
    following = cycles.next_words(WORDS, models.DRAFT_AGREEMENT)
    assert sorted(following.values()) == words
    assert likeliest_next("T-draft", words) == [following[word] for word in words]
    right = cycles.next_words(WORDS)
    share = sum(following[word] == right[word] for word in words) / len(words)
    assert share == pytest.approx(models.DRAFT_AGREEMENT, abs=0.001)
    assert speculation.draft_agreement("T") == pytest.approx(models.DRAFT_AGREEMENT, abs=0.05)


@pytest.mark.exhaustive
def test_it_measures_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    speculation.add_arguments(parser)
    arguments = ("--models", "T", "--repeats", "2", "--output-tokens", "48", "--out", str(tmp_path))
    parsed = parser.parse_args(arguments)
    assert speculation.run(parsed) == 0
    printed = capsys.readouterr().out
    data = json.loads((tmp_path / "speculation.json").read_text())
    cases = {each["case"]: each for each in data["cases"]}
    wanted = [case.name for case in speculation.CASES]
    assert list(cases) == wanted
    assert "T-draft's likeliest token" in printed
    assert data["machine"]["cores"] >= 1
    for name in ("prediction", "edited prediction", "echo"):
        assert cases[name]["tokens_per_step"] > 2
    assert cases["prediction"]["accepted_share"] == cases["echo"]["accepted_share"] == 1.0
    assert 0.5 < cases["edited prediction"]["accepted_share"] < 1.0
    assert cases["misled"]["accepted_share"] == 0.0
    assert cases["novel"]["accepted_share"] is None
    assert 0.2 < cases["draft model"]["accepted_share"] < 0.9
    for name in ("novel", "misled", "echo, 32"):
        assert cases[name]["tokens_per_step"] == 1.0
    assert cases["echo"]["repeat_rate"] > 0.9
    assert cases["novel"]["repeat_rate"] == cases["misled"]["repeat_rate"] == 0.0


def test_another_text_than_the_known_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if drafts changed a token."""
    parser = argparse.ArgumentParser()
    speculation.add_arguments(parser)
    parsed = parser.parse_args(["--models", "T", "--only", "echo", "--output-tokens", "8"])
    original = cycles.continuation
    monkeypatch.setattr(cycles, "continuation", lambda *args: original(*args)[::-1])
    with pytest.raises(RuntimeError, match="another text than the known one"):
        speculation.run(parsed)


def test_a_bar_is_for_whole_runs() -> None:
    figures = speculation.Figures(
        case="echo", model="S", num_seqs=1, plain_tokens_per_s=1.0, tokens_per_s=2.0,
        ratio=1.9, ratios=[1.9], decode_ratio=2.5, tokens_per_step=2.0, accepted_share=1.0,
        repeat_rate=1.0, bar=2.0,
    )  # fmt: skip
    assert figures.verdict == "2.00 missed"
