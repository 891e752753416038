"""From a step's result to the outputs of requests: tokens appended, ends found, branches parted.

Knows what a token does to its sequence; not when and with whom sequences run.
"""

from __future__ import annotations

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.request import FinishReason, RequestOutput, Sequence, TokenLogprobs
from penstock.engine.scheduling.branches import Branches, LiveRequest, failure
from penstock.engine.scheduling.counters import SchedulerCounters
from penstock.engine.scheduling.roster import Roster
from penstock.engine.scheduling.stopping import StopRule


class Intake:
    """Takes in results.

    Args:
        requests: the live ones by id; those that end are taken out.
    """

    def __init__(
        self,
        requests: dict[str, LiveRequest],
        roster: Roster,
        branches: Branches,
        stop_rule: StopRule,
        counters: SchedulerCounters,
    ) -> None:
        self._requests = requests
        self._roster = roster
        self._branches = branches
        self._stop_rule = stop_rule
        self._counters = counters

    def take(self, batch: Batch, result: BatchResult) -> list[RequestOutput]:
        """The outputs of the requests that a step brought forward."""
        self._counters.swap_out_s += result.swap_out_s
        self._counters.swap_in_s += result.swap_in_s
        live = self._roster.live
        # One that fails may take others with it, so each is looked up in its turn.
        outputs = [self._fail(live[seq_id]) for seq_id in result.failed_seq_ids if seq_id in live]
        for item in batch.scheduled:
            sequence = live.get(item.seq_id)
            if sequence is None:  # aborted meanwhile
                continue
            prompt_logprobs = (
                self._new_prompt_logprobs(sequence, result) if result.prompt_logprobs else ()
            )
            token_ids = result.token_ids.get(item.seq_id, ())
            if token_ids:
                logprobs = result.logprobs.get(item.seq_id, ()) if result.logprobs else ()
                outputs += self._take(sequence, token_ids, logprobs, prompt_logprobs)
            elif prompt_logprobs:  # still inside its prompt
                request_id = sequence.request.request_id
                outputs.append(
                    RequestOutput(request_id=request_id, prompt_logprobs=prompt_logprobs)
                )
        return outputs

    def finish(self, live: LiveRequest, sequence: Sequence, *, is_spoilt: bool = False) -> None:
        """A sequence has ended, and with the last of them its request."""
        self._roster.remove(sequence, retention=live.request.retention, is_spoilt=is_spoilt)
        del live.sequences[sequence.seq_id]
        if not live.sequences:
            del self._requests[live.request.request_id]

    def _take(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> tuple[RequestOutput, ...]:
        """A sequence got its next tokens."""
        live = self._requests[sequence.request.request_id]
        if live.search is not None:
            return self._take_row(live, sequence, logprobs[0], prompt_logprobs)
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
        if reason is not None:
            output.prefix_id = self._roster.blocks.prefix_id(sequence)
            self.finish(live, sequence)
            output.finish_reason = reason
            output.is_last = not live.sequences
            if reason is FinishReason.STOP:
                output.stop_token_id = sequence.token_ids[-1]
        return (output,)

    def _append(
        self, sequence: Sequence, token_ids: tuple[int, ...]
    ) -> tuple[int, FinishReason | None]:
        """How many tokens the sequence keeps, and why it ends with them, if it does."""
        if sequence.params.max_tokens == 0:
            return 0, FinishReason.LENGTH
        reason = None
        num_kept = 0
        for token_id in token_ids:
            sequence.token_ids.append(token_id)
            num_kept += 1
            reason = self._stop_rule.check(sequence)
            if reason is not None:
                break  # what was sampled beyond the end is dropped
        self._counters.generation_tokens += num_kept
        return num_kept, reason

    def _take_row(
        self,
        live: LiveRequest,
        sequence: Sequence,
        row: TokenLogprobs,
        prompt_logprobs: tuple[TokenLogprobs, ...],
    ) -> tuple[RequestOutput, ...]:
        request_id = live.request.request_id
        found = self._branches.take_row(live, sequence, row)
        if found:
            self._counters.generation_tokens += sum(len(each.token_ids) for each in found)
            del self._requests[request_id]
        if prompt_logprobs:
            return RequestOutput(request_id=request_id, prompt_logprobs=prompt_logprobs), *found
        return found

    def _new_prompt_logprobs(
        self, sequence: Sequence, result: BatchResult
    ) -> tuple[TokenLogprobs, ...]:
        """Those a step brought that the client has not had yet."""
        position, entries = result.prompt_logprobs.get(sequence.seq_id, (0, ()))
        new = entries[sequence.num_prompt_logprobs + 1 - position :] if entries else ()
        sequence.num_prompt_logprobs += len(new)
        return new

    def _fail(self, sequence: Sequence) -> RequestOutput:
        """End a sequence whose next token the model could not give; of a beam search, all."""
        live = self._requests[sequence.request.request_id]
        index = 0 if live.search is not None else sequence.index
        doomed = [sequence] if live.search is None else list(live.sequences.values())
        if live.num_unforked:
            live.num_unforked = 0  # the others would have the same logits
        for each in doomed:
            self.finish(live, each, is_spoilt=True)
        return failure(live, index=index, is_last=not live.sequences)
