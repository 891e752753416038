"""From a step's result to requests' outputs: appends tokens, detects ends, forks branches.

    StopRule         when a sequence ends: EOS, stop ids, loops, length (not stop strings)
    LiveRequest      what becomes of a request's tokens, where one sequence answers it
    Samples, Beams   the same for several: samples of one prompt, and a beam search
    OutputProcessor  applies a step's result, sequence by sequence

Samples and beams are forks of block tables. Samples fork once, when the prompt is computed: each
computes its last token again, for a draw of its own. Beams fork at every step: the next beams fork
from the surviving ones, then all old ones are removed.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.request import (
    FinishReason,
    Notice,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
    SequenceStatus,
    Spent,
    TokenLogprobs,
)
from penstock.engine.scheduling.beam_search import BeamSearchState
from penstock.engine.scheduling.running_set import RunningSet, SchedulerCounters
from penstock.engine.speculative.policy.drafting import Drafting

_TELL_US = 50_000  # of compute, after which a running branch tells what it spent


class StopRule:
    """Decides, token by token, whether a sequence ends.

    Args:
        eos_token_ids: the model's ids that end a text.
        max_model_len: maximum number of prompt and output tokens.
    """

    def __init__(self, *, eos_token_ids: tuple[int, ...], max_model_len: int) -> None:
        self._eos_token_ids = frozenset(eos_token_ids)
        self.max_model_len = max_model_len

    def end_token_ids(self, params: SamplingParams) -> frozenset[int]:
        """Every id that ends a sequence with these parameters."""
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self._eos_token_ids

    def check(self, sequence: Sequence) -> FinishReason | None:
        """Why the sequence ends with its newest token; None if it continues."""
        params, token_ids = sequence.params, sequence.token_ids
        newest, num_output_tokens = token_ids[-1], len(token_ids) - sequence.num_prompt_tokens
        is_end = newest in params.stop_token_ids or (
            newest in self._eos_token_ids and not params.ignore_eos
        )
        if is_end and num_output_tokens >= params.min_tokens:
            return FinishReason.STOP
        # Nearly always None, and a call costs more than that to see.
        if params.repetition_detection is not None and params.ends_in_loop(
            token_ids, num_output_tokens
        ):
            return FinishReason.REPETITION
        is_full = num_output_tokens >= params.max_tokens or len(token_ids) >= self.max_model_len
        return FinishReason.LENGTH if is_full else None

    def num_tokens_left(self, sequence: Sequence) -> int:
        """How many tokens the sequence may still get."""
        of_output = sequence.params.max_tokens - sequence.num_output_tokens
        return min(of_output, self.max_model_len - len(sequence.token_ids))

    def fills(self, sequence: Sequence, *, num_tokens: int) -> bool:
        """Whether `num_tokens` tokens of prompt and output reach a length limit."""
        num_output_tokens = num_tokens - sequence.num_prompt_tokens
        max_tokens = sequence.request.sampling_params.max_tokens
        return num_output_tokens >= max_tokens or num_tokens >= self.max_model_len


class SequenceSet:
    """Makes, extends and ends the sequences of requests.

    Args:
        requests: live requests by id; finished ones are removed.
    """

    def __init__(
        self,
        requests: dict[str, LiveRequest],
        running_set: RunningSet,
        stop_rule: StopRule,
        counters: SchedulerCounters,
        drafting: Drafting,
    ) -> None:
        self.requests, self.running_set, self.stop_rule = requests, running_set, stop_rule
        self.counters, self.drafting = counters, drafting
        self._next_seq_id = itertools.count()

    def make(self, request: Request, *, index: int = 0) -> Sequence:
        return Sequence(request, seq_id=next(self._next_seq_id), index=index)

    def finish(
        self, live: LiveRequest, sequence: Sequence, *, has_invalid_kv: bool = False
    ) -> None:
        """End a sequence, and its request if it was the last one."""
        self.running_set.remove(
            sequence, retention=live.request.retention, has_invalid_kv=has_invalid_kv
        )
        self.drafting.forget(sequence)
        del live.sequences[sequence.seq_id]
        if not live.sequences:
            del self.requests[live.request.request_id]

    def spent(self, branch: Sequence | Beams) -> Spent:
        """What a branch, or the beams of a search, spent and nobody was told yet."""
        if isinstance(branch, Sequence):
            self.running_set.blocks.charge(branch)
        spent = Spent(compute_us=int(branch.compute_us), block_us=int(branch.block_us))
        branch.compute_us -= spent.compute_us
        branch.block_us -= spent.block_us
        self.counters.spent_compute_us += spent.compute_us
        self.counters.spent_block_us += spent.block_us
        return spent


class LiveRequest:
    """A request and the sequence that answers it.

    Attributes:
        sequences: the unfinished ones, by seq_id.
        is_parked: whether its client was told that it was preempted, if that is of the request.
    """

    is_parked = False

    def __init__(self, request: Request, all_sequences: SequenceSet) -> None:
        self.request, self._all = request, all_sequences
        root = all_sequences.make(request)
        self.sequences = {root.seq_id: root}
        all_sequences.running_set.add(root)

    @property
    def num_forks(self) -> int:
        """Sequences that will soon fork from the one running now."""
        return 0

    @property
    def num_logprobs(self) -> int | None:
        """How many of the likeliest tokens it needs with each."""
        return self.request.sampling_params.num_logprobs

    def notice(self, sequence: Sequence, notice: Notice) -> RequestOutput | None:
        """The output that reports a sequence as preempted or resumed, if the client should know."""
        return RequestOutput(
            request_id=self.request.request_id, index=sequence.index, notice=notice
        )

    def abort(self, index: int | None) -> None:
        """Drop all, or one sample."""
        for sequence in list(self.sequences.values()):
            if index is None or sequence.index == index:
                self._all.finish(self, sequence)

    def add_tokens(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> tuple[RequestOutput, ...]:
        """Add a sequence's new tokens."""
        num_kept, reason = 0, None
        if sequence.params.max_tokens == 0:
            reason = FinishReason.LENGTH
        else:
            known, check = sequence.token_ids, self._all.stop_rule.check
            for token_id in token_ids:
                known.append(token_id)
                num_kept += 1
                reason = check(sequence)
                if reason is not None:
                    break  # tokens sampled after the end are dropped
            self._all.counters.generation_tokens += num_kept
        if sequence.num_draft_tokens:  # wrong ones, and the newest token, have no KV of their own
            sequence.num_computed_tokens = len(sequence.token_ids) - 1
            sequence.num_draft_tokens = 0
        output = RequestOutput(
            request_id=self.request.request_id,
            token_ids=token_ids if reason is None else token_ids[:num_kept],
        )
        if sequence.index:
            output.index = sequence.index
        if logprobs or prompt_logprobs:
            output.logprobs, output.prompt_logprobs = logprobs[:num_kept], prompt_logprobs
        if sequence.num_cached_tokens:
            output.num_cached_tokens, sequence.num_cached_tokens = sequence.num_cached_tokens, 0
            output.num_host_cached_tokens = sequence.num_host_cached_tokens
        if reason is not None:
            output.prefix_id = self._all.running_set.blocks.prefix_id(sequence)
            self._all.finish(self, sequence)
            output.finish_reason = reason
            output.is_last = not self.sequences
            if reason is FinishReason.STOP:
                output.stop_token_id = sequence.token_ids[-1]
            output.spent = self._all.spent(sequence)
        elif sequence.compute_us >= _TELL_US:
            output.spent = self._all.spent(sequence)
        return (output,)

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> tuple[RequestOutput, ...]:
        """End a sequence for which there is no next token."""
        prefix_id = self._all.running_set.blocks.prefix_id(sequence)
        self._all.finish(self, sequence)
        return (
            RequestOutput(
                request_id=self.request.request_id,
                index=sequence.index,
                prompt_logprobs=prompt_logprobs,
                finish_reason=reason,
                is_last=not self.sequences,
                prefix_id=prefix_id,
                spent=self._all.spent(sequence),
            ),
        )

    def fail(self, sequence: Sequence) -> RequestOutput:
        """End a sequence for which the model gave no valid logits, or no vector."""
        self._all.finish(self, sequence, has_invalid_kv=True)
        return self._failure(sequence.index)

    def _failure(self, index: int) -> RequestOutput:
        error = "the model's logits are not a distribution (NaN, or every token is masked)"
        if self.request.pooling is not None:
            error = "the model's hidden states are not finite numbers"
        return RequestOutput(
            request_id=self.request.request_id,
            index=index,
            finish_reason=FinishReason.ERROR,
            is_last=not self.sequences,
            error=error,
        )


class Samples(LiveRequest):
    """A request that several samples answer, which fork when its prompt is computed."""

    def __init__(self, request: Request, all_sequences: SequenceSet) -> None:
        super().__init__(request, all_sequences)
        self._num_unforked = request.sampling_params.num_branches - 1
        self._aborted: set[int] = set()  # before they forked

    @property
    def num_forks(self) -> int:
        return self._num_unforked

    def abort(self, index: int | None) -> None:
        if index is not None and self._num_unforked:
            self._aborted.add(index)  # it ends when the samples fork
            if len(self._aborted) <= self._num_unforked:
                return
            index = None
        super().abort(index)

    def add_tokens(self, sequence: Sequence, *new: Any) -> tuple[RequestOutput, ...]:
        if self._num_unforked:
            self._fork(sequence)
            if sequence.index in self._aborted:
                self._all.finish(self, sequence)
                return ()
        return super().add_tokens(sequence, *new)

    def _fork(self, root: Sequence) -> None:
        """Fork the other samples from the first, whose prompt is computed."""
        running_set = self._all.running_set
        running_set.reserved.pop(root.seq_id, None)
        num_shared = root.num_prompt_tokens - 1  # each computes the last one again, for its draw
        for index in range(1, self._num_unforked + 1):
            if index in self._aborted:
                continue
            child = self._all.make(self.request, index=index)
            self.sequences[child.seq_id] = child
            running_set.fork(root, child, num_tokens=num_shared)
            running_set.place_fork(child)
        self._num_unforked = 0

    def end(self, sequence: Sequence, *why: Any) -> tuple[RequestOutput, ...]:
        # The other samples, if they are still to be forked, would end in the same way.
        unforked, self._num_unforked = range(1, self._num_unforked + 1), 0
        (first,) = super().end(sequence, *why)
        others = [
            msgspec.structs.replace(first, index=each, prompt_logprobs=(), spent=None)
            for each in unforked
        ]
        outputs = tuple(each for each in (first, *others) if each.index not in self._aborted)
        is_last, outputs[0].spent = first.is_last, first.spent
        for output in outputs:
            output.is_last = is_last and output is outputs[-1]
        return outputs

    def fail(self, sequence: Sequence) -> RequestOutput:
        self._num_unforked = 0  # the other samples would get the same logits
        return super().fail(sequence)


class Beams(LiveRequest):
    """A beam search. The next beams fork from the surviving ones, then all old ones are removed."""

    def __init__(self, request: Request, all_sequences: SequenceSet) -> None:
        super().__init__(request, all_sequences)
        params, stop_rule = request.sampling_params, all_sequences.stop_rule
        room = stop_rule.max_model_len - len(request.prompt_token_ids)
        self._search = BeamSearchState(
            params,
            end_token_ids=stop_rule.end_token_ids(params),
            max_output_tokens=min(params.max_tokens, room),
        )
        self._beams = list(self.sequences.values())  # in the order of the search's last result
        # What each beam has reported in this step, by seq_id: its likeliest next tokens, or why
        # there is none.
        self._rows: dict[int, TokenLogprobs | FinishReason] = {}
        # Of the beams that have ended.
        self.num_cached_tokens = self.num_host_cached_tokens = 0
        self.compute_us = self.block_us = 0.0

    @property
    def num_forks(self) -> int:
        is_new = self._beams[0].num_output_tokens == 0
        return self.request.sampling_params.num_branches - 1 if is_new else 0

    @property
    def num_logprobs(self) -> int:
        return self._search.num_candidates

    def notice(self, _: Sequence, notice: Notice) -> RequestOutput | None:
        """Only whether all beams run."""
        is_parked = any(
            each.status is not SequenceStatus.RUNNING for each in self.sequences.values()
        )
        if is_parked == self.is_parked:
            return None
        self.is_parked = is_parked
        return RequestOutput(request_id=self.request.request_id, index=0, notice=notice)

    def abort(self, _: int | None) -> None:
        super().abort(None)

    def add_tokens(
        self,
        sequence: Sequence,
        _: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> tuple[RequestOutput, ...]:
        return self._report(sequence, logprobs[0], prompt_logprobs)

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> tuple[RequestOutput, ...]:
        sequence.num_in_flight_tokens -= 1
        return self._report(sequence, reason, prompt_logprobs)

    def fail(self, _: Sequence) -> RequestOutput:
        for each in list(self.sequences.values()):
            self._all.finish(self, each, has_invalid_kv=True)
        return self._failure(0)

    def _report(
        self,
        sequence: Sequence,
        row: TokenLogprobs | FinishReason,
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> tuple[RequestOutput, ...]:
        """Record a beam's row, and advance the search when all beams have reported; the outputs,
        when the search ends."""
        self._rows[sequence.seq_id] = row
        # If it was preempted meanwhile, it has nothing left to compute.
        self._all.running_set.waiting.discard(sequence)
        found: tuple[RequestOutput, ...] = ()
        if len(self._rows) == len(self._beams):
            found = self._advance(sequence)
        if prompt_logprobs:
            request_id = self.request.request_id
            return RequestOutput(request_id=request_id, prompt_logprobs=prompt_logprobs), *found
        return found

    def _advance(self, last: Sequence) -> tuple[RequestOutput, ...]:
        parents, running_set = self._beams, self._all.running_set
        # The prompt's sequence, which reports first, reserved slots for the beams.
        running_set.reserved.pop(last.seq_id, None)
        chosen = self._search.advance([self._rows[beam.seq_id] for beam in parents])
        self._rows = {}
        self._beams = [
            self._fork(parents[parent], token_id, index=index)
            for index, (parent, token_id) in enumerate(chosen)
        ]
        for beam in parents:
            running_set.remove(beam, retention=self.request.retention if not chosen else None)
            self.num_cached_tokens += beam.num_cached_tokens
            self.num_host_cached_tokens += beam.num_host_cached_tokens
            self.compute_us += beam.compute_us
            self.block_us += beam.block_us
        self.sequences = {beam.seq_id: beam for beam in self._beams}
        for beam in self._beams:
            running_set.place_fork(beam)
        if chosen:
            return ()
        found = self._found()
        found[0].spent = self._all.spent(self)
        self._all.counters.generation_tokens += sum(len(each.token_ids) for each in found)
        del self._all.requests[self.request.request_id]
        return found

    def _fork(self, parent: Sequence, token_id: int, *, index: int) -> Sequence:
        child = self._all.make(self.request, index=index)
        child.parent_seq_id = parent.seq_id
        child.token_ids = [*parent.token_ids, token_id]
        child.num_prompt_logprobs = parent.num_prompt_logprobs
        self._all.running_set.fork(parent, child, num_tokens=len(parent.token_ids))
        return child

    def _found(self) -> tuple[RequestOutput, ...]:
        """The outputs of the finished search, best first. A grammar may allow fewer than asked for:
        the others end with nothing."""
        request_id, num = self.request.request_id, self.request.sampling_params.n
        hypotheses = self._search.hypotheses
        if not hypotheses and not self.request.sampling_params.is_masked:
            return (self._failure(0),)
        found = tuple(
            RequestOutput(
                request_id=request_id,
                index=index,
                token_ids=hypothesis.token_ids,
                logprobs=hypothesis.logprobs,
                finish_reason=hypothesis.finish_reason,
                is_last=index == num - 1,
                stop_token_id=hypothesis.stop_token_id,
                num_cached_tokens=self.num_cached_tokens if index == 0 else 0,
                num_host_cached_tokens=self.num_host_cached_tokens if index == 0 else 0,
                score=hypothesis.score,
            )
            for index, hypothesis in enumerate(hypotheses)
        )
        return found + tuple(
            RequestOutput(
                request_id=request_id,
                index=index,
                finish_reason=FinishReason.GRAMMAR,
                is_last=index == num - 1,
            )
            for index in range(len(hypotheses), num)
        )


def _num_left(sequence: Sequence) -> int:
    """Prompt tokens still to be scheduled before the first output, if the client wants to know."""
    if not sequence.request.wants_queue_position or sequence.num_output_tokens:
        return 0
    return max(0, sequence.num_prompt_tokens - sequence.num_computed_tokens)


class OutputProcessor(SequenceSet):
    """Applies results to their sequences."""

    def start(self, request: Request) -> LiveRequest:
        """Put a new request's first sequence into the waiting queue."""
        params = request.sampling_params
        kind = LiveRequest
        if params.beam_search is not None:
            kind = Beams
        elif params.num_branches > 1:
            kind = Samples
        live = self.requests[request.request_id] = kind(request, self)
        return live

    def process(self, batch: Batch, result: BatchResult) -> list[RequestOutput]:
        """The outputs of one step."""
        self.counters.swap_out_s += result.swap_out_s
        self.counters.swap_in_s += result.swap_in_s
        if result.num_masks:
            self.counters.masks_s += result.masks_s
            self.counters.num_masks += result.num_masks
        live = self.running_set.live
        outputs: list[RequestOutput] = []
        token_us = 1e6 * result.compute_s / max(batch.num_tokens, 1)
        all_token_ids, requests = result.token_ids, self.requests
        for item in batch.scheduled:
            seq_id = item.seq_id
            sequence = live.get(seq_id)
            if sequence is None:  # aborted meanwhile, or a sibling of a beam that failed
                continue
            sequence.compute_us += token_us * item.num_new_tokens
            prompt_logprobs = (
                self._new_prompt_logprobs(sequence, result) if result.prompt_logprobs else ()
            )
            request = requests[sequence.request.request_id]
            token_ids = all_token_ids.get(seq_id, ())
            if token_ids:
                logprobs = result.logprobs.get(seq_id, ()) if result.logprobs else ()
                sequence.num_in_flight_tokens -= 1
                new = request.add_tokens(sequence, token_ids, logprobs, prompt_logprobs)
                has_drafts = item.draft_token_ids or item.num_wanted_drafts
                if has_drafts and new and self.drafting.are_told(sequence.request):
                    new[0].num_draft_tokens = item.num_drafts
                    new[0].num_accepted_tokens = len(token_ids) - 1
                outputs += new
            elif seq_id in result.ended_seq_ids:
                reason = result.ended_seq_ids[seq_id]
                if reason is FinishReason.ERROR:
                    outputs.append(request.fail(sequence))
                else:
                    outputs += request.end(sequence, reason, prompt_logprobs)
            elif seq_id in result.vectors:
                outputs.append(self._pooled(request, sequence, result.vectors[seq_id]))
            else:  # the prompt is not fully computed yet
                num_left = _num_left(sequence)
                if prompt_logprobs or num_left:
                    output = RequestOutput(
                        request_id=sequence.request.request_id,
                        prompt_logprobs=prompt_logprobs,
                        num_tokens_ahead=num_left,
                    )
                    if num_left:
                        output.num_cached_tokens = sequence.num_cached_tokens
                        output.num_host_cached_tokens = sequence.num_host_cached_tokens
                    outputs.append(output)
        return outputs

    def _pooled(self, live: LiveRequest, sequence: Sequence, vector: bytes) -> RequestOutput:
        """End a sequence with the vector or score that it asked for."""
        self.finish(live, sequence)
        return RequestOutput(
            request_id=live.request.request_id,
            finish_reason=FinishReason.STOP,
            is_last=True,
            num_cached_tokens=sequence.num_cached_tokens,
            num_host_cached_tokens=sequence.num_host_cached_tokens,
            vector=vector,
            spent=self.spent(sequence),
        )

    def _new_prompt_logprobs(
        self, sequence: Sequence, result: BatchResult
    ) -> tuple[TokenLogprobs, ...]:
        """The prompt log-probabilities of a step that the client does not have yet."""
        position, entries = result.prompt_logprobs.get(sequence.seq_id, (0, ()))
        new = entries[sequence.num_prompt_logprobs + 1 - position :] if entries else ()
        sequence.num_prompt_logprobs += len(new)
        return new
