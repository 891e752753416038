"""Beam search against `transformers`, which runs it from the same logits."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from penstock.engine.request import BeamSearch, FinishReason, SamplingParams, TokenLogprobs
from penstock.engine.scheduling.beam_search import BeamSearchState, Hypothesis
from tests.support.tiers import tiered

VOCAB_SIZE = 160
NUM_NEW = 14
WIDTHS = (1, 2, 4, 7)
LENGTH_PENALTIES = (0.0, 1.0, 2.0, -0.5)
EarlyStopping = bool | Literal["never"]
EARLY_STOPPINGS: tuple[EarlyStopping, ...] = (False, True, "never")


@dataclass
class Searcher:
    """One model and one prompt: searched by the reference, and by us from its logits."""

    model: Any
    prompt: list[int]

    def __post_init__(self) -> None:
        self.logprobs = functools.cache(self._logprobs)

    def _logprobs(self, output: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*self.prompt, *output]])).logits[0, -1]
        return torch.log_softmax(logits.float(), dim=-1)  # [vocab_size]

    def expected(
        self, search: BeamSearch, ends: Sequence[int], min_tokens: int = 0
    ) -> list[tuple[list[int], float]]:
        """All `width` hypotheses of `transformers`: generated tokens and score, best first."""
        # Named, because generate() takes a width of one for greedy search.
        result = self.model.generate(
            torch.tensor([self.prompt]),
            attention_mask=torch.ones(1, len(self.prompt), dtype=torch.long),
            custom_generate=type(self.model)._beam_search,
            do_sample=False,
            num_beams=search.width,
            num_return_sequences=search.width,
            length_penalty=search.length_penalty,
            early_stopping=search.early_stopping,
            max_new_tokens=NUM_NEW,
            min_new_tokens=min_tokens,
            eos_token_id=list(ends) or None,
            return_dict_in_generate=True,
            output_scores=True,
        )
        outputs = result.sequences[:, len(self.prompt) :].tolist()
        return [
            (_cut_after(output, ends), score)
            for output, score in zip(outputs, result.sequences_scores.tolist(), strict=True)
        ]

    def search(self, params: SamplingParams, ends: Sequence[int]) -> tuple[Hypothesis, ...]:
        """Ours, told no more than the candidates it asks for."""
        state = BeamSearchState(
            params, end_token_ids=frozenset(ends), max_output_tokens=params.max_tokens
        )
        beams: list[tuple[int, ...]] = [()]
        while beams:
            rows = [self._row(beam, state.num_candidates) for beam in beams]
            beams = [(*beams[parent], token_id) for parent, token_id in state.advance(rows)]
        return state.hypotheses

    def _row(self, output: tuple[int, ...], num_top: int) -> TokenLogprobs:
        top = self.logprobs(output).topk(num_top)
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True))
        return TokenLogprobs(token_id=pairs[0][0], logprob=pairs[0][1], rank=1, top=pairs)


def _cut_after(output: list[int], ends: Sequence[int]) -> list[int]:
    """Without the padding behind the first token that ends."""
    place = next((i for i, token_id in enumerate(output) if token_id in ends), len(output))
    return output[: place + 1]


def params_of(search: BeamSearch, **more: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": NUM_NEW} | more), n=search.width, beam_search=search)


@pytest.fixture(scope="module")
def searcher(
    tiny_checkpoint: Callable[..., Path], reference: Callable[..., Any]
) -> Callable[[str], Searcher]:
    @functools.cache
    def load(architecture: str) -> Searcher:
        model = reference(tiny_checkpoint(architecture))
        model.generation_config.eos_token_id = None  # the tests say which
        rng = random.Random(5)
        return Searcher(model, [rng.randrange(3, VOCAB_SIZE) for _ in range(20)])

    return load


def likely_ends(searcher: Searcher, num: int) -> list[int]:
    """Tokens that a search without an end meets on its way, so that they end hypotheses early."""
    found = searcher.expected(BeamSearch(width=4), ())
    paths = [token_id for output, _ in found for token_id in output[2::3]]
    return list(dict.fromkeys(paths))[:num]


def check(ours: Sequence[Hypothesis], theirs: Sequence[tuple[list[int], float]]) -> None:
    assert [list(item.token_ids) for item in ours] == [token_ids for token_ids, _ in theirs]
    assert [item.score for item in ours] == pytest.approx([score for _, score in theirs], rel=1e-4)


@pytest.mark.parametrize("early_stopping", tiered(EARLY_STOPPINGS, ["never"]))
def test_hypotheses_equal_those_of_transformers(
    early_stopping: EarlyStopping, searcher: Callable[[str], Searcher]
) -> None:
    model = searcher("LlamaForCausalLM")
    reasons = set()
    for num_ends in (1, 3):
        ends = likely_ends(model, num_ends)
        for width in WIDTHS:
            for length_penalty in LENGTH_PENALTIES:
                search = BeamSearch(
                    width=width, length_penalty=length_penalty, early_stopping=early_stopping
                )
                ours = model.search(params_of(search), ends)
                check(ours, model.expected(search, ends))
                reasons |= {item.finish_reason for item in ours}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}  # both ways to end were seen


@pytest.mark.parametrize("min_tokens", [1, 5, NUM_NEW])
@pytest.mark.parametrize("early_stopping", EARLY_STOPPINGS)
def test_no_hypothesis_ends_before_min_tokens(
    min_tokens: int, early_stopping: EarlyStopping, searcher: Callable[[str], Searcher]
) -> None:
    model = searcher("LlamaForCausalLM")
    ends = likely_ends(model, 6)
    search = BeamSearch(width=4, length_penalty=0.0, early_stopping=early_stopping)
    ours = model.search(params_of(search, min_tokens=min_tokens), ends)
    check(ours, model.expected(search, ends, min_tokens))
    assert all(len(item.token_ids) >= min_tokens for item in ours)


def test_without_an_end_token_every_hypothesis_has_the_full_length(
    searcher: Callable[[str], Searcher],
) -> None:
    model = searcher("Qwen3ForCausalLM")
    search = BeamSearch(width=4)
    ours = model.search(params_of(search), ())
    check(ours, model.expected(search, ()))
    assert {len(item.token_ids) for item in ours} == {NUM_NEW}
    assert {(item.finish_reason, item.stop_token_id) for item in ours} == {
        (FinishReason.LENGTH, None)
    }


def test_an_end_token_at_the_length_limit_is_a_stop(searcher: Callable[[str], Searcher]) -> None:
    model = searcher("LlamaForCausalLM")
    end = int(model.logprobs(()).argmax())
    ours = model.search(params_of(BeamSearch(width=2), max_tokens=1), [end])
    assert [(item.finish_reason, item.stop_token_id) for item in ours] == [
        (FinishReason.STOP, end),
        (FinishReason.LENGTH, None),
    ]


def test_only_the_n_best_are_given(searcher: Callable[[str], Searcher]) -> None:
    model = searcher("LlamaForCausalLM")
    ends = likely_ends(model, 3)
    search = BeamSearch(width=4)
    everything = model.search(params_of(search), ends)
    params = SamplingParams(n=2, max_tokens=NUM_NEW, beam_search=search)
    assert model.search(params, ends) == everything[:2]


def test_logprobs_are_those_of_the_chosen_path(searcher: Callable[[str], Searcher]) -> None:
    model = searcher("LlamaForCausalLM")
    ends = likely_ends(model, 3)
    search = BeamSearch(width=4)
    assert all(item.logprobs == () for item in model.search(params_of(search), ends))
    for item in model.search(params_of(search, logprobs=2), ends):
        assert len(item.logprobs) == len(item.token_ids)
        total = sum(entry.logprob for entry in item.logprobs)
        assert item.score == pytest.approx(total / len(item.token_ids))
        for place, entry in enumerate(item.logprobs):
            expected = model.logprobs(item.token_ids[:place])
            assert entry.token_id == item.token_ids[place]
            assert entry.logprob == pytest.approx(float(expected[entry.token_id]))
            assert entry.rank == int((expected > expected[entry.token_id]).sum()) + 1
            assert [token_id for token_id, _ in entry.top] == expected.topk(2).indices.tolist()


def row(logprobs: dict[int, float]) -> TokenLogprobs:
    top = tuple(sorted(logprobs.items(), key=lambda pair: -pair[1]))
    return TokenLogprobs(token_id=top[0][0], logprob=top[0][1], rank=1, top=top)


def test_a_beam_may_have_several_heirs_or_none() -> None:
    state = BeamSearchState(
        params_of(BeamSearch(width=2)), end_token_ids=frozenset(), max_output_tokens=9
    )
    assert state.advance([row({3: -0.5, 4: -1.0})]) == [(0, 3), (0, 4)]
    assert state.advance([row({5: -3.0, 6: -4.0}), row({7: -0.1, 8: -0.2})]) == [(1, 7), (1, 8)]


def test_of_equals_the_earlier_beam_and_the_lower_token_come_first() -> None:
    state = BeamSearchState(
        params_of(BeamSearch(width=2)), end_token_ids=frozenset(), max_output_tokens=9
    )
    assert state.advance([row({4: -1.0, 3: -1.0})]) == [(0, 3), (0, 4)]
    assert state.advance([row({9: -1.0, 8: -2.0}), row({1: -1.0, 2: -2.0})]) == [(0, 9), (1, 1)]


def test_a_vocabulary_smaller_than_the_width_gives_fewer_beams() -> None:
    state = BeamSearchState(
        params_of(BeamSearch(width=5), max_tokens=2), end_token_ids=frozenset(), max_output_tokens=2
    )
    assert state.advance([row({0: -0.5, 1: -1.0})]) == [(0, 0), (0, 1)]
    assert state.advance([row({0: -0.5, 1: -1.0}), row({0: -0.7, 1: -0.8})]) == []
    assert [item.token_ids for item in state.hypotheses] == [(0, 0), (0, 1), (1, 0), (1, 1)]
