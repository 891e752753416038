"""Iteration-level scheduling: who computes how many tokens in the next step.

One counter, no phases: each step a sequence's `num_computed_tokens` chases `num_tokens`, within a
budget of tokens and sequences. Chunked prefill, decode and the return of a preempted sequence are
all the same move. Running sequences come first, so decode never starves; what is left of the
budget goes to those that wait, in the order of `waiting_queue`.

Source: Orca (Yu et al., OSDI 2022) for iteration-level scheduling; Sarathi-Serve (Agrawal et al.,
OSDI 2024) for chunked prefill; the single counter is vLLM v1's.

Knows nothing of tensors, text, sockets or time.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from penstock.engine.batch import Batch, BatchResult, ScheduledSequence, SequenceEntry
from penstock.engine.blocks import BlockManager
from penstock.engine.config import SchedulerConfig
from penstock.engine.errors import ConfigError, InvalidRequestError, PromptTooLongError
from penstock.engine.request import (
    FinishReason,
    Request,
    RequestOutput,
    Sequence,
    SequenceStatus,
    TokenLogprobs,
)
from penstock.engine.scheduling.preemption import choose_victim
from penstock.engine.scheduling.stopping import StopRule
from penstock.engine.scheduling.waiting_queue import WaitingQueue


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start; they only grow."""

    num_steps: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class Scheduler:
    """Holds every live sequence and plans one batch at a time.

    Args:
        blocks: the device's KV blocks.
        eos_token_ids: ids that end a text.
        max_model_len: tokens of prompt and output at most; the pool must hold as many.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        *,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
    ) -> None:
        _check_settings(config, blocks, max_model_len)
        self.blocks = blocks
        self.counters = SchedulerCounters()
        self._config = config
        self._max_model_len = max_model_len
        self._stop_rule = StopRule(eos_token_ids=eos_token_ids, max_model_len=max_model_len)
        # Kept free at admission, so that those who run can grow for a while before the newcomer
        # would have to leave again.
        self._watermark_blocks = max(1, blocks.num_blocks // 100)
        self._waiting = WaitingQueue()
        self._running: dict[int, Sequence] = {}  # by seq_id, in order of admission
        self._live: dict[int, Sequence] = {}  # by seq_id: waiting, running and preempted
        self._seq_ids: dict[str, int] = {}  # by request_id
        self._left: list[int] = []  # ids the device may forget
        self._next_seq_id = itertools.count()

    # -- requests ---------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_work(self) -> bool:
        """Whether a step could do anything, if only tell the device who has left."""
        return bool(self._live or self._left)

    def add(self, request: Request) -> None:
        """Take in a request.

        Raises:
            InvalidRequestError: it can never be served; nothing was kept of it.
        """
        if request.request_id in self._seq_ids:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use")
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        if num_tokens >= self._max_model_len:
            raise PromptTooLongError(
                f"{num_tokens} tokens leave no room for output in a context of "
                f"{self._max_model_len}",
                param="prompt",
            )
        if len(request.output_token_ids) >= request.sampling_params.max_tokens:
            raise InvalidRequestError("the output already fills max_tokens", param="max_tokens")
        sequence = Sequence(request, seq_id=next(self._next_seq_id))
        self._live[sequence.seq_id] = sequence
        self._seq_ids[request.request_id] = sequence.seq_id
        self._waiting.push(sequence)
        self.counters.prompt_tokens += len(request.prompt_token_ids)

    def abort(self, request_id: str) -> None:
        """Drop a request; its blocks are free when this returns. Unknown ids are no error."""
        seq_id = self._seq_ids.get(request_id)
        if seq_id is not None:
            self._finish(self._live[seq_id])

    # -- the step ---------------------------------------------------------------------------

    def schedule(self) -> Batch:
        """Plan the next step and count its tokens as computed. The plan may be empty."""
        scheduled: dict[int, ScheduledSequence] = {}
        budget = self._config.max_num_batched_tokens
        num_preemptions = self.counters.num_preemptions
        for sequence in list(self._running.values()):
            num_new = min(self._num_uncomputed(sequence), budget)
            if num_new > 0 and self._extend(sequence, num_new, scheduled):
                budget -= num_new
        if self.counters.num_preemptions == num_preemptions:
            # Otherwise the newcomer would take the very blocks a victim just gave up.
            self._admit(scheduled, budget)
        for seq_id, item in scheduled.items():
            self._advance(self._running[seq_id], item.num_new_tokens)
        self.counters.num_steps += bool(scheduled)
        left, self._left = tuple(self._left), []
        return Batch(
            step=self.counters.num_steps,
            scheduled=tuple(scheduled.values()),
            left_seq_ids=left,
        )

    def update(self, batch: Batch, result: BatchResult) -> list[RequestOutput]:
        """Take in what a step sampled; the outputs of the requests it brought forward."""
        outputs = [
            self._fail(self._live[seq_id])
            for seq_id in result.failed_seq_ids
            if seq_id in self._live
        ]
        for item in batch.scheduled:
            token_ids = result.token_ids.get(item.seq_id, ())
            sequence = self._live.get(item.seq_id)
            if sequence is not None and token_ids:  # not aborted, not still inside its prompt
                logprobs = result.logprobs.get(item.seq_id, ())
                outputs.append(self._append(sequence, token_ids, logprobs))
        return outputs

    # -- its parts --------------------------------------------------------------------------

    def _num_uncomputed(self, sequence: Sequence) -> int:
        if sequence.status is not SequenceStatus.RUNNING:
            return 0  # fell victim earlier in this step
        num_tokens = sequence.num_tokens
        if sequence.num_in_flight_tokens and self._stop_rule.fills(sequence, num_tokens=num_tokens):
            return 0  # the token in flight is its last
        return num_tokens - sequence.num_computed_tokens

    def _extend(
        self, sequence: Sequence, num_new: int, scheduled: dict[int, ScheduledSequence]
    ) -> bool:
        """Schedule a running sequence's next tokens, preempting while blocks are short."""
        num_tokens = sequence.num_computed_tokens + num_new
        while (new_block_ids := self.blocks.grow(sequence.seq_id, num_tokens)) is None:
            victim = choose_victim(self._running.values())
            scheduled.pop(victim.seq_id, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        scheduled[sequence.seq_id] = ScheduledSequence(
            seq_id=sequence.seq_id, num_new_tokens=num_new, new_block_ids=new_block_ids
        )
        return True

    def _admit(self, scheduled: dict[int, ScheduledSequence], budget: int) -> None:
        """Start waiting sequences, in the queue's order, while budget and blocks last."""
        while budget > 0 and len(self._running) < self._config.max_num_seqs:
            sequence = self._waiting.peek()
            if sequence is None or sequence.num_in_flight_tokens:
                return  # a token still in flight must arrive before its sequence re-enters
            num_new = min(sequence.num_tokens, budget)
            if num_new < sequence.num_tokens and not self._config.enable_chunked_prefill:
                return
            new_block_ids = self._allocate_whole(sequence)
            if new_block_ids is None:
                return
            self._waiting.remove(sequence)
            sequence.move_to(SequenceStatus.RUNNING)
            self._running[sequence.seq_id] = sequence
            scheduled[sequence.seq_id] = ScheduledSequence(
                seq_id=sequence.seq_id,
                num_new_tokens=num_new,
                new_block_ids=new_block_ids,
                entry=_entry(sequence),
            )
            budget -= num_new

    def _allocate_whole(self, sequence: Sequence) -> tuple[int, ...] | None:
        """Blocks for all known tokens at once: a prompt admitted never waits in its middle."""
        num_spared = self._watermark_blocks if self._running else 0
        return self.blocks.grow(sequence.seq_id, sequence.num_tokens, num_spared=num_spared)

    def _advance(self, sequence: Sequence, num_new: int) -> None:
        sequence.num_computed_tokens += num_new
        if sequence.num_computed_tokens == sequence.num_tokens:
            sequence.num_in_flight_tokens += 1  # the step samples the one after

    def _append(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
    ) -> RequestOutput:
        sequence.num_in_flight_tokens -= 1
        reason = None
        num_kept = 0
        for token_id in token_ids:
            sequence.token_ids.append(token_id)
            num_kept += 1
            reason = self._stop_rule.check(sequence)
            if reason is not None:
                break  # what was sampled beyond the end is dropped
        self.counters.generation_tokens += num_kept
        if reason is not None:
            self._finish(sequence)
        return RequestOutput(
            request_id=sequence.request.request_id,
            token_ids=token_ids[:num_kept],
            logprobs=logprobs[:num_kept],
            finish_reason=reason,
            stop_token_id=sequence.token_ids[-1] if reason is FinishReason.STOP else None,
        )

    def _fail(self, sequence: Sequence) -> RequestOutput:
        """End a sequence whose next token the model could not give."""
        self._finish(sequence)
        return RequestOutput(
            request_id=sequence.request.request_id,
            finish_reason=FinishReason.ERROR,
            error="the model's logits are not a distribution (NaN, or every token is masked)",
        )

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it waits again and will be computed anew (recompute)."""
        self._leave_device(sequence)
        sequence.move_to(SequenceStatus.PREEMPTED)
        sequence.num_computed_tokens = 0
        self.counters.num_preemptions += 1
        self._waiting.push(sequence)

    def _finish(self, sequence: Sequence) -> None:
        if sequence.status is SequenceStatus.RUNNING:
            self._leave_device(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.move_to(SequenceStatus.FINISHED)
        del self._live[sequence.seq_id]
        del self._seq_ids[sequence.request.request_id]

    def _leave_device(self, sequence: Sequence) -> None:
        del self._running[sequence.seq_id]
        self.blocks.release(sequence.seq_id)
        self._left.append(sequence.seq_id)


def _check_settings(config: SchedulerConfig, blocks: BlockManager, max_model_len: int) -> None:
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise ConfigError(
            f"--no-enable-chunked-prefill needs --max-num-batched-tokens "
            f"({config.max_num_batched_tokens}) to be at least the context ({max_model_len})"
        )
    capacity = blocks.num_blocks * blocks.block_size
    if capacity < max_model_len:
        raise ConfigError(
            f"the KV cache holds {capacity} tokens, fewer than one context of {max_model_len}"
        )


def _entry(sequence: Sequence) -> SequenceEntry:
    return SequenceEntry(
        token_ids=tuple(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        index=sequence.index,
        params=sequence.params,
    )
