"""From a `Batch` to the tensors of one forward pass.

A sequence is sent whole once; what later batches leave out is kept here: its tokens, its block
table and how many tokens are computed. A sampled token is appended to this copy at once, since the
next batch may need it before policy has seen it.

                 row a (decode)   row b (a chunk of prompt)      row c (decode)
    input_ids    [a17,            b4, b5, b6, b7,                c30]     flat, no padding
    positions    [17,             4,  5,  6,  7,                 30]
    seq_lens     [18,             8,                             31]

In most steps the same sequences take one token each, or one and as many drafts as in the step
before. `SteadyDecode` and `SteadyVerify` turn the inputs of one such step into those of the next in
place: the tensors do not move, so a CPU's list of calls can be run again unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.batch import Batch, ScheduledSequence, SequenceEntry
from penstock.engine.config import MAX_SPECULATIVE_TOKENS
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.runner.staging import InputStaging, padded_num_bytes
from penstock.engine.runner.step_extensions import (
    Interrupt,
    PlannedRows,
    Reader,
    SequenceExtension,
)
from penstock.engine.sampling.sampler import Sampled
from penstock.engine.sampling.sampling_table import SamplingBatch, SamplingTable
from penstock.kernels.paged_layout import PagedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """Where tokens come from and go to on a device that keeps the last token of each row.

    Attributes:
        awaited_indices: int64 [num_awaited], indices into input_ids of the tokens that the host
            does not know yet.
        awaited_rows: int64 [num_awaited], the rows that have these tokens.
        sampled_rows: int64 [num_sampled], the rows that get a new token.
    """

    awaited_indices: Tensor
    awaited_rows: Tensor
    sampled_rows: Tensor

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> TokenRows:
        return cls(**{name: tensors[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """The inputs of one step for model and sampler.

    Attributes:
        input_ids: int64 [num_tokens]
        sampled_seq_ids: of each sampled row: sequences whose last known token is computed in this
            step, in order, with as many rows more as they have drafts.
        sampled_tokens: int64 [num_sampled], indices into input_ids of those tokens; None if all
            tokens are sampled from.
        sampling: the sampling parameters of those sequences.
        readers: called after the forward pass.
        token_rows: only where tokens stay on the device.
        drafts: of each sampled row, the draft that comes next, −1 for none; empty if no sequence
            has drafts.
    """

    input_ids: Tensor
    context: ForwardContext
    sampled_seq_ids: tuple[int, ...]
    sampled_tokens: Tensor | None
    sampling: SamplingBatch
    readers: Sequence[Reader] = ()
    token_rows: TokenRows | None = None
    drafts: tuple[int, ...] = ()

    @property
    def plain_rows(self) -> list[int]:
        """The sampled rows of sequences without drafts."""
        if not self.drafts:
            return list(range(len(self.sampled_seq_ids)))
        pairs = enumerate(pairwise((_NO_DRAFT, *self.drafts)))
        return [row for row, pair in pairs if pair == (_NO_DRAFT, _NO_DRAFT)]


Integers = npt.NDArray[np.int64]
_NO_DRAFT = -1
ON_DEVICE = -1  # placeholder for a token that only the device knows yet


class DeviceSequence:
    """The device's copy of one sequence, except for what every step needs: that is in columns."""

    __slots__ = ("num_blocks", "num_prompt", "row", "states", "token_ids")

    def __init__(self, entry: SequenceEntry, row: int) -> None:
        self.row = row
        self.token_ids = list(entry.token_ids)
        self.num_prompt = entry.num_prompt_tokens
        self.num_blocks = 0
        self.states: dict[SequenceExtension, Any] = {}


class InputBatch:
    """The sequences on this device.

    Args:
        max_num_seqs: maximum number of sequences.
        max_blocks: maximum number of blocks of a sequence.
        draws_tokens: False: another rank does, and `receive` appends them.
        staging: copies a step's arrays to a device that keeps its tokens; None on a CPU.

    Attributes:
        extensions: what its sequences may need; complete before the first of them enters.
        run: the steps that the newest one belongs to, if it may be the first of several alike.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        draws_tokens: bool = True,
        staging: InputStaging | None = None,
    ) -> None:
        self._sequences: dict[int, DeviceSequence] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        # By row: the number of known tokens, the number of computed ones, and the last token.
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._last_token = np.zeros(max_num_seqs, dtype=np.int64)
        self.extensions: list[SequenceExtension] = []
        self._num_with: dict[SequenceExtension, int] = {}  # sequences, of those that some have
        self._device = device
        self._block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        # The tables of the step's sequences, in the step's order. On a CPU they never move, since a
        # descheduled thread may read them late.
        self._step_tables = np.zeros_like(self._block_tables)
        # While a run lasts, it counts the values above for its rows instead. Only where tokens are
        # known when their step ends.
        self._may_run = draws_tokens and staging is None
        self.run: SteadyDecode | None = None
        self._sampling = SamplingTable(max_num_seqs, device)
        self._block_size = block_size
        self._staging = staging

    def update(self, batch: Batch) -> None:
        """Remove sequences that left, add those that entered, extend block tables."""
        run = self.run
        if run is not None and (batch.left_seq_ids or not run.goes_on(batch.scheduled)):
            self._end_run(run)
        left: dict[int, dict[SequenceExtension, Any]] = {}
        for seq_id in batch.left_seq_ids:
            # A sequence that left before it was scheduled was never added.
            sequence = self._sequences.pop(seq_id, None)
            if sequence is not None:
                self._free_rows.append(sequence.row)
                self._count_states(sequence, -1)
                left[seq_id] = sequence.states  # beams that enter now may be its forks
        for number, item in enumerate(batch.scheduled):
            if item.entry is not None:
                self._enter(item.seq_id, item.entry, left)
            if item.new_block_ids:
                first = self._extend_table(item)
                if self.run is not None:
                    self.run.extend_table(number, first, item.new_block_ids)

    def prepare(self, batch: Batch, kv_pool: Tensor, *, needs_prompt_lens: bool) -> StepInputs:
        """The tensors of a step, valid until the next; counts the step's tokens as computed."""
        if self.run is not None:
            return self.run.advance(batch.scheduled)
        scheduled = batch.scheduled
        sequences = [self._sequences[item.seq_id] for item in scheduled]
        rows = np.array([sequence.row for sequence in sequences])
        self._append_drafts(scheduled, sequences)
        query_lens = np.array([item.num_new_tokens for item in scheduled])
        starts = self._num_computed[rows]
        seq_lens = starts + query_lens
        num_known = self._num_tokens[rows]
        assert (seq_lens <= num_known).all(), f"{seq_lens} of {num_known} tokens"
        self._num_computed[rows] = seq_lens
        step = PlannedRows(
            scheduled=scheduled,
            states=[sequence.states for sequence in sequences],
            starts=starts,
            stops=seq_lens,
            is_complete=seq_lens == num_known,
            device=self._device,
        )
        for extension in self.extensions:
            if extension in self._num_with:
                extension.before(step)
        (sampled,) = step.is_complete.nonzero()
        num_tokens = int(query_lens.sum())
        is_decode = len(sampled) == num_tokens
        arrays = self._token_arrays(sequences, rows, query_lens, seq_lens, is_decode=is_decode)
        drafts = [scheduled[number].draft_token_ids for number in sampled]
        sampled, before, drafts_of_rows = _rows_with_drafts(sampled, drafts)
        are_all_sampled = len(sampled) == num_tokens
        if not are_all_sampled:
            arrays["sampled_tokens"] = query_lens.cumsum()[sampled] - 1 - before
        if needs_prompt_lens:
            arrays["prompt_lens"] = _prompt_lens(sequences, query_lens)
        if self._staging is not None:
            arrays |= _awaited(arrays["input_ids"], rows.repeat(query_lens), rows[sampled])
        tensors = self._upload(arrays)
        context = _context(tensors, kv_pool, int(query_lens.max()), int(seq_lens.max()))
        inputs = StepInputs(
            input_ids=tensors["input_ids"],
            context=context if step.images is None else replace(context, images=step.images),
            sampled_seq_ids=tuple(scheduled[row].seq_id for row in sampled),
            sampled_tokens=tensors.get("sampled_tokens"),
            sampling=self._sampling.select(rows[sampled], seq_lens[sampled] - before, step.special),
            readers=step.readers,
            token_rows=None if self._staging is None else TokenRows.of(tensors),
            drafts=drafts_of_rows,
        )
        goes_on = are_all_sampled and self._may_run and step.may_last
        goes_on = goes_on and not inputs.sampling.changed
        if goes_on and not any(item.num_wanted_drafts for item in scheduled):
            kind = SteadyVerify if drafts_of_rows else SteadyDecode
            histories = [sequence.token_ids for sequence in sequences]
            self.run = kind(inputs, scheduled, rows, histories, self._block_size, step.interrupts)
            return self.run.inputs
        return inputs

    def inputs_of(
        self,
        spans: Mapping[int, tuple[int, int]],
        kv_pool: Tensor,
        *,
        needs_prompt_lens: bool,
        lag: int = 0,
    ) -> StepInputs:
        """The tensors of another model's forward pass over known tokens of some sequences, sampled
        after the last of each. It counts nothing as computed, and no run may last.

        Args:
            spans: seq_id → the position of its first token, and that after its last.
            lag: the tokens are those so many positions later.
        """
        sequences = [self._sequences[seq_id] for seq_id in spans]
        rows = np.array([sequence.row for sequence in sequences])
        starts, ends = np.array(list(spans.values())).T
        query_lens = ends - starts
        arrays = self._token_arrays(sequences, rows, query_lens, ends, is_decode=False, lag=lag)
        arrays["sampled_tokens"] = query_lens.cumsum() - 1
        if needs_prompt_lens:
            arrays["prompt_lens"] = _prompt_lens(sequences, query_lens)
        tensors = self._upload(arrays)
        return StepInputs(
            input_ids=tensors["input_ids"],
            context=_context(tensors, kv_pool, int(query_lens.max()), int(ends.max())),
            sampled_seq_ids=tuple(spans),
            sampled_tokens=tensors["sampled_tokens"],
            sampling=self._sampling.select(rows, ends + lag),
        )

    def state(self, seq_id: int, extension: SequenceExtension) -> Any:
        """What an extension keeps of a sequence."""
        return self._sequences[seq_id].states[extension]

    def token_ids(self, seq_id: int) -> list[int]:
        """A sequence's tokens, prompt and output."""
        return self._sequences[seq_id].token_ids

    def num_computed(self, seq_id: int) -> int:
        """How many of a sequence's tokens have keys and values once this step has run; not while a
        run lasts."""
        return int(self._num_computed[self._sequences[seq_id].row])

    def block_ids(self, seq_id: int) -> npt.NDArray[np.int32]:
        """A sequence's block table."""
        sequence = self._sequences[seq_id]
        return self._block_tables[sequence.row, : sequence.num_blocks]

    def slot(self, seq_id: int, position: int) -> int:
        """Where in a pool this position of a sequence is stored."""
        number, offset = divmod(position, self._block_size)
        return int(self.block_ids(seq_id)[number]) * self._block_size + offset

    def append(self, inputs: StepInputs, sampled: Sampled) -> Sampled:
        """Append a step's tokens to their sequences, as inputs of the next step; those that were
        sampled after right drafts. A token that is invalid is appended too, unless after others: a
        step already planned may expect it."""
        if self.run is not None:
            return self.run.append(inputs, sampled)
        plain, token_ids = inputs.plain_rows, sampled.token_ids
        sequences = [self._sequences[inputs.sampled_seq_ids[row]] for row in plain]
        new = [token_ids[row] for row in plain]
        for sequence, token_id in zip(sequences, new, strict=True):
            sequence.token_ids.append(token_id)
        if plain:
            rows = [sequence.row for sequence in sequences]
            self._last_token[rows] = new
            self._num_tokens[rows] += 1
        return self.append_checked(inputs, sampled) if inputs.drafts else sampled

    def append_checked(self, inputs: StepInputs, sampled: Sampled) -> Sampled:
        """Append a step's tokens in place of its drafts.

        Returns: the rows of these tokens, and the rows of sequences without drafts.
        """
        kept: list[int] = []
        num_rows = len(sampled.token_ids)
        for seq_id, group in groupby(range(num_rows), inputs.sampled_seq_ids.__getitem__):
            rows = list(group)
            sequence = self._sequences.get(seq_id)
            if sequence is None or len(rows) == 1:  # a sequence may have left meanwhile
                kept += rows[:1]
                continue
            token_ids = sequence.token_ids
            kept += _replace_drafts(token_ids, rows, inputs.drafts, sampled)
            self._num_tokens[sequence.row] = len(token_ids)
            self._num_computed[sequence.row] = len(token_ids) - 1
            self._last_token[sequence.row] = token_ids[-1]
        return sampled.select(kept)

    def receive(self, seq_id: int, token_ids: Sequence[int], *, num_drafts: int) -> None:
        """Append a sequence's tokens of a step that ended elsewhere, in place of its drafts."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:  # it has left meanwhile
            return
        known, row = sequence.token_ids, sequence.row
        del known[len(known) - num_drafts :]
        known += token_ids
        self._num_tokens[row] = len(known)
        self._last_token[row] = known[-1]
        if num_drafts:
            self._num_computed[row] = len(known) - 1

    def expect(self, seq_ids: Sequence[int]) -> list[tuple[list[int], int]]:
        """Append a placeholder to each sequence for a token that the device samples: the input of
        its next step. Returns where the host will store each token: a list, and an index into
        it."""
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        rows = [sequence.row for sequence in sequences]
        self._last_token[rows] = ON_DEVICE
        self._num_tokens[rows] += 1
        destinations = [(each.token_ids, len(each.token_ids)) for each in sequences]
        for token_ids, _ in destinations:
            token_ids.append(ON_DEVICE)
        return destinations

    def _end_run(self, run: SteadyDecode) -> None:
        """Copy a run's counts back to the columns."""
        self.run = None
        num_tokens = np.array([len(history) for history in run.histories])
        self._num_computed[run.rows] = num_tokens - run.is_due
        self._num_tokens[run.rows] = num_tokens
        self._last_token[run.rows] = [history[-1] for history in run.histories]

    def _token_arrays(
        self,
        sequences: Sequence[DeviceSequence],
        rows: Integers,
        query_lens: Integers,
        seq_lens: Integers,
        *,
        is_decode: bool,
        lag: int = 0,
    ) -> dict[str, npt.NDArray[Any]]:
        """The arrays that a forward pass reads, by name."""
        starts = seq_lens - query_lens
        ends = query_lens.cumsum()
        if is_decode:  # one token each, the last: by far the most common step
            rows_of_tokens, positions, input_ids = rows, starts, self._last_token[rows]
        else:
            rows_of_tokens = rows.repeat(query_lens)
            positions = np.arange(ends[-1]) + (seq_lens - ends).repeat(query_lens)
            input_ids = np.concatenate(
                [
                    sequence.token_ids[start + lag : stop + lag]
                    for sequence, start, stop in zip(sequences, starts, seq_lens, strict=True)
                ]
            )
        block_of_token, offsets = np.divmod(positions, self._block_size)
        slots = self._block_tables[rows_of_tokens, block_of_token] * np.int64(self._block_size)
        slots += offsets
        num_columns = -(-int(seq_lens.max()) // self._block_size)
        block_tables = self._step_tables[: len(rows)]
        block_tables[:, :num_columns] = self._block_tables[rows, :num_columns]
        return {
            "input_ids": input_ids,
            "positions": positions,
            "slots": slots,
            "query_start_loc": _from_zero(ends),
            "seq_lens": seq_lens.astype(np.int32),
            # On a CPU all columns, since a run fills more of them.
            "block_tables": block_tables[:, : None if self._staging is None else num_columns],
        }

    def _upload(self, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
        if self._staging is not None:
            return dict(zip(arrays, self._staging.upload(arrays.values()), strict=True))
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _enter(
        self,
        seq_id: int,
        entry: SequenceEntry,
        left: Mapping[int, Mapping[SequenceExtension, Any]],
    ) -> None:
        """
        Args:
            left: the states of sequences that have just left.
        """
        known = self._sequences.pop(seq_id, None)
        if known is not None:
            self._count_states(known, -1)
        row = self._free_rows.pop() if known is None else known.row
        sequence = self._sequences[seq_id] = DeviceSequence(entry, row)
        parents = {} if entry.parent_seq_id is None else left.get(entry.parent_seq_id, {})
        for extension in self.extensions:
            state = extension.enter(entry, sequence.token_ids, parents.get(extension))
            if state is not None:
                sequence.states[extension] = state
        self._count_states(sequence, 1)
        self._num_tokens[row] = len(entry.token_ids)
        self._num_computed[row] = entry.num_computed_tokens
        self._last_token[row] = entry.token_ids[-1]
        self._sampling.enter(row, entry.params, entry.index)

    def _count_states(self, sequence: DeviceSequence, change: int) -> None:
        """A sequence enters (1) or leaves (-1) with its states."""
        for extension in sequence.states:
            number = self._num_with.get(extension, 0) + change
            if number:
                self._num_with[extension] = number
            else:
                del self._num_with[extension]

    def _append_drafts(
        self, scheduled: Sequence[ScheduledSequence], sequences: Sequence[DeviceSequence]
    ) -> None:
        for item, sequence in zip(scheduled, sequences, strict=True):
            if item.draft_token_ids:
                sequence.token_ids.extend(item.draft_token_ids)
                self._num_tokens[sequence.row] += len(item.draft_token_ids)

    def _extend_table(self, item: ScheduledSequence) -> int:
        """Append a sequence's new blocks to its table; the index of the first."""
        sequence = self._sequences[item.seq_id]
        first, end = sequence.num_blocks, sequence.num_blocks + len(item.new_block_ids)
        assert end <= self._block_tables.shape[1], f"{end} blocks for sequence {item.seq_id}"
        self._block_tables[sequence.row, first:end] = item.new_block_ids
        sequence.num_blocks = end
        return first


def staging_num_bytes(max_num_tokens: int, max_num_seqs: int, max_blocks: int) -> int:
    """Maximum size of a step's arrays."""
    per_token = [
        8 * max_num_tokens
    ] * 6  # ids, positions, slots, prompt lengths; awaited ones twice
    # Two of them in 32 bits; two have a row more for each draft.
    per_sequence = [8 * (max_num_seqs + 1 + MAX_SPECULATIVE_TOKENS)] * 4
    tables = 4 * max_num_seqs * max_blocks
    return sum(map(padded_num_bytes, (*per_token, *per_sequence, tables)))


def _prompt_lens(sequences: Sequence[DeviceSequence], query_lens: Integers) -> Integers:
    """For each token, the length of its sequence's prompt."""
    return np.array([sequence.num_prompt for sequence in sequences]).repeat(query_lens)


def _awaited(
    input_ids: Integers, rows_of_tokens: Integers, sampled_rows: Integers
) -> dict[str, npt.NDArray[Any]]:
    (indices,) = (input_ids == ON_DEVICE).nonzero()
    return {
        "awaited_indices": indices,
        "awaited_rows": rows_of_tokens[indices],
        "sampled_rows": sampled_rows,
    }


def _context(
    tensors: dict[str, Tensor], kv_pool: Tensor, max_query_len: int, max_seq_len: int
) -> ForwardContext:
    layout = PagedLayout(
        query_start_loc=tensors["query_start_loc"],
        seq_lens=tensors["seq_lens"],
        block_tables=tensors["block_tables"],
        slot_mapping=tensors["slots"],
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    return ForwardContext(
        kv_pool=kv_pool,
        layout=layout,
        positions=tensors["positions"],
        prompt_lens=tensors.get("prompt_lens"),
    )


def _rows_with_drafts(
    sampled: Integers, drafts: Sequence[tuple[int, ...]]
) -> tuple[Integers, Integers, tuple[int, ...]]:
    """The rows to sample from, as `StepInputs` has them.

    Args:
        sampled: [num_seqs], numbers of the sequences that get tokens.
        drafts: of each.

    Returns:
        sampled, repeated for each row; how many tokens each row is before the sequence's last; and
        the draft that follows each row, empty if there are none.
    """
    if not any(drafts):
        return sampled, np.zeros_like(sampled), ()
    num_rows = [len(each) + 1 for each in drafts]
    before = np.concatenate([np.arange(number)[::-1] for number in num_rows])
    return sampled.repeat(num_rows), before, tuple(chain(*((*each, _NO_DRAFT) for each in drafts)))


def _replace_drafts(
    token_ids: list[int], rows: Sequence[int], drafts: Sequence[int], sampled: Sampled
) -> Sequence[int]:
    """Replace the drafts at a sequence's end by the tokens sampled up to the first that is not its
    draft, but no invalid one after others: it will be sampled again.

    Args:
        rows: of the sequence; successive.
        drafts: as in `StepInputs`.

    Returns: the rows of these tokens.
    """
    num_new = 0
    for row in rows:
        is_valid = sampled.is_valid[row]
        num_new += is_valid or num_new == 0
        if not is_valid or drafts[row] != sampled.token_ids[row]:
            break
    first = rows[0]
    del token_ids[len(token_ids) - len(rows) + 1 :]
    token_ids += sampled.token_ids[first : first + num_new]
    return rows[:num_new]


def _from_zero(ends: Integers) -> npt.NDArray[np.int32]:
    """Running sums, preceded by a 0."""
    starts = np.zeros(len(ends) + 1, dtype=np.int32)
    starts[1:] = ends
    return starts


_MARGIN_TOKENS = 256  # growth of the lengths before the inputs are rebuilt
_FEW_ROWS = 32


class SteadyDecode:
    """Successive steps in which the same sequences compute their last known token.

    Args:
        inputs: of the first step, in host memory.
        scheduled: the first step's sequences.
        rows: [num_seqs], the sequences' rows.
        histories: the tokens of each sequence; extended by every step.
        interrupts: as in `PlannedRows`.

    Attributes:
        inputs: of the newest step.
        is_plain: no feature takes part in its steps.
    """

    def __init__(
        self,
        inputs: StepInputs,
        scheduled: Sequence[ScheduledSequence],
        rows: Integers,
        histories: Sequence[list[int]],
        block_size: int,
        interrupts: Sequence[Interrupt],
    ) -> None:
        layout = inputs.context.layout
        self.rows, self.histories, self._interrupts = rows, histories, interrupts
        self.seq_ids = [item.seq_id for item in scheduled]
        self.is_due = False  # whether the tokens of the next step are known
        sampling = inputs.sampling
        is_special = inputs.drafts or inputs.readers or interrupts or sampling.num_tops
        self.is_plain = not is_special and sampling.masks is None
        self._scheduled: Sequence[ScheduledSequence] = ()  # the newest step
        self._query_lens = [item.num_new_tokens for item in scheduled]
        self._input_ids = inputs.input_ids.numpy()
        self._seq_lens = layout.seq_lens.numpy()
        self._positions = inputs.context.positions.numpy()
        self._slots = layout.slot_mapping.numpy()
        self._block_tables = layout.block_tables.numpy()
        self._num_tokens = inputs.sampling.num_tokens
        self._block_size = block_size
        # What grows by one in each step, slots last: of few rows as views, since after a step's
        # weights all of NumPy's code has left the caches.
        self._many = [self._positions, self._seq_lens, self._num_tokens, self._slots]
        self._few: list[Any] = []
        if len(rows) <= _FEW_ROWS:
            self._few, self._many = [each.data for each in self._many], []
        self._ids: Any = self._input_ids.data
        self._numbers = np.arange(len(rows)).repeat(self._query_lens)  # of each token's sequence
        self._num_steps_in_blocks = self._num_steps_left = 0
        self.inputs = self._with_margin(inputs)

    def goes_on(self, scheduled: Sequence[ScheduledSequence]) -> bool:
        """Whether a step continues the run."""
        if not self.is_due or len(scheduled) != len(self.seq_ids):
            return False
        for item, seq_id, query_len in zip(scheduled, self.seq_ids, self._query_lens, strict=True):
            is_same = item.seq_id == seq_id and item.num_new_tokens == query_len
            if not is_same or item.entry is not None or item.num_wanted_drafts:
                return False
        interrupts = self._interrupts
        self._scheduled = scheduled
        return not (interrupts and any(ends(scheduled[number]) for number, ends in interrupts))

    def is_repeated(self, batch: Batch) -> bool:
        """Whether a step is the newest one again, and only numbers change in its inputs."""
        is_same = batch.scheduled is self._scheduled and self.is_due and self._num_steps_left > 0
        return is_same and self.is_plain and not (batch.left_seq_ids or batch.moves)

    def extend_table(self, number: int, first: int, block_ids: tuple[int, ...]) -> None:
        """Store new blocks, from index `first` on, of the run's sequence `number`."""
        self._block_tables[number, first : first + len(block_ids)] = block_ids

    def advance(self, _: Sequence[ScheduledSequence]) -> StepInputs:
        """The inputs of the next step; the same object, unless the lengths have outgrown it."""
        self.is_due = False
        is_in_blocks = self._num_steps_in_blocks > 0  # no sequence enters a new one
        num_grown = 4 if is_in_blocks else 3
        for few in self._few[:num_grown]:
            for row in range(len(few)):
                few[row] += 1
        for many in self._many[:num_grown]:
            many += 1
        if is_in_blocks:
            self._num_steps_in_blocks -= 1
        else:
            self._find_slots()
        self._num_steps_left -= 1
        if self._num_steps_left < 0:
            self.inputs = self._with_margin(self.inputs)
        return self.inputs

    def append(self, _: StepInputs, sampled: Sampled) -> Sampled:
        """Store the last step's tokens; those that are kept."""
        self.store(sampled.token_ids)
        return sampled

    def store(self, token_ids: Sequence[int]) -> None:
        """Append a token to each sequence, as inputs of the next step."""
        for row, token_id in enumerate(token_ids):
            self._ids[row] = token_id
            self.histories[row].append(token_id)
        self.is_due = True

    def _find_slots(self) -> None:
        blocks, offsets = np.divmod(self._positions, self._block_size)
        block_ids = self._block_tables[self._numbers, blocks]
        np.multiply(block_ids, self._block_size, out=self._slots, dtype=np.int64)
        self._slots += offsets
        self._num_steps_in_blocks = self._block_size - 1 - int(offsets.max())

    def _with_margin(self, inputs: StepInputs) -> StepInputs:
        """Inputs that declare a larger maximum length, with the tensors of these."""
        self._num_steps_left = _MARGIN_TOKENS // max(self._query_lens)
        max_seq_len = int(self._seq_lens.max()) + _MARGIN_TOKENS
        layout = replace(inputs.context.layout, max_seq_len=max_seq_len)
        return replace(inputs, context=replace(inputs.context, layout=layout))


class SteadyVerify(SteadyDecode):
    """Successive steps in which the same sequences compute their last known token and drafts, of
    which each sequence has as many in every step."""

    def advance(self, scheduled: Sequence[ScheduledSequence]) -> StepInputs:
        """The inputs of the next step; their context is the same object, unless the lengths have
        outgrown it."""
        self.is_due = False
        token_ids: list[int] = []
        drafts: list[int] = []
        for item, history in zip(scheduled, self.histories, strict=True):
            token_ids += (history[-1], *item.draft_token_ids)
            drafts += (*item.draft_token_ids, _NO_DRAFT)
            history += item.draft_token_ids
        self._input_ids[:] = token_ids
        num_new = np.array([len(history) for history in self.histories]) - self._seq_lens
        self._seq_lens += num_new
        num_new = num_new[self._numbers]
        self._positions += num_new
        self._num_tokens += num_new
        self._find_slots()
        self._num_steps_left -= 1
        if self._num_steps_left < 0:
            self.inputs = self._with_margin(self.inputs)
        self.inputs = replace(self.inputs, drafts=tuple(drafts))
        return self.inputs

    def append(self, inputs: StepInputs, sampled: Sampled) -> Sampled:
        """Store the last step's tokens in place of its drafts; those that are kept."""
        kept: list[int] = []
        first = 0
        for history, query_len in zip(self.histories, self._query_lens, strict=True):
            rows = range(first, first + query_len)
            kept += _replace_drafts(history, rows, inputs.drafts, sampled)
            first += query_len
        self.is_due = True
        return sampled.select(kept)
