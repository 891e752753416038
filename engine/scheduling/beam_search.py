"""Beam search: which beams continue, and which outputs are the best.

Source: `transformers` (`GenerationMixin._beam_search`), followed for one prompt without sampling:
the same tokens, scores and order of hypotheses.

A pure algorithm: its input is the likeliest next tokens of every beam, step by step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.engine.request import FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """A finished output.

    Attributes:
        token_ids: the generated tokens, including the one that ended the hypothesis.
        score: summed log-probability ÷ length ** length_penalty.
        stop_token_id: the EOS or stop id that ended the hypothesis; None if its grammar or the
            length limit did.
        logprobs: one entry per token, or empty if `SamplingParams.logprobs` is None.
    """

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    stop_token_id: int | None
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class _Beam:
    """A path of tokens, linked backwards, so that a step's cost does not grow with its length."""

    parent: _Beam | None
    entry: TokenLogprobs  # of the newest token
    logprob: float  # of the whole path


class _Candidate(NamedTuple):
    """Sorts like torch.topk: likelier first; of equals, the lower index in a flat [beam, token]."""

    cost: float  # minus the log-probability of the whole path
    parent: int  # index of the beam it continues
    token_id: int
    column: int  # within that beam's list


@dataclass(frozen=True, slots=True)
class _Finished:
    score: float
    beam: _Beam | None  # None: the prompt is the whole of it
    finish_reason: FinishReason
    stop_token_id: int | None = None


_NO_TOKENS = TokenLogprobs(token_id=-1, logprob=0.0, rank=0)


class BeamSearchState:
    """The search for one request.

        next_beams = state.advance([row of the prompt])
        while next_beams:
            next_beams = state.advance([row of each of next_beams, in that order])
        state.hypotheses

    Args:
        params: with `beam_search` set.
        end_token_ids: EOS (unless ignored) and stop tokens.
        max_output_tokens: length limit of every hypothesis, at least 1.
    """

    def __init__(
        self, params: SamplingParams, *, end_token_ids: frozenset[int], max_output_tokens: int
    ) -> None:
        assert params.beam_search is not None
        assert max_output_tokens >= 1
        self._params = params
        self._search = params.beam_search
        self._end_token_ids = end_token_ids
        self._max_output_tokens = max_output_tokens
        self._num_tokens = 0
        self._beams: list[_Beam | None] = [None]  # the prompt has no generated token
        self._finished: list[_Finished] = []  # best first, at most `width`

    @property
    def num_candidates(self) -> int:
        """How many of its likeliest tokens each beam must report."""
        # A step uses two lists over all beams: the `width` likeliest candidates (some may finish)
        # and the `width` likeliest that are not end tokens (they continue). No beam contributes
        # more than `width` to either. Its part of the first is within its own `width` likeliest;
        # its part of the second is preceded by at most `width` - 1 other continuing tokens and all
        # end tokens. `transformers` takes the second list from the (1 + number of end tokens) ×
        # width likeliest over all beams, or twice `width` if that is more; since at most (number of
        # end tokens) × width candidates end, it loses none of them.
        return self._search.width + len(self._end_token_ids)

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The n best, best first; final once `advance` returned no beams. There may be fewer."""
        return tuple(_hypothesis(self._params, item) for item in self._finished[: self._params.n])

    def advance(self, rows: Sequence[TokenLogprobs | FinishReason]) -> list[tuple[int, int]]:
        """Process one step.

        Args:
            rows: for each beam, in the order of the last result, its `num_candidates` likeliest
                tokens as `top`; in the first call a single row, the prompt's. Instead, for a beam
                that no token can follow: `STOP` if it is a whole output, or `GRAMMAR`.

        Returns:
            the next beams, best first, as (index of the parent beam, token id), at most `width` of
            them; empty when the search has ended.
        """
        assert len(rows) == len(self._beams)
        whole = [
            self._whole(beam)
            for beam, row in zip(self._beams, rows, strict=True)
            if row is FinishReason.STOP
        ]
        lists = [row if isinstance(row, TokenLogprobs) else _NO_TOKENS for row in rows]
        self._num_tokens += 1
        candidates = sorted(
            item for parent, row in enumerate(lists) for item in self._candidates(parent, row)
        )
        width = self._search.width
        ended = [item for item in candidates[:width] if self._ends(item)]
        self._finish(whole + [self._ended(lists, item) for item in ended])
        alive = [item for item in candidates if not self._ends(item)][:width]
        if not alive or not self._can_improve(-alive[0].cost):
            self._beams = []
            return []
        self._beams = [self._grow(lists, item) for item in alive]
        return [(item.parent, item.token_id) for item in alive]

    def _candidates(self, parent: int, row: TokenLogprobs) -> list[_Candidate]:
        beam = self._beams[parent]
        logprob = 0.0 if beam is None else beam.logprob
        may_end = self._num_tokens > self._params.min_tokens
        return [
            _Candidate(-(logprob + step), parent, token_id, column)
            for column, (token_id, step) in enumerate(row.top)
            if may_end or token_id not in self._end_token_ids
        ]

    def _ends(self, item: _Candidate) -> bool:
        is_full = self._num_tokens >= self._max_output_tokens
        return is_full or item.token_id in self._end_token_ids

    def _grow(self, rows: Sequence[TokenLogprobs], item: _Candidate) -> _Beam:
        top = rows[item.parent].top
        token_id, logprob = top[item.column]
        entry = TokenLogprobs(
            token_id=token_id,
            logprob=logprob,
            rank=1 + sum(other > logprob for _, other in top[: item.column]),
            top=top[: self._params.logprobs or 0],
        )
        return _Beam(self._beams[item.parent], entry, -item.cost)

    def _ended(self, rows: Sequence[TokenLogprobs], item: _Candidate) -> _Finished:
        is_stop = item.token_id in self._end_token_ids
        return _Finished(
            score=self._score(-item.cost, self._num_tokens),
            beam=self._grow(rows, item),
            finish_reason=FinishReason.STOP if is_stop else FinishReason.LENGTH,
            stop_token_id=item.token_id if is_stop else None,
        )

    def _whole(self, beam: _Beam | None) -> _Finished:
        logprob = 0.0 if beam is None else beam.logprob
        score = self._score(logprob, max(self._num_tokens, 1))
        return _Finished(score=score, beam=beam, finish_reason=FinishReason.STOP)

    def _finish(self, finished: Sequence[_Finished]) -> None:
        """Keep the `width` best of all finished ones; of equals, those that ended first."""
        self._finished += finished
        self._finished.sort(key=lambda item: -item.score)
        del self._finished[self._search.width :]

    def _score(self, logprob: float, num_tokens: int) -> float:
        return logprob / math.pow(num_tokens, self._search.length_penalty)

    def _can_improve(self, best_logprob: float) -> bool:
        """Whether the likeliest running beam could still beat a finished hypothesis."""
        search = self._search
        if len(self._finished) < search.width:
            return True
        if search.early_stopping is True:
            return False
        # "never" assumes the maximum length where the penalty rewards length.
        is_patient = search.early_stopping == "never" and search.length_penalty > 0.0
        num_tokens = self._max_output_tokens if is_patient else self._num_tokens
        return self._score(best_logprob, num_tokens) > self._finished[-1].score


def _hypothesis(params: SamplingParams, item: _Finished) -> Hypothesis:
    entries: list[TokenLogprobs] = []
    beam = item.beam
    while beam is not None:
        entries.append(beam.entry)
        beam = beam.parent
    entries.reverse()
    return Hypothesis(
        token_ids=tuple(entry.token_id for entry in entries),
        score=item.score,
        finish_reason=item.finish_reason,
        stop_token_id=item.stop_token_id,
        logprobs=() if params.logprobs is None else tuple(entries),
    )
