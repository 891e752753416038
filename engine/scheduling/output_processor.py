"""From a step's result to requests' outputs: appends tokens, detects ends, forks branches.

    StopRule         when a sequence ends: EOS, stop ids, loops, length (not stop strings)
    Branches         several sequences of one request: samples of one prompt, and beams
    OutputProcessor  applies a step's result, sequence by sequence

Samples and beams are forks of block tables. Samples fork once, when the prompt is computed: each
computes its last token again, for a draw of its own. Beams fork at every step: the next beams fork
from the surviving ones, then all old ones are removed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

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
        params = sequence.request.sampling_params
        newest = sequence.token_ids[-1]
        is_end = newest in params.stop_token_ids or (
            newest in self._eos_token_ids and not params.ignore_eos
        )
        if is_end and sequence.num_output_tokens >= params.min_tokens:
            return FinishReason.STOP
        # Nearly always None, and a call costs more than that to see.
        if params.repetition_detection is not None and params.ends_in_loop(
            sequence.token_ids, sequence.num_output_tokens
        ):
            return FinishReason.REPETITION
        is_full = self.fills(sequence, num_tokens=len(sequence.token_ids))
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


@dataclass(slots=True)
class LiveRequest:
    """A request and the sequences that answer it.

    Attributes:
        sequences: the unfinished ones, by seq_id.
        num_unforked: samples that have yet to fork from the first.
        aborted: indices of samples aborted before they forked.
        beams: in the order of the search's last result.
        rows: what each beam has reported in this step, by seq_id: its likeliest next tokens, or
            why there is none.
        is_parked: of a beam search, whether its client was told that it was preempted.
        num_cached_tokens, num_host_cached_tokens, compute_us, block_us: of a beam search, those of
            the beams that have ended.
    """

    request: Request
    sequences: dict[int, Sequence] = field(default_factory=dict)
    num_unforked: int = 0
    aborted: set[int] = field(default_factory=set)
    num_cached_tokens: int = 0
    num_host_cached_tokens: int = 0
    compute_us: float = 0.0
    block_us: float = 0.0
    search: BeamSearchState | None = None
    beams: list[Sequence] = field(default_factory=list)
    rows: dict[int, TokenLogprobs | FinishReason] = field(default_factory=dict)
    is_parked: bool = False

    @property
    def num_forks(self) -> int:
        """Sequences that will soon fork from the one running now."""
        if self.search is not None and self.beams[0].num_output_tokens == 0:
            return self.request.sampling_params.num_branches - 1
        return self.num_unforked

    def notice(self, sequence: Sequence, notice: Notice) -> RequestOutput | None:
        """The output that reports a sequence as preempted or resumed, if the client should know:
        samples report each on its own, a beam search only whether all its beams run."""
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
    """Creates and forks the sequences of requests."""

    def __init__(self, running_set: RunningSet, stop_rule: StopRule) -> None:
        self._running_set = running_set
        self._stop_rule = stop_rule
        self._next_seq_id = itertools.count()

    def start(self, request: Request) -> LiveRequest:
        """Put a new request's first sequence into the waiting queue."""
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
        self._running_set.add(root)
        return live

    def fork_samples(self, live: LiveRequest, root: Sequence) -> None:
        """Fork the other samples from the first, whose prompt is computed."""
        self._running_set.reserved.pop(root.seq_id, None)
        num_shared = root.num_prompt_tokens - 1  # each computes the last one again, for its draw
        for index in range(1, live.num_unforked + 1):
            if index in live.aborted:
                continue
            child = Sequence(live.request, seq_id=next(self._next_seq_id), index=index)
            live.sequences[child.seq_id] = child
            self._running_set.fork(root, child, num_tokens=num_shared)
            self._running_set.place_fork(child)
        live.num_unforked = 0

    def advance_beams(
        self, live: LiveRequest, sequence: Sequence, row: TokenLogprobs | FinishReason
    ) -> tuple[RequestOutput, ...]:
        """Record a beam's row, and advance the search when all beams have
        reported; the outputs, when the search ends."""
        assert live.search is not None
        live.rows[sequence.seq_id] = row
        sequence.num_in_flight_tokens -= 1
        # If it was preempted meanwhile, it has nothing left to compute.
        self._running_set.waiting.discard(sequence)
        if len(live.rows) < len(live.beams):
            return ()
        parents = live.beams
        # The prompt's sequence, which reports first, reserved slots for the beams.
        self._running_set.reserved.pop(sequence.seq_id, None)
        chosen = live.search.advance([live.rows[beam.seq_id] for beam in parents])
        live.rows = {}
        live.num_cached_tokens += sum(beam.num_cached_tokens for beam in parents)
        live.beams = [
            self._fork_beam(parents[parent], token_id, index=index)
            for index, (parent, token_id) in enumerate(chosen)
        ]
        live.num_host_cached_tokens += sum(beam.num_host_cached_tokens for beam in parents)
        for beam in parents:
            self._running_set.remove(beam, retention=live.request.retention if not chosen else None)
            live.compute_us += beam.compute_us
            live.block_us += beam.block_us
        live.sequences = {beam.seq_id: beam for beam in live.beams}
        for beam in live.beams:
            self._running_set.place_fork(beam)
        return () if chosen else _found(live)

    def _fork_beam(self, parent: Sequence, token_id: int, *, index: int) -> Sequence:
        child = Sequence(parent.request, seq_id=next(self._next_seq_id), index=index)
        child.parent_seq_id = parent.seq_id
        child.token_ids = [*parent.token_ids, token_id]
        child.num_prompt_logprobs = parent.num_prompt_logprobs
        self._running_set.fork(parent, child, num_tokens=len(parent.token_ids))
        return child


def _found(live: LiveRequest) -> tuple[RequestOutput, ...]:
    """The outputs of a finished beam search, best first. A grammar may allow fewer than asked for:
    the others end with nothing."""
    assert live.search is not None
    request_id, num = live.request.request_id, live.request.sampling_params.n
    hypotheses = live.search.hypotheses
    if not hypotheses and not live.request.sampling_params.is_masked:
        return (failure(live, index=0, is_last=True),)
    found = tuple(
        RequestOutput(
            request_id=request_id,
            index=index,
            token_ids=hypothesis.token_ids,
            logprobs=hypothesis.logprobs,
            finish_reason=hypothesis.finish_reason,
            is_last=index == num - 1,
            stop_token_id=hypothesis.stop_token_id,
            num_cached_tokens=live.num_cached_tokens if index == 0 else 0,
            num_host_cached_tokens=live.num_host_cached_tokens if index == 0 else 0,
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


def failure(live: LiveRequest, *, index: int, is_last: bool) -> RequestOutput:
    """The last output of a sequence for which the model gave no valid logits, or no vector."""
    error = "the model's logits are not a distribution (NaN, or every token is masked)"
    if live.request.pooling is not None:
        error = "the model's hidden states are not finite numbers"
    return RequestOutput(
        request_id=live.request.request_id,
        index=index,
        finish_reason=FinishReason.ERROR,
        is_last=is_last,
        error=error,
    )


class OutputProcessor:
    """Applies results to their sequences.

    Args:
        requests: live requests by id; finished ones are removed.
    """

    def __init__(
        self,
        requests: dict[str, LiveRequest],
        running_set: RunningSet,
        branches: Branches,
        stop_rule: StopRule,
        counters: SchedulerCounters,
        drafting: Drafting,
    ) -> None:
        self._drafting = drafting
        self._requests = requests
        self._running_set = running_set
        self._branches = branches
        self._stop_rule = stop_rule
        self._counters = counters

    def process(self, batch: Batch, result: BatchResult) -> list[RequestOutput]:
        """The outputs of one step."""
        self._counters.swap_out_s += result.swap_out_s
        self._counters.swap_in_s += result.swap_in_s
        self._counters.masks_s += result.masks_s
        self._counters.num_masks += result.num_masks
        live = self._running_set.live
        outputs: list[RequestOutput] = []
        token_us = 1e6 * result.compute_s / max(batch.num_tokens, 1)
        for item in batch.scheduled:
            sequence = live.get(item.seq_id)
            if sequence is None:  # aborted meanwhile, or a sibling of a beam that failed
                continue
            sequence.compute_us += token_us * item.num_new_tokens
            prompt_logprobs = (
                self._new_prompt_logprobs(sequence, result) if result.prompt_logprobs else ()
            )
            token_ids = result.token_ids.get(item.seq_id, ())
            if token_ids:
                logprobs = result.logprobs.get(item.seq_id, ()) if result.logprobs else ()
                new = self._process_tokens(sequence, token_ids, logprobs, prompt_logprobs)
                if item.num_drafts and new:
                    new[0].num_draft_tokens = item.num_drafts
                    new[0].num_accepted_tokens = len(token_ids) - 1
                outputs += new
            elif item.seq_id in result.ended_seq_ids:
                reason = result.ended_seq_ids[item.seq_id]
                outputs += self._end(sequence, reason, prompt_logprobs)
            elif item.seq_id in result.vectors:
                outputs.append(self._pooled(sequence, result.vectors[item.seq_id]))
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

    def finish(
        self, live: LiveRequest, sequence: Sequence, *, has_invalid_kv: bool = False
    ) -> None:
        """End a sequence, and its request if it was the last one."""
        self._running_set.remove(
            sequence, retention=live.request.retention, has_invalid_kv=has_invalid_kv
        )
        self._drafting.forget(sequence)
        del live.sequences[sequence.seq_id]
        if not live.sequences:
            del self._requests[live.request.request_id]

    def _process_tokens(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> tuple[RequestOutput, ...]:
        """Add a sequence's new tokens."""
        live = self._requests[sequence.request.request_id]
        if live.search is not None:
            return self._process_beam(live, sequence, logprobs[0], prompt_logprobs)
        sequence.num_in_flight_tokens -= 1
        if live.num_unforked:
            self._branches.fork_samples(live, sequence)
            if sequence.index in live.aborted:
                self.finish(live, sequence)
                return ()
        num_kept, reason = self._append(sequence, token_ids)
        output = RequestOutput(
            request_id=live.request.request_id,
            index=sequence.index,
            token_ids=token_ids[:num_kept],
            logprobs=logprobs[:num_kept],
            prompt_logprobs=prompt_logprobs,
        )
        if sequence.num_cached_tokens:
            output.num_cached_tokens, sequence.num_cached_tokens = sequence.num_cached_tokens, 0
            output.num_host_cached_tokens = sequence.num_host_cached_tokens
        if reason is not None:
            output.prefix_id = self._running_set.blocks.prefix_id(sequence)
            self.finish(live, sequence)
            output.finish_reason = reason
            output.is_last = not live.sequences
            if reason is FinishReason.STOP:
                output.stop_token_id = sequence.token_ids[-1]
            output.spent = self._spent(sequence)
        elif sequence.compute_us >= _TELL_US:
            output.spent = self._spent(sequence)
        return (output,)

    def _spent(self, branch: Sequence | LiveRequest) -> Spent:
        """What a branch, or the beams of a search, spent and nobody was told yet."""
        if isinstance(branch, Sequence):
            self._running_set.blocks.charge(branch)
        spent = Spent(compute_us=int(branch.compute_us), block_us=int(branch.block_us))
        branch.compute_us -= spent.compute_us
        branch.block_us -= spent.block_us
        self._counters.spent_compute_us += spent.compute_us
        self._counters.spent_block_us += spent.block_us
        return spent

    def _pooled(self, sequence: Sequence, vector: bytes) -> RequestOutput:
        """End a sequence with the vector or score that it asked for."""
        live = self._requests[sequence.request.request_id]
        self.finish(live, sequence)
        return RequestOutput(
            request_id=live.request.request_id,
            finish_reason=FinishReason.STOP,
            is_last=True,
            num_cached_tokens=sequence.num_cached_tokens,
            num_host_cached_tokens=sequence.num_host_cached_tokens,
            vector=vector,
            spent=self._spent(sequence),
        )

    def _append(
        self, sequence: Sequence, token_ids: tuple[int, ...]
    ) -> tuple[int, FinishReason | None]:
        """How many of the tokens the sequence keeps, and why it ends, if it does."""
        if sequence.params.max_tokens == 0:
            return 0, FinishReason.LENGTH
        reason = None
        num_kept = 0
        for token_id in token_ids:
            sequence.token_ids.append(token_id)
            num_kept += 1
            reason = self._stop_rule.check(sequence)
            if reason is not None:
                break  # tokens sampled after the end are dropped
        if sequence.num_draft_tokens:  # wrong ones, and the newest token, have no KV of their own
            sequence.num_computed_tokens = len(sequence.token_ids) - 1
            sequence.num_draft_tokens = 0
        self._counters.generation_tokens += num_kept
        return num_kept, reason

    def _process_beam(
        self,
        live: LiveRequest,
        sequence: Sequence,
        row: TokenLogprobs | FinishReason,
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> tuple[RequestOutput, ...]:
        request_id = live.request.request_id
        found = self._branches.advance_beams(live, sequence, row)
        if found:
            self._counters.generation_tokens += sum(len(each.token_ids) for each in found)
            found[0].spent = self._spent(live)
            del self._requests[request_id]
        if prompt_logprobs:
            return RequestOutput(request_id=request_id, prompt_logprobs=prompt_logprobs), *found
        return found

    def _new_prompt_logprobs(
        self, sequence: Sequence, result: BatchResult
    ) -> tuple[TokenLogprobs, ...]:
        """The prompt log-probabilities of a step that the client does not have yet."""
        position, entries = result.prompt_logprobs.get(sequence.seq_id, (0, ()))
        new = entries[sequence.num_prompt_logprobs + 1 - position :] if entries else ()
        sequence.num_prompt_logprobs += len(new)
        return new

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> Iterator[RequestOutput]:
        """End a sequence for which there is no next token."""
        live = self._requests[sequence.request.request_id]
        if reason is FinishReason.ERROR:
            yield self._fail(live, sequence)
            return
        if live.search is not None:
            yield from self._process_beam(live, sequence, reason, prompt_logprobs)
            return
        # The other samples, if they are still to be forked, would end in the same way.
        unforked = range(1, live.num_unforked + 1)
        live.num_unforked = 0
        prefix_id = self._running_set.blocks.prefix_id(sequence)
        self.finish(live, sequence)
        indices = [each for each in (sequence.index, *unforked) if each not in live.aborted]
        for index in indices:
            yield RequestOutput(
                request_id=live.request.request_id,
                index=index,
                prompt_logprobs=prompt_logprobs if index == sequence.index else (),
                finish_reason=reason,
                is_last=not live.sequences and index == indices[-1],
                prefix_id=prefix_id,
                spent=self._spent(sequence) if index == sequence.index else None,
            )

    def _fail(self, live: LiveRequest, sequence: Sequence) -> RequestOutput:
        """End a sequence with invalid logits; of a beam search, all its beams."""
        index = 0 if live.search is not None else sequence.index
        doomed = [sequence] if live.search is None else list(live.sequences.values())
        if live.num_unforked:
            live.num_unforked = 0  # the other samples would get the same logits
        for each in doomed:
            self.finish(live, each, has_invalid_kv=True)
        return failure(live, index=index, is_last=not live.sequences)
