"""Steps in which the same sequences take one token each: the inputs of one become the next one's.

Most steps are such ones. Counted up in place, the tensors stay where they are, so who computes on a
CPU need not look again where that is. Not known here: how a run begins, and what else ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.engine.batch import ScheduledSequence
from penstock.engine.runner.step_inputs import StepInputs

_MARGIN_TOKENS = 256  # by which lengths may grow before the inputs are made anew


class DecodeRun:
    """The sequences of a step in which each computes its last known token.

    Args:
        inputs: of that step, in the host's memory.
        rows: [num_seqs], the sequences' places.
        histories: the tokens of each sequence, extended as they come.
    """

    def __init__(
        self,
        inputs: StepInputs,
        rows: npt.NDArray[np.int64],
        histories: Sequence[list[int]],
        block_size: int,
    ) -> None:
        layout = inputs.context.layout
        self.rows = rows
        self.seq_ids = inputs.sampled_seq_ids
        self.input_ids = inputs.input_ids.numpy()
        self.seq_lens = layout.seq_lens.numpy()
        self.is_due = False  # whether the tokens of the next step are here
        self._positions = inputs.context.positions.numpy()
        self._slots = layout.slot_mapping.numpy()
        self._block_tables = layout.block_tables.numpy()
        self._num_tokens = inputs.sampling.num_tokens
        self._histories = histories
        self._block_size = block_size
        self._numbers = np.arange(len(rows))
        self._num_steps_in_blocks = self._num_steps_left = 0
        self._inputs = self._with_margin(inputs)

    def goes_on(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """Whether that is the run's next step."""
        return (
            self.is_due
            and len(scheduled) == len(self.seq_ids)
            and all(
                item.seq_id == seq_id and item.num_new_tokens == 1 and item.entry is None
                for item, seq_id in zip(scheduled, self.seq_ids, strict=True)
            )
        )

    def extend_table(self, number: int, first: int, block_ids: tuple[int, ...]) -> None:
        """More blocks for the sequence of that number in the run, from its `first` on."""
        self._block_tables[number, first : first + len(block_ids)] = block_ids

    def first(self) -> StepInputs:
        return self._inputs

    def advance(self) -> StepInputs:
        """The inputs of the next step; the same ones as before, unless lengths have outgrown
        them."""
        self.is_due = False
        self._positions += 1
        self.seq_lens += 1
        self._num_tokens += 1
        if self._num_steps_in_blocks > 0:  # nobody comes to another block
            self._slots += 1
            self._num_steps_in_blocks -= 1
        else:
            self._find_slots()
        self._num_steps_left -= 1
        if self._num_steps_left < 0:
            self._inputs = self._with_margin(self._inputs)
        return self._inputs

    def append(self, token_ids: Sequence[int]) -> None:
        """The tokens that the last step brought."""
        self.input_ids[:] = token_ids
        for history, token_id in zip(self._histories, token_ids, strict=True):
            history.append(token_id)
        self.is_due = True

    def _find_slots(self) -> None:
        blocks, offsets = np.divmod(self._positions, self._block_size)
        block_ids = self._block_tables[self._numbers, blocks]
        np.multiply(block_ids, self._block_size, out=self._slots, dtype=np.int64)
        self._slots += offsets
        self._num_steps_in_blocks = self._block_size - 1 - int(offsets.max())

    def _with_margin(self, inputs: StepInputs) -> StepInputs:
        """The same tensors, said to hold longer sequences than they do today."""
        self._num_steps_left = _MARGIN_TOKENS
        max_seq_len = int(self.seq_lens.max()) + _MARGIN_TOKENS
        layout = replace(inputs.context.layout, max_seq_len=max_seq_len)
        return replace(inputs, context=replace(inputs.context, layout=layout))
