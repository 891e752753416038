"""Which sequences get how many drafts in a step, as they turn out to be right or wrong.

Drafts only take what a step has to spare: the tokens that it computes in about the time of one,
beside nothing but decoding sequences; and free blocks, so that nobody is preempted for
them. A sequence whose drafts are right gets more of them, one whose drafts are wrong gets fewer,
then none for a while.

By the method `auto` they are copied on evidence only: once as many tokens as `_FIRST_EVIDENCE` have
been those of an earlier text. Right drafts are evidence of more, so a copy that leaves the text for
a few tokens is taken up soon; after wrong ones it takes a longer match each time. A sequence that
is alone in a step, and whose drafts were all right, gets up to twice the rows that cost little.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from operator import attrgetter

from penstock.engine.batch import Batch, BatchResult, ScheduledSequence
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig, SpeculativeConfig
from penstock.engine.request import Request, Sequence
from penstock.engine.speculative.policy.finished_outputs import FinishedOutputs
from penstock.engine.speculative.policy.ngram import NgramDrafter

_FIRST_LIMIT = 3  # drafts of a sequence that has had none yet
_MAX_PAUSE = 32  # steps without drafts after wrong ones
# Tokens that must match before others are drafted by the method `auto`: in a new sequence, in one
# whose drafts were right, and at most.
_FIRST_EVIDENCE, _LEAST_EVIDENCE, _MOST_EVIDENCE = 8, 3, 64
# Steps from one look for it to the next, since one takes a twentieth of a small model's step. After
# so many looks in vain it is twice as many.
_LEAST_SPACING, _MOST_SPACING, _LOOKS_EACH = 4, 16, 4
# Steps from one question to the grammars, what they force, to the next, at most; after so many in
# vain it is twice as many. By the method `auto`, since one takes a thirtieth of such a step.
_MOST_BETWEEN_QUESTIONS, _QUESTIONS_EACH = 8, 8
# Of a draft model, whose guesses are right independently of each other, at some rate. A guess costs
# a pass of that model, perhaps a tenth of a step, for all the tokens of the step: it must be right
# that often together with those before it.
_LEAST_CHANCE = 0.25
_LEAST_RATE = 0.2  # at which it still drafts
_RATE_WEIGHT = 0.1  # of the newest guess in the mean


@dataclass(slots=True)
class DraftCounters:
    """Totals, by vLLM's meanings.

    Attributes:
        num_drafts: how often a sequence had drafts in a step.
        num_draft_tokens: drafts.
        num_accepted_tokens: those that were right.
        accepted_by_position: of them, how many were the first, second … of their step.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_by_position: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Drafted:
    """A sequence that may have drafts.

    Attributes:
        limit: on the drafts of its next step.
        evidence: tokens that must match before drafts are copied; 0: as few as are looked up.
        drafter: made when it is first looked for drafts: many sequences at once leave no room.
        num_misses: steps in a row in which the first draft was wrong.
        num_looks: looks for evidence in a row that found too little.
        rate: a moving mean of the draft model's guesses that were right, of those checked.
        resumes_at: the step before which it has no drafts but forced ones.
        forced: tokens that must come next, as the device says.
        is_forced: its latest drafts were such.
    """

    sequence: Sequence
    limit: int
    evidence: int = 0
    drafter: NgramDrafter | None = None
    num_misses: int = 0
    num_looks: int = 0
    rate: float = 0.7
    resumes_at: int = 0
    forced: tuple[int, ...] = ()
    is_forced: bool = False


_RESUMES_AT = attrgetter("resumes_at")


class Drafting:
    """
    Args:
        config: its `speculation` is None: only requests with a prediction get drafts.
        num_tokens_left: how many tokens a sequence may still get.

    Attributes:
        num_verify_rows: tokens that a step computes in about the time of one: there is room for
            drafts beside fewer sequences.
        drafted: the sequences that may get drafts, by seq_id.
        num_with_drafts: steps with drafts that `observe` has not seen yet.
        has_forced: whether some next tokens are forced.
        step: counts those that had room for drafts.
        next_step: the first that may have some; where nothing repeats, few do.
        next_question: the step from which grammars are asked what they force.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        num_tokens_left: Callable[[Sequence], int],
        *,
        num_verify_rows: int,
    ) -> None:
        self.num_verify_rows = num_verify_rows
        self.counters = DraftCounters()
        speculation = config.speculation
        self._is_for_all = speculation is not None
        self._has_draft_model = speculation is not None and speculation.model is not None
        self._needs_evidence = speculation is not None and speculation.method == "auto"
        self._config = speculation or SpeculativeConfig()
        self._max_num_tokens = config.max_num_batched_tokens
        self._blocks = blocks
        self._num_tokens_left = num_tokens_left
        self.drafted: dict[int, _Drafted] = {}
        self._finished_outputs = FinishedOutputs()  # empty unless drafts are for all
        self.has_forced = False
        self.num_with_drafts = self.step = self.next_step = self.next_question = 0
        self._num_questions = 0  # in vain, one after the other
        self._first_look = 0  # a step in which sequences look for evidence; all do in the same

    def enter(self, sequence: Sequence) -> bool:
        """A sequence enters the device; whether it may get drafts."""
        if sequence.seq_id in self.drafted:
            return True
        params, has_prediction = sequence.params, bool(sequence.request.prediction_token_ids)
        needs_evidence = self._needs_evidence and not has_prediction
        # Who asks for each token's log-probability gets each as an event, unless drafts were asked
        # for too.
        is_for_it = self._is_for_all and not (needs_evidence and params.logprobs is not None)
        if not (params.speculation and (is_for_it or has_prediction)):
            return False
        # One token or none leaves no room, and beams fork at every step.
        if params.max_tokens < 2 or params.beam_search is not None:
            return False
        limit = min(_FIRST_LIMIT, self._config.num_speculative_tokens)
        evidence = _FIRST_EVIDENCE if needs_evidence else 0
        self.drafted[sequence.seq_id] = _Drafted(sequence, limit, evidence)
        self.next_step = self.next_question = self._num_questions = 0
        return True

    def are_told(self, request: Request) -> bool:
        """Whether a request's outputs say how many drafts there were: not where nobody asked for
        any."""
        return not self._needs_evidence or bool(request.prediction_token_ids)

    def awaits(self, sequence: Sequence) -> bool:
        """Whether a sequence should get its next tokens only when those in flight are known, since
        there are drafts for what comes after them."""
        drafted = self.drafted.get(sequence.seq_id)
        if drafted is None or len(self.drafted) >= self.num_verify_rows:
            return False
        if drafted.forced or drafted.resumes_at > self.step + 1:
            return bool(drafted.forced)
        return self._has_draft_model or bool(self._copied(drafted, 1))

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended; its output is kept for its siblings."""
        drafted = self.drafted.pop(sequence.seq_id, None)
        if drafted is not None and self._is_for_all:
            self._finished_outputs.add(sequence)

    def drop_prefix(self, token_ids: Ordered[int], *, cache_salt: str) -> None:
        """Forget the outputs to prompts that begin like these tokens."""
        self._finished_outputs.drop(token_ids, cache_salt=cache_salt)

    def add_drafts(self, scheduled: dict[int, ScheduledSequence]) -> bool:
        """Add drafts to a planned step whose tokens are counted as computed; whether any were."""
        number = len(scheduled)
        num_rows = min(self._most_rows(number), self._max_num_tokens) - number
        if num_rows <= 0:
            return False
        for item in scheduled.values():
            if item.num_new_tokens > 1:
                return False
        has_drafts = False
        for seq_id, item in scheduled.items():
            share = -(-num_rows // number)
            number -= 1
            drafted = self.drafted.get(seq_id)
            if drafted is not None and share > 0:
                drafting = self._with_drafts(drafted, item, share, num_spared=len(scheduled))
                if drafting is not None:
                    scheduled[seq_id], has_drafts = drafting, True
                    num_rows -= drafting.num_drafts
        self.next_step = 0
        if len(self.drafted) == len(scheduled) and not self.has_forced:
            self.next_step = min(map(_RESUMES_AT, self.drafted.values()))
        self.num_with_drafts += has_drafts
        return has_drafts

    def observe(self, batch: Batch, result: BatchResult) -> None:
        """Note which drafts of a step were right, and what is forced after it."""
        if batch.wants_forced and self._needs_evidence:
            self._num_questions = 0 if result.forced_token_ids else self._num_questions + 1
            spacing = 1 << self._num_questions // _QUESTIONS_EACH
            self.next_question = self.step + min(spacing, _MOST_BETWEEN_QUESTIONS)
        if not (self.num_with_drafts or self.has_forced or result.forced_token_ids):
            return
        self.num_with_drafts -= any(item.num_drafts for item in batch.scheduled)
        counters = self.counters
        for item in batch.scheduled:
            drafted = self.drafted.get(item.seq_id)
            if drafted is not None:
                drafted.forced = result.forced_token_ids.get(item.seq_id, ())
            num_drafts = item.num_drafts
            token_ids = result.token_ids.get(item.seq_id, ())
            if not num_drafts or not token_ids:
                continue
            num_right = len(token_ids) - 1
            counters.num_drafts += 1
            counters.num_draft_tokens += num_drafts
            counters.num_accepted_tokens += num_right
            by_position = counters.accepted_by_position
            by_position += [0] * (num_right - len(by_position))
            for position in range(num_right):
                by_position[position] += 1
            if drafted is None or drafted.is_forced:
                continue
            if item.num_wanted_drafts:
                self._adapt_to_rate(drafted, num_drafts, num_right)
            else:
                self._adapt(drafted, num_drafts, num_right)
        self.has_forced = any(each.forced for each in self.drafted.values())
        if self.has_forced:
            self.next_step = 0

    def _most_rows(self, num_sequences: int) -> int:
        is_alone = self._needs_evidence and num_sequences == 1
        return self.num_verify_rows << is_alone

    def _with_drafts(
        self, drafted: _Drafted, item: ScheduledSequence, num_rows: int, *, num_spared: int
    ) -> ScheduledSequence | None:
        """A sequence's share of a step with drafts, at most `num_rows`; None: it gets none.

        Args:
            num_spared: blocks that must stay free: one for each sequence to grow into.
        """
        is_paused = drafted.resumes_at > self.step
        if is_paused and not drafted.forced:
            return None
        sequence = drafted.sequence
        num_tokens = len(sequence.token_ids)
        if sequence.num_computed_tokens != num_tokens or sequence.num_in_flight_tokens != 1:
            return None  # a token before the drafts is not known yet
        if sequence.num_output_tokens == 0:
            return None  # samples fork at their first token
        most = self._config.num_speculative_tokens
        drafts = drafted.forced
        drafted.is_forced = bool(drafts)
        if not drafts:
            most = min(drafted.limit, num_rows)
            drafts = self._copied(drafted, most)
            if not (drafts or self._has_draft_model):
                return None  # often: nothing is computed for it
        most = min(most, num_rows, self._num_tokens_left(sequence) - 1)
        if most <= 0:
            return None
        drafts = drafts[:most]
        num_drafts = len(drafts) or most
        new_block_ids = self._blocks.grow_if_free(
            sequence, num_tokens + num_drafts, num_spared=num_spared
        )
        if new_block_ids is None:
            return None
        sequence.num_draft_tokens = num_drafts
        sequence.num_computed_tokens += num_drafts
        return ScheduledSequence(
            seq_id=item.seq_id,
            num_new_tokens=item.num_new_tokens + num_drafts,
            new_block_ids=item.new_block_ids + new_block_ids,
            entry=item.entry,
            draft_token_ids=drafts,
            num_wanted_drafts=0 if drafts else num_drafts,
        )

    def _copied(self, drafted: _Drafted, limit: int) -> tuple[int, ...]:
        """Drafts that are copied from text; where there are none, later steps do not look."""
        sequence, drafter = drafted.sequence, drafted.drafter
        if drafter is None:
            if len(self.drafted) == 1:
                self._first_look = self.step
            drafter = drafted.drafter = NgramDrafter(
                sequence.token_ids,
                num_prompt_tokens=sequence.num_prompt_tokens,
                sizes=self._config.lookup_sizes,
                prediction=sequence.request.prediction_token_ids,
                sibling=self._finished_outputs.find(sequence.request),
            )
        drafts = drafter.propose(limit, num_matched=drafted.evidence)
        if self._has_draft_model and not drafter.is_predicted:
            return ()
        if drafts:
            drafted.num_looks = 0
        elif drafted.evidence:
            spacing = _LEAST_SPACING << drafted.num_looks // _LOOKS_EACH
            since_look = (self.step - self._first_look) % _LEAST_SPACING
            drafted.resumes_at = self.step - since_look + min(spacing, _MOST_SPACING)
            drafted.num_looks += 1
        return drafts

    def _adapt_to_rate(self, drafted: _Drafted, num_drafts: int, num_right: int) -> None:
        for is_right in [1.0] * num_right + [0.0] * (num_right < num_drafts):
            drafted.rate += _RATE_WEIGHT * (is_right - drafted.rate)
        if drafted.rate < _LEAST_RATE:
            drafted.rate, drafted.resumes_at = _LEAST_RATE, self.step + 1 + _MAX_PAUSE
        num_likely = int(math.log(_LEAST_CHANCE) / math.log(min(drafted.rate, 0.99)))
        drafted.limit = max(1, min(num_likely, self._config.num_speculative_tokens))

    def _adapt(self, drafted: _Drafted, num_drafts: int, num_right: int) -> None:
        if num_right:
            drafted.num_misses = 0
            drafted.evidence = min(drafted.evidence, _LEAST_EVIDENCE)
            if num_right == num_drafts:
                most = self._config.num_speculative_tokens
                drafted.limit = min(2 * drafted.limit + 1, most)
            else:
                drafted.limit = min(num_right, self.num_verify_rows - 1)
            return
        drafted.num_misses += 1
        drafted.evidence = min(2 * drafted.evidence, _MOST_EVIDENCE)
        drafted.limit = 1
        pause = min(1 << (drafted.num_misses - 1), _MAX_PAUSE)
        drafted.resumes_at = self.step + 1 + pause
