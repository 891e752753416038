"""How far a drafter has computed each sequence, and the loop in which it guesses tokens.

A drafter's keys and values are in pools of their own that have the target's block ids, so that
whatever moves, copies or shares a block does so in all. A block's content may lag behind here,
which `_num_known` counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from penstock.engine.batch import Batch, ScheduledSequence
from penstock.engine.models.language_model import StateSpec, StepOutput
from penstock.engine.runner.input_batch import InputBatch, StepInputs
from penstock.engine.runner.kv_cache import KVShape
from penstock.engine.runner.memory import make_host_tier
from penstock.engine.runner.step_extensions import PlannedRows

Spans = Mapping[int, tuple[int, int]]  # seq_id → its first position, and that after its last


def num_draft_bytes(state_spec: StateSpec, block_size: int) -> int:
    """What a drafter's pools take for the tokens of a block."""
    return sum(KVShape.of((group,), block_size).bytes_per_block for group in state_spec)


@dataclass(slots=True)
class DraftState:
    """What a drafter knows of a sequence.

    Attributes:
        num_computed: how many of its first positions have keys and values here, as far as it was
            looked up.
        num_guessed: the same, if the guesses that are being checked are right; 0 if none are.
    """

    num_computed: int = 0
    num_guessed: int = 0


class Drafter(ABC):
    """
    Args:
        state_spec: of the drafter, whose groups have a pool each.
        kv_pool: the target's.
        num_host_blocks: of the target's host tier.
        batch: the sequences on the device.
        max_num_tokens: of one forward pass.
        lag: by how many positions the drafter is behind the token that it needs.
        keeps_guesses: what it computed for a right guess is as good as what it would compute then.

    Attributes:
        pools: as in `KVShape.allocate`.
    """

    def __init__(
        self,
        state_spec: StateSpec,
        kv_pool: Tensor,
        num_host_blocks: int,
        batch: InputBatch,
        *,
        max_num_tokens: int,
        lag: int = 0,
        keeps_guesses: bool = True,
    ) -> None:
        num_blocks, self._block_size = kv_pool.shape[2:4]
        self.pools = tuple(
            KVShape.of((group,), self._block_size).allocate(num_blocks, kv_pool.device)
            for group in state_spec
        )
        self._host_tiers = [make_host_tier(pool, num_host_blocks) for pool in self.pools]
        self._batch, self._max_num_tokens, self._lag = batch, max_num_tokens, lag
        self._keeps_guesses = keeps_guesses
        # Of each block: how many of its first positions have keys and values here.
        self._num_known = np.zeros(num_blocks, dtype=np.int64)
        self._num_known_on_host = np.zeros(num_host_blocks, dtype=np.int64)

    @property
    @abstractmethod
    def weight_bytes(self) -> int: ...

    @abstractmethod
    def follow(
        self, scheduled: Sequence[ScheduledSequence], inputs: StepInputs, output: StepOutput
    ) -> None:
        """Take from the target's step what the next guesses need, and compute its prompts.

        Args:
            scheduled: of the step, or an earlier one that had the same rows.
        """

    @abstractmethod
    def _compute(self, spans: Spans) -> None:
        """Keys and values of these positions."""

    @abstractmethod
    def _draw(self, spans: Spans) -> Sequence[int]:
        """The same, and the token that follows each span's last token."""

    def enter(self, *_: object) -> DraftState:
        return DraftState()

    def before(self, step: PlannedRows) -> None:
        scheduled = step.scheduled
        step.readers.append(lambda inputs, output: self.follow(scheduled, inputs, output))

    def plan(self, batch: Batch) -> None:
        """Guess as many tokens as each item of the batch wants."""
        self._follow_blocks(batch)
        for item in batch.scheduled:
            state = self._state(item.seq_id)
            if state.num_guessed:  # what was right of them is known now
                num_right = len(self._batch.token_ids(item.seq_id)) - 1
                self.note(item.seq_id, min(state.num_guessed, num_right))
                state.num_guessed = 0
        if any(item.num_wanted_drafts for item in batch.scheduled):
            self._propose(batch)

    def _follow_blocks(self, batch: Batch) -> None:
        """Follow the batch's moves, and what its sequences' tables hold now."""
        for host_tier in self._host_tiers:
            host_tier.execute(batch.moves)
        known, on_host = self._num_known, self._num_known_on_host
        for pairs, sources, destinations in (
            (batch.moves.swap_outs, known, on_host),
            (batch.moves.swap_ins, on_host, known),
            (batch.moves.copies, known, known),
        ):
            if pairs:
                froms, tos = (list(column) for column in zip(*pairs, strict=True))
                destinations[tos] = sources[froms]
        for item in batch.scheduled:
            block_ids = item.new_block_ids
            if item.entry is not None:
                # The token after these may be another one than where the blocks come from.
                num_same = max(0, item.entry.num_computed_tokens - self._lag)
                num_full, num_more = divmod(num_same, self._block_size)
                if num_more:
                    block_id = block_ids[num_full]
                    known[block_id] = min(known[block_id], num_more)
                block_ids = block_ids[num_full + (num_more > 0) :]
            if block_ids:
                known[list(block_ids)] = 0

    def _propose(self, batch: Batch) -> None:
        wanted = {
            item.seq_id: item.num_wanted_drafts
            for item in batch.scheduled
            if item.num_wanted_drafts
        }
        ends = {seq_id: self._catch_up(seq_id, len(wanted)) for seq_id in wanted}
        for number in range(max(wanted.values())):
            spans = {
                seq_id: (ends[seq_id], len(self._batch.token_ids(seq_id)) - self._lag)
                for seq_id, num_wanted in wanted.items()
                if num_wanted > number
            }
            for seq_id, guess in zip(spans, self._draw(spans), strict=True):
                ends[seq_id] = spans[seq_id][1]
                self._batch.token_ids(seq_id).append(guess)
                if number == 0:  # it has seen no guess yet
                    self.note(seq_id, ends[seq_id])
        for item in batch.scheduled:
            if item.num_wanted_drafts:  # the batch appends them where it expects drafts
                token_ids = self._batch.token_ids(item.seq_id)
                item.draft_token_ids = tuple(token_ids[-item.num_wanted_drafts :])
                del token_ids[-item.num_wanted_drafts :]
                if self._keeps_guesses:
                    self._state(item.seq_id).num_guessed = ends[item.seq_id]

    def _state(self, seq_id: int) -> DraftState:
        state: DraftState = self._batch.state(seq_id, self)
        return state

    def count(self, seq_id: int) -> int:
        """How many of a sequence's first positions have keys and values here, except the one that
        the next guess needs."""
        state, size = self._state(seq_id), self._block_size
        count = state.num_computed
        block_ids = self._batch.block_ids(seq_id)
        for number in range(count // size, len(block_ids)):
            num_known = int(self._num_known[block_ids[number]])
            count = max(count, number * size + num_known)
            if num_known < size:
                break
        count = max(0, min(count, len(self._batch.token_ids(seq_id)) - self._lag - 1))
        state.num_computed = count
        return count

    def note(self, seq_id: int, end: int) -> None:
        """The positions before `end` have keys and values."""
        state, size = self._state(seq_id), self._block_size
        first = state.num_computed // size
        last = -(-end // size)
        block_ids = self._batch.block_ids(seq_id)[first:last]
        if len(block_ids):
            self._num_known[block_ids] = size
            self._num_known[block_ids[-1]] = end - (last - 1) * size
        state.num_computed = end

    def _catch_up(self, seq_id: int, num_sequences: int) -> int:
        """Compute a sequence's positions, until a pass may contain those that are left; how many
        have been computed."""
        num_computed = self.count(seq_id)
        num_positions = len(self._batch.token_ids(seq_id)) - self._lag
        most = self._max_num_tokens // num_sequences
        while num_positions - num_computed > most:
            end = num_computed + most
            self._compute({seq_id: (num_computed, end)})
            self.note(seq_id, end)
            num_computed = end
        return num_computed
