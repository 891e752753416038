"""One request, several sequences: samples of one prompt, and beams.

Both are forks of block tables. Samples part once, when the prompt is computed: each computes its
last token again, for a draw of its own. Beams part at every step: the next beams fork from those
that live on, then all the old ones leave.

Knows how sequences come from each other; the roster knows where they then are.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from penstock.engine.request import (
    FinishReason,
    Notice,
    Request,
    RequestOutput,
    Sequence,
    SequenceStatus,
    TokenLogprobs,
)
from penstock.engine.scheduling.beam_search import BeamSearchState
from penstock.engine.scheduling.roster import Roster
from penstock.engine.scheduling.stopping import StopRule


@dataclass(slots=True)
class LiveRequest:
    """A request and the sequences that answer it.

    Attributes:
        sequences: those not finished, by seq_id.
        num_unforked: samples yet to part from the first.
        aborted: indices of samples given up before they had parted.
        beams: in the order the search knows them, and what each has reported of this step.
        is_parked: of a beam search, whether its client was told that it is.
    """

    request: Request
    sequences: dict[int, Sequence] = field(default_factory=dict)
    num_unforked: int = 0
    aborted: set[int] = field(default_factory=set)
    num_cached_tokens: int = 0
    search: BeamSearchState | None = None
    beams: list[Sequence] = field(default_factory=list)
    rows: dict[int, TokenLogprobs] = field(default_factory=dict)
    is_parked: bool = False

    @property
    def num_forks(self) -> int:
        """Sequences that the one running now will soon have beside it."""
        if self.search is not None and self.beams[0].num_output_tokens == 0:
            return self.request.sampling_params.num_branches - 1
        return self.num_unforked

    def notice(self, sequence: Sequence, notice: Notice) -> RequestOutput | None:
        """What to tell the client when a sequence was parked or is back: of samples each, of a
        beam search only whether all of it runs."""
        if self.search is not None:
            is_parked = any(
                each.status is not SequenceStatus.RUNNING for each in self.sequences.values()
            )
            if is_parked == self.is_parked:
                return None
            self.is_parked = is_parked
        return RequestOutput(
            request_id=self.request.request_id,
            index=0 if self.search is not None else sequence.index,
            notice=notice,
        )


class Branches:
    """Makes the sequences of requests."""

    def __init__(self, roster: Roster, stop_rule: StopRule) -> None:
        self._roster = roster
        self._stop_rule = stop_rule
        self._next_seq_id = itertools.count()

    def start(self, request: Request) -> LiveRequest:
        """The first sequence of a request; it waits."""
        params = request.sampling_params
        live = LiveRequest(request)
        root = Sequence(request, seq_id=next(self._next_seq_id))
        live.sequences[root.seq_id] = root
        if params.beam_search is not None:
            room = self._stop_rule.max_model_len - len(request.prompt_token_ids)
            live.beams = [root]
            live.search = BeamSearchState(
                params,
                end_token_ids=self._stop_rule.end_token_ids(params),
                max_output_tokens=min(params.max_tokens, room),
            )
        else:
            live.num_unforked = params.num_branches - 1
        self._roster.enlist(root)
        return live

    def fork_samples(self, live: LiveRequest, root: Sequence) -> None:
        """Let the other samples part from the first: its prompt is computed."""
        self._roster.reserved.pop(root.seq_id, None)
        num_shared = root.num_prompt_tokens - 1  # the last is computed by each, for its draw
        for index in range(1, live.num_unforked + 1):
            if index in live.aborted:
                continue
            child = Sequence(live.request, seq_id=next(self._next_seq_id), index=index)
            live.sequences[child.seq_id] = child
            self._roster.fork(root, child, num_tokens=num_shared)
            self._roster.place_fork(child)
        live.num_unforked = 0

    def take_row(
        self, live: LiveRequest, sequence: Sequence, row: TokenLogprobs
    ) -> tuple[RequestOutput, ...]:
        """A beam reports its likeliest next tokens; with the last of them the search goes on.
        What it found, when it ends."""
        assert live.search is not None
        live.rows[sequence.seq_id] = row
        sequence.num_in_flight_tokens -= 1
        self._roster.waiting.discard(sequence)  # parked meanwhile, it has nothing left to compute
        if len(live.rows) < len(live.beams):
            return ()
        parents = live.beams
        # The first row is the prompt's: its sequence keeps places for the beams to come.
        self._roster.reserved.pop(sequence.seq_id, None)
        chosen = live.search.advance([live.rows[beam.seq_id] for beam in parents])
        live.rows = {}
        live.num_cached_tokens += sum(beam.num_cached_tokens for beam in parents)
        live.beams = [
            self._fork_beam(parents[parent], token_id, index=index)
            for index, (parent, token_id) in enumerate(chosen)
        ]
        for beam in parents:
            self._roster.remove(beam, retention=live.request.retention if not chosen else None)
        live.sequences = {beam.seq_id: beam for beam in live.beams}
        for beam in live.beams:
            self._roster.place_fork(beam)
        return () if chosen else _found(live) or (failure(live, index=0, is_last=True),)

    def _fork_beam(self, parent: Sequence, token_id: int, *, index: int) -> Sequence:
        child = Sequence(parent.request, seq_id=next(self._next_seq_id), index=index)
        child.token_ids = [*parent.token_ids, token_id]
        child.num_prompt_logprobs = parent.num_prompt_logprobs
        self._roster.fork(parent, child, num_tokens=len(parent.token_ids))
        return child


def _found(live: LiveRequest) -> tuple[RequestOutput, ...]:
    """The outputs of a beam search that has ended, best first."""
    assert live.search is not None
    hypotheses = live.search.hypotheses
    return tuple(
        RequestOutput(
            request_id=live.request.request_id,
            index=index,
            token_ids=hypothesis.token_ids,
            logprobs=hypothesis.logprobs,
            finish_reason=hypothesis.finish_reason,
            is_last=index == len(hypotheses) - 1,
            stop_token_id=hypothesis.stop_token_id,
            num_cached_tokens=live.num_cached_tokens if index == 0 else 0,
            score=hypothesis.score,
        )
        for index, hypothesis in enumerate(hypotheses)
    )


def failure(live: LiveRequest, *, index: int, is_last: bool) -> RequestOutput:
    """The end of a sequence whose next token the model could not give."""
    return RequestOutput(
        request_id=live.request.request_id,
        index=index,
        finish_reason=FinishReason.ERROR,
        is_last=is_last,
        error="the model's logits are not a distribution (NaN, or every token is masked)",
    )
