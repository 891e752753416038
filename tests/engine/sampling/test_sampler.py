"""The sampling recipe against one row at a time in plain Python, and its promises.

In torch, with the CPU's kernels, and on a GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.sampling.sample import Row, Sample

from penstock.engine.request import SamplingParams
from penstock.engine.sampling.grammars import SequenceGrammar
from penstock.engine.sampling.token_limits import limits_of
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.kernels.reference.draw_uniforms import as_draws, draw_uniforms_reference

EOS = (2,)
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(
    scope="module",
    params=["torch", "kernels", pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_GPU])],
)
def sample(request: pytest.FixtureRequest) -> Sample:
    device = "cuda" if request.param == "cuda" else "cpu"
    return Sample(device, has_kernels=request.param == "kernels")


def row(
    token_ids: Sequence[int] = (5, 6, 7), *, num_prompt: int = 2, index: int = 0, **params: Any
) -> Row:
    return Row(
        params=SamplingParams(**{"max_tokens": 100} | params),
        token_ids=list(token_ids),
        num_prompt_tokens=num_prompt,
        index=index,
        num_logprobs=params.get("logprobs"),
    )


def logits_of(*rows: Sequence[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3


# -- the recipe, written again --------------------------------------------------------------


def naive_logits(logits: np.ndarray, item: Row) -> np.ndarray:
    """Everything before the temperature."""
    logits = logits.copy()
    params = item.params
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    for token_id in set(item.token_ids):
        penalty = params.repetition_penalty
        logits[token_id] *= penalty if logits[token_id] <= 0 else 1 / penalty
    for token_id, count in Counter(item.token_ids[item.num_prompt_tokens :]).items():
        logits[token_id] -= params.frequency_penalty * count + params.presence_penalty
    if len(item.token_ids) - item.num_prompt_tokens < params.min_tokens:
        logits[[*EOS, *params.stop_token_ids]] = -np.inf
    if params.top_n_sigma > 0:
        logits[logits < _sigma_threshold(logits, params)] = -np.inf
    return logits


def _sigma_threshold(logits: np.ndarray, params: SamplingParams) -> float:
    possible = logits[logits > -np.inf]
    return float(possible.max() - params.top_n_sigma * possible.std())


def naive_probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    vocab_size = len(logits)
    order = np.argsort(-logits, kind="stable")
    scaled = logits / params.temperature
    kept = np.ones(vocab_size, dtype=bool)
    if 0 < params.top_k < vocab_size:
        kept[order[params.top_k :]] = False
    weights = np.where(kept, np.exp(scaled - scaled.max()), 0)
    weights /= weights.sum()
    if params.top_p < 1:
        reached = 0.0
        for token_id in order:
            kept[token_id] &= reached < params.top_p
            reached += weights[token_id]
    kept &= weights >= params.min_p * weights.max()
    weights = np.where(kept, weights, 0)
    return weights / weights.sum()


@st.composite
def sampling_params(draw: st.DrawFn) -> dict[str, Any]:
    def maybe(name: str, strategy: st.SearchStrategy[Any]) -> dict[str, Any]:
        return {name: draw(strategy)} if draw(st.booleans()) else {}

    token_ids = st.integers(0, 11)
    penalty = st.floats(-2, 2, width=16)
    return {
        **maybe("temperature", st.sampled_from([0.0, 0.3, 1.0, 1.7])),
        **maybe("top_k", st.integers(-1, 14)),
        **maybe("top_p", st.floats(0.0625, 1, width=16)),
        **maybe("min_p", st.floats(0, 1, width=16)),
        **maybe("top_n_sigma", st.sampled_from([-1.0, 0.0, 0.25, 1.0, 1.5, 3.0])),
        **maybe("repetition_penalty", st.floats(0.5, 2, width=16)),
        **maybe("frequency_penalty", penalty),
        **maybe("presence_penalty", penalty),
        **maybe("logit_bias", st.dictionaries(token_ids, st.floats(-9, 9, width=16), max_size=3)),
        **maybe("min_tokens", st.integers(0, 8)),
        **maybe("stop_token_ids", st.tuples(token_ids)),
        "seed": draw(st.integers(0, 2**64 - 1)),
    }


@settings(max_examples=120, deadline=None)
@given(
    st.lists(sampling_params(), min_size=1, max_size=4),
    st.lists(st.integers(0, 11), min_size=3, max_size=9),
    st.integers(0, 1000),
)
def test_equals_the_recipe_row_by_row(sample, all_params, token_ids, seed):
    logits = random_logits(len(all_params), 12, seed)
    rows = [row(token_ids, index=i, **params) for i, params in enumerate(all_params)]
    results = sample(logits.clone(), rows, EOS)
    for i, (item, result) in enumerate(zip(rows, results, strict=True)):
        exact = naive_logits(logits[i].double().numpy(), item)
        if item.params.temperature == 0.0:
            assert exact[result.token_id] == pytest.approx(exact.max(), abs=1e-5)
            continue
        probabilities = naive_probabilities(exact, item.params)
        cumulative = probabilities.cumsum()
        draw = as_draws([item.params.seed], [item.index], [len(item.token_ids)])
        uniform = float(draw_uniforms_reference(draw))
        expected = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
        is_borderline = np.abs(cumulative - uniform).min() < 1e-5
        assert result.token_id == expected or is_borderline or _is_cut_close(exact, item.params)


def _is_cut_close(logits: np.ndarray, params: SamplingParams) -> bool:
    """Whether rounding decides what top-p or min-p keeps."""
    plain = SamplingParams(temperature=params.temperature, top_k=params.top_k)
    weights = np.sort(naive_probabilities(logits, plain))[::-1]
    return bool(
        np.abs(weights.cumsum() - params.top_p).min() < 1e-5
        or np.abs(weights / weights[0] - params.min_p).min() < 1e-5
    )


# -- promises -------------------------------------------------------------------------------


def mixed_rows() -> list[Row]:
    return [
        row(temperature=0.0, logprobs=3),
        row(seed=1, top_p=0.9),
        row(seed=2, top_k=4, logprobs=0),
        row(seed=3, min_p=0.2, repetition_penalty=1.3),
        row(seed=4, frequency_penalty=0.5, presence_penalty=0.5, index=2),
        row(seed=5, logit_bias={3: 5.0}, min_tokens=9, logprobs=20),
        row(seed=6, temperature=0.4, top_k=50, top_p=0.5),
        row(seed=7, temperature=3.0, top_n_sigma=1.2),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(sample, dtype):
    rows = mixed_rows()
    logits = random_logits(len(rows), 1500).to(dtype)  # bfloat16 brings many ties
    together = sample(logits.clone(), rows, EOS)
    alone = [sample(logits[i : i + 1].clone(), [item], EOS)[0] for i, item in enumerate(rows)]
    assert together == alone
    assert together[::-1] == sample(logits.flip(0), rows[::-1], EOS)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("broken", range(8))
def test_a_broken_row_is_marked_and_spoils_no_other(sample, broken, bad):
    rows = mixed_rows()
    logits = random_logits(len(rows), 50)
    healthy = sample(logits.clone(), rows, EOS)
    logits[broken, 7] = bad
    results = sample(logits, rows, EOS)
    assert [result.is_valid for result in results] == [i != broken for i in range(len(rows))]
    assert 0 <= results[broken].token_id < 50
    del results[broken], healthy[broken]
    assert results == healthy


def test_a_row_after_drafts_equals_that_of_a_shorter_sequence(sample):
    """In successive steps, of which the first guesses wrong."""
    kinds: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2, "logit_bias": {3: 5.0}, "logprobs": 2},
        {"seed": 3, "top_n_sigma": 1.2, "temperature": 3.0},
        {"seed": 4, "min_tokens": 4, "stop_token_ids": tuple(range(10, 40))},
        {"seed": 5, "frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"seed": 6, "repetition_penalty": 1.5},
        {"temperature": 0.0, "repetition_penalty": 0.5, "frequency_penalty": -2.0},
    ]
    rows = [row([5, 6, 7], **params) for params in kinds]
    logits = random_logits(4 * len(rows), 50)
    for known, drafts in ([], [7, 8, 9]), ([7, 6], [6, 6, 7]), ([7, 6, 6], [9, 9, 6]):
        for item in rows:
            item.token_ids[3:] = known + drafts
        shorter = [
            row([5, 6, 7, *known, *drafts[:number]], **params)
            for params in kinds
            for number in range(len(drafts) + 1)
        ]
        assert sample(logits, rows, EOS, num_drafts=3) == sample(logits, shorter, EOS)


def limited(token_ids: list[int], **params: Any) -> Row:
    """A row whose tokens its request's own lists limit; its prompt has one token."""
    item = row(token_ids, num_prompt=1, **params)
    compiler = GrammarCompiler(Path(), vocab_size=50, eos_token_ids=())
    item.grammar = SequenceGrammar(
        compiler,
        None,
        item.token_ids,
        1,
        min_tokens=0,
        end_token_ids=(),
        never_token_ids=(),
        is_beam=False,
        limits=limits_of(item.params, 50),
    )
    return item


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_limited_tokens_after_drafts(sample, temperature):
    """Beside rows without limits, which change in nothing."""
    bad = ((7,), (8, 9), (3, 8, 4), (49, 49))
    lists: list[dict[str, Any]] = [
        {"allowed_token_ids": (8, 9, 49)},
        {"bad_words_token_ids": bad},
        {"allowed_token_ids": (4, 8, 9, 60), "bad_words_token_ids": bad, "logit_bias": {7: 50.0}},
    ]
    drafts = [3, 8, 9]
    for seed in range(40):
        common = {"temperature": temperature, "seed": seed}
        plain = row([3, *drafts], num_prompt=1, **common)
        rows = [plain, *(limited([3, *drafts], **each, **common) for each in lists)]
        logits = random_logits(4 * len(rows), 50, seed)
        logits[:, [4, 7, 8, 9, 49]] += 3
        results = sample(logits, rows, num_drafts=3)
        shorter = [row([3, *drafts[:number]], num_prompt=1, **common) for number in range(4)]
        assert results[:4] == sample(logits[:4], shorter)
        for number, params in enumerate(lists, 1):
            for place in range(4):
                token_id = results[4 * number + place].token_id
                before = drafts[:place]
                assert token_id in params.get("allowed_token_ids", range(50))
                for words in params.get("bad_words_token_ids", ()):
                    had = before[place - len(words) + 1 :] if len(words) > 1 else []
                    is_bad = len(before) >= len(words) - 1 and (*had, token_id) == words
                    assert not is_bad, (params, before, token_id)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_everything_masked_is_marked(sample, temperature):
    item = row(temperature=temperature, min_tokens=9, stop_token_ids=(0, 1, 2, 3))
    (result,) = sample(random_logits(1, 4), [item], EOS)
    assert not result.is_valid


def test_draws_follow_the_distribution(sample):
    logits = logits_of([2.0, 1.0, 0.0, -1.0, -3.0])
    rows = [row(seed=seed, temperature=1.3) for seed in range(20_000)]
    counts = Counter(
        result.token_id for result in sample(logits.expand(len(rows), -1).clone(), rows)
    )
    probabilities = (logits[0] / 1.3).softmax(0).tolist()
    for token_id, probability in enumerate(probabilities):
        deviation = (len(rows) * probability * (1 - probability)) ** 0.5
        assert abs(counts[token_id] - len(rows) * probability) < 4 * deviation


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "top_p": 0.95, "min_p": 0.01}, {0, 1, 2}),
        # The deviation of the five logits is √2.
        ({"top_n_sigma": 1.0}, {0, 1}),
        ({"top_n_sigma": 1.5, "temperature": 50.0}, {0, 1, 2}),
        ({"top_n_sigma": 0.5}, {0}),
        ({"top_n_sigma": 1.5, "top_k": 2}, {0, 1}),
        ({"top_n_sigma": -1.0, "temperature": 50.0}, {0, 1, 2, 3, 4}),
        # Of the four that are left it is √1.25; a row of one logit keeps it.
        ({"top_n_sigma": 1.8, "min_tokens": 9, "stop_token_ids": (0,)}, {1, 2, 3}),
        ({"top_n_sigma": 1.7, "min_tokens": 9, "stop_token_ids": (0,)}, {1, 2}),
        ({"top_n_sigma": 1.0, "min_tokens": 9, "stop_token_ids": (0, 1, 2, 3)}, {4}),
        ({"temperature": 1e-40}, {0}),
        ({"logit_bias": {99: 50.0, -1: 50.0}, "top_k": 1}, {0}),
    ],
)
def test_what_is_kept(sample, params, kept):
    logits = logits_of([3.0, 2.0, 1.0, 0.0, -1.0])
    rows = [row(seed=seed, **params) for seed in range(800)]
    results = sample(logits.expand(len(rows), -1).clone(), rows)
    assert all(result.is_valid for result in results)
    assert {result.token_id for result in results} == kept


def test_a_flat_nucleus_larger_than_the_shortcut(sample):
    rows = [row(seed=seed, top_p=0.9) for seed in range(300)]
    logits = torch.linspace(1e-3, 0, 4000).expand(300, -1).clone()
    token_ids = [result.token_id for result in sample(logits, rows)]
    assert 3400 < max(token_ids) < 3602


def test_ties_at_the_cut_are_kept(sample):
    rows = [row(seed=seed, top_k=1) for seed in range(100)]
    logits = logits_of([1.0, 1.0, 0.0]).expand(100, -1).clone()
    assert {result.token_id for result in sample(logits, rows)} == {0, 1}


def test_penalties_apply_to_greedy_rows(sample):
    logits = logits_of([0.0, 1.0, 1.1, 1.2])
    rows = [
        row([3, 3], num_prompt=2, temperature=0.0),
        row([3, 3], num_prompt=2, temperature=0.0, repetition_penalty=1.5),
        row([3, 3], num_prompt=2, temperature=0.0, frequency_penalty=2.0),
        row([3, 2, 3], num_prompt=2, temperature=0.0, presence_penalty=0.5),
        row([0, 3, 2, 2], num_prompt=1, temperature=0.0, frequency_penalty=0.15),
    ]
    results = sample(logits.expand(5, -1).clone(), rows)
    assert [result.token_id for result in results] == [3, 2, 3, 2, 3]


def test_a_repetition_penalty_lowers_negative_logits_too(sample):
    logits = logits_of([-1.0, -1.2, -2.0]).expand(2, -1).clone()
    rows = [
        row([0, 2], num_prompt=1, temperature=0.0, repetition_penalty=penalty)
        for penalty in (1.0, 1.3)
    ]
    assert [result.token_id for result in sample(logits, rows)] == [0, 1]


def test_penalties_follow_a_sequence_as_it_grows(sample):
    """Each token is punished from the step after it was sampled, a prompt's never."""
    logits = logits_of([0.0, 1.0, 2.0, 3.0])
    token_ids = [3]
    params = SamplingParams(temperature=0.0, frequency_penalty=0.9)
    item = Row(params=params, token_ids=token_ids, num_prompt_tokens=1, index=0)
    for _ in range(6):
        (result,) = sample(logits, [item])
        token_ids.append(result.token_id)
    assert token_ids == [3, 3, 3, 2, 3, 2, 1]


def test_min_tokens_masks_eos_and_stop_tokens(sample):
    logits = logits_of([0.0, 1.0, 5.0, 4.0])
    rows = [
        row([1, 1], num_prompt=1, temperature=0.0, min_tokens=2, stop_token_ids=(3,)),
        row([1, 1, 1], num_prompt=1, temperature=0.0, min_tokens=2, stop_token_ids=(3,)),
        row([1, 1], num_prompt=1, temperature=0.0, min_tokens=2, stop_token_ids=(99,)),
    ]
    results = sample(logits.expand(3, -1).clone(), rows, EOS)
    assert [result.token_id for result in results] == [1, 2, 3]


def test_logprobs_are_of_the_unmodified_logits(sample):
    logits = logits_of([0.0, 1.0, 3.0, 2.0])
    params = {"temperature": 0.0, "logit_bias": {1: 9.0}, "top_k": 1}
    result, silent = sample(
        logits.expand(2, -1).clone(), [row(logprobs=2, **params), row(**params)]
    )
    expected = logits[0].log_softmax(0).tolist()
    assert silent.logprobs is None
    assert result.logprobs is not None
    assert result.logprobs.token_id == result.token_id == 1
    assert result.logprobs.rank == 3
    assert result.logprobs.logprob == pytest.approx(expected[1], abs=1e-6)
    assert [token_id for token_id, _ in result.logprobs.top] == [2, 3]
    assert [value for _, value in result.logprobs.top] == pytest.approx(
        [expected[2], expected[3]], abs=1e-6
    )


def test_logprobs_of_the_chosen_token_alone(sample):
    (result,) = sample(random_logits(1, 10), [row(logprobs=0)])
    assert result.logprobs is not None
    assert result.logprobs.top == ()


def test_logprobs_are_of_the_number_the_row_says(sample):
    """A beam search takes far more than a user may ask for; the parameters do not decide."""
    logits = random_logits(4, 1000)
    rows = [
        replace(row(seed=seed, logprobs=logprobs), num_logprobs=count)
        for seed, (logprobs, count) in enumerate([(None, 200), (5, None), (3, 200), (None, 0)])
    ]
    results = [result.logprobs for result in sample(logits.clone(), rows)]
    assert results[1] is None
    expected = logits.log_softmax(-1)
    for place, count in ((0, 200), (2, 200), (3, 0)):
        entry = results[place]
        assert entry is not None
        values, token_ids = expected[place].topk(count)
        assert [token_id for token_id, _ in entry.top] == token_ids.tolist()
        assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_more_logprobs_than_tokens(sample):
    (result,) = sample(random_logits(1, 10), [replace(row(), num_logprobs=200)])
    assert result.logprobs is not None
    assert {token_id for token_id, _ in result.logprobs.top} == set(range(10))
