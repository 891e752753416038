"""From a `Batch` to the tensors of one forward pass.

A sequence is sent whole once; what later batches leave out is remembered here: its tokens, its
block table and how much of it is computed. A sampled token is appended to this copy at once,
since the next batch may need it before policy has seen it.

                 row a (decode)   row b (a chunk of prompt)      row c (decode)
    input_ids    [a17,            b4, b5, b6, b7,                c30]     flat, no padding
    positions    [17,             4,  5,  6,  7,                 30]
    seq_lens     [18,             8,                             31]

In most steps the same sequences take one token each. `DecodeRun` makes the inputs of one such step
those of the next by counting up in place: the tensors stay where they are, so a CPU's list of calls
need not look again where that is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.batch import Batch, ScheduledSequence, SequenceEntry
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.runner.staging import InputStaging, padded_num_bytes
from penstock.engine.sampling.logprobs import PromptSpan
from penstock.engine.sampling.sampling_table import SamplingBatch, SamplingRow, SamplingTable
from penstock.kernels.paged_layout import PagedLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """Where tokens come from and go to on a device that keeps the last one of each row.

    Attributes:
        awaited_places: int64 [num_awaited], of the tokens that the host does not know yet, among
            num_tokens.
        awaited_rows: int64 [num_awaited], the rows that have them.
        sampled_rows: int64 [num_sampled], the rows that get one.
    """

    awaited_places: Tensor
    awaited_rows: Tensor
    sampled_rows: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step, ready to run: what a model and a sampler are given.

    Attributes:
        input_ids: int64 [num_tokens]
        sampled_seq_ids: sequences whose last known token is computed in this step, in order.
        sampled_tokens: int64 [num_sampled], the place of those tokens among num_tokens; None if
            they are all of them.
        sampling: what those sequences ask for.
        prompt_spans: the prompt tokens whose log-probabilities somebody wants.
        token_rows: only where tokens stay on the device.
    """

    input_ids: Tensor
    context: ForwardContext
    sampled_seq_ids: tuple[int, ...]
    sampled_tokens: Tensor | None
    sampling: SamplingBatch
    prompt_spans: tuple[PromptSpan, ...]
    token_rows: TokenRows | None = None


Integers = npt.NDArray[np.int64]
ON_DEVICE = -1  # in the place of a token that only the device knows yet


class DeviceSequence:
    """What the device remembers of one sequence; what every step needs is in columns instead."""

    __slots__ = ("num_blocks", "num_prompt", "num_prompt_logprobs", "row", "token_ids")

    def __init__(self, entry: SequenceEntry, row: int) -> None:
        self.row = row
        self.token_ids = list(entry.token_ids)
        self.num_prompt = entry.num_prompt_tokens
        self.num_blocks = 0
        self.num_prompt_logprobs = entry.num_prompt_logprobs

    def prompt_span(self, seq_id: int, start: int, stop: int, first_row: int) -> PromptSpan | None:
        """The prompt tokens that follow those at positions `start` to `stop`, which are in row
        `first_row` of the step and the next ones; None if there are none or nobody asks."""
        token_ids = self.token_ids[start + 1 : min(stop + 1, self.num_prompt)]
        if self.num_prompt_logprobs is None or not token_ids:
            return None
        return PromptSpan(
            seq_id=seq_id,
            position=start + 1,
            token_ids=token_ids,
            first_row=first_row,
            num_top=self.num_prompt_logprobs,
        )


class InputBatch:
    """The sequences on this device.

    Args:
        max_num_seqs: sequences at once.
        max_blocks: blocks of one sequence at most.
        staging: brings a step's arrays to the device, where its tokens stay; None on a CPU.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
        staging: InputStaging | None = None,
    ) -> None:
        self._sequences: dict[int, DeviceSequence] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        # By row: how many tokens are known and computed, and the last one.
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._last_token = np.zeros(max_num_seqs, dtype=np.int64)
        self._block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        # Those of the step's sequences, in the order of the step. On a CPU they are used where they
        # are, also by a thread that comes late, and so never move.
        self._step_tables = np.zeros_like(self._block_tables)
        # What of the rows above is held, and counted, by the steps under way instead.
        self._run: DecodeRun | None = None
        self._sampling = SamplingTable(max_num_seqs, device)
        self._block_size = block_size
        self._staging = staging

    def update(self, batch: Batch) -> None:
        """Forget who left, take in who entered, extend block tables."""
        run = self._run
        if run is not None and (batch.left_seq_ids or not run.goes_on(batch.scheduled)):
            self._end_run(run)
        for seq_id in batch.left_seq_ids:
            # A sequence that left before it was ever scheduled was never here.
            sequence = self._sequences.pop(seq_id, None)
            if sequence is not None:
                self._free_rows.append(sequence.row)
        for number, item in enumerate(batch.scheduled):
            if item.entry is not None:
                self._enter(item.seq_id, item.entry)
            if item.new_block_ids:
                first = self._extend_table(item)
                if self._run is not None:
                    self._run.extend_table(number, first, item.new_block_ids)

    def prepare(self, batch: Batch, kv_pool: Tensor, *, needs_prompt_lens: bool) -> StepInputs:
        """The tensors of a step, whose tokens are counted as computed; good until the next step."""
        if self._run is not None:
            return self._run.advance()
        scheduled = batch.scheduled
        sequences = [self._sequences[item.seq_id] for item in scheduled]
        rows = np.array([sequence.row for sequence in sequences])
        query_lens = np.array([item.num_new_tokens for item in scheduled])
        starts = self._num_computed[rows]
        seq_lens = starts + query_lens
        num_tokens = self._num_tokens[rows]
        assert (seq_lens <= num_tokens).all(), f"{seq_lens} of {num_tokens} tokens"
        self._num_computed[rows] = seq_lens
        (sampled,) = (seq_lens == num_tokens).nonzero()
        is_decode = len(sampled) == query_lens.sum()
        arrays = self._token_arrays(sequences, rows, query_lens, seq_lens, is_decode=is_decode)
        if not is_decode:
            arrays["sampled_tokens"] = query_lens.cumsum()[sampled] - 1
        if needs_prompt_lens:
            lens = np.array([sequence.num_prompt for sequence in sequences])
            arrays["prompt_lens"] = lens.repeat(query_lens)
        if self._staging is not None:
            arrays |= _awaited(arrays["input_ids"], rows.repeat(query_lens), rows[sampled])
        tensors = self._upload(arrays)
        inputs = StepInputs(
            input_ids=tensors["input_ids"],
            context=_context(tensors, kv_pool, int(query_lens.max()), int(seq_lens.max())),
            sampled_seq_ids=tuple(scheduled[row].seq_id for row in sampled),
            sampled_tokens=tensors.get("sampled_tokens"),
            sampling=self._sampling.select(rows[sampled], seq_lens[sampled]),
            prompt_spans=tuple(self._prompt_spans(scheduled, sequences, starts, seq_lens)),
            token_rows=None if self._staging is None else _token_rows(tensors),
        )
        if is_decode and self._staging is None and not inputs.sampling.changed:
            histories = [sequence.token_ids for sequence in sequences]
            self._run = DecodeRun(inputs, rows, histories, self._block_size)
            return self._run.first()
        return inputs

    def append(self, seq_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """A token for each, as this device sampled it; input of the sequence's next step."""
        if self._run is not None:
            self._run.append(token_ids)
            return
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence.token_ids.append(token_id)
        rows = [sequence.row for sequence in sequences]
        self._last_token[rows] = token_ids
        self._num_tokens[rows] += 1

    def expect(self, seq_ids: Sequence[int]) -> list[tuple[list[int], int]]:
        """A token for each, which the device samples and the host does not know yet: input of the
        sequence's next step. Its place in the host's copy: the tokens, and an index among them."""
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        rows = [sequence.row for sequence in sequences]
        self._last_token[rows] = ON_DEVICE
        self._num_tokens[rows] += 1
        places = [(sequence.token_ids, len(sequence.token_ids)) for sequence in sequences]
        for token_ids, _ in places:
            token_ids.append(ON_DEVICE)
        return places

    def _end_run(self, run: DecodeRun) -> None:
        """Take over what it has counted."""
        self._run = None
        self._num_computed[run.rows] = run.seq_lens
        self._num_tokens[run.rows] = run.seq_lens + run.is_due
        self._last_token[run.rows] = run.input_ids

    def _token_arrays(
        self,
        sequences: Sequence[DeviceSequence],
        rows: Integers,
        query_lens: Integers,
        seq_lens: Integers,
        *,
        is_decode: bool,
    ) -> dict[str, npt.NDArray[Any]]:
        """What a forward pass reads, by name."""
        starts = seq_lens - query_lens
        ends = query_lens.cumsum()
        if is_decode:  # one token each, the last: by far the most frequent step
            rows_of_tokens, positions, input_ids = rows, starts, self._last_token[rows]
        else:
            rows_of_tokens = rows.repeat(query_lens)
            positions = np.arange(ends[-1]) + (seq_lens - ends).repeat(query_lens)
            input_ids = np.concatenate(
                [
                    sequence.token_ids[start:stop]
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
            # On a CPU all columns: a run will fill some more.
            "block_tables": block_tables[:, : None if self._staging is None else num_columns],
        }

    def _upload(self, arrays: dict[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
        if self._staging is not None:
            return dict(zip(arrays, self._staging.upload(arrays.values()), strict=True))
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def _enter(self, seq_id: int, entry: SequenceEntry) -> None:
        known = self._sequences.pop(seq_id, None)
        row = self._free_rows.pop() if known is None else known.row
        sequence = self._sequences[seq_id] = DeviceSequence(entry, row)
        self._num_tokens[row] = len(entry.token_ids)
        self._num_computed[row] = entry.num_computed_tokens
        self._last_token[row] = entry.token_ids[-1]
        self._sampling.enter(
            row,
            SamplingRow(
                params=entry.params,
                token_ids=sequence.token_ids,
                num_prompt_tokens=entry.num_prompt_tokens,
                index=entry.index,
                num_logprobs=entry.num_logprobs,
            ),
        )

    def _extend_table(self, item: ScheduledSequence) -> int:
        """Where in its table the new blocks begin."""
        sequence = self._sequences[item.seq_id]
        first, end = sequence.num_blocks, sequence.num_blocks + len(item.new_block_ids)
        assert end <= self._block_tables.shape[1], f"{end} blocks for sequence {item.seq_id}"
        self._block_tables[sequence.row, first:end] = item.new_block_ids
        sequence.num_blocks = end
        return first

    def _prompt_spans(
        self,
        scheduled: Sequence[ScheduledSequence],
        sequences: Sequence[DeviceSequence],
        starts: Integers,
        seq_lens: Integers,
    ) -> Iterator[PromptSpan]:
        """The prompt tokens that follow those of a step, where somebody asks for them."""
        first_row = 0
        for item, sequence, start, stop in zip(scheduled, sequences, starts, seq_lens, strict=True):
            if sequence.num_prompt_logprobs is not None:
                span = sequence.prompt_span(item.seq_id, int(start), int(stop), first_row)
                if span is not None:
                    yield span
            first_row += item.num_new_tokens


def staging_num_bytes(max_num_tokens: int, max_num_seqs: int, max_blocks: int) -> int:
    """Of a step's arrays at most."""
    per_token = [
        8 * max_num_tokens
    ] * 6  # ids, positions, slots, prompt lengths; awaited ones twice
    per_sequence = [8 * (max_num_seqs + 1)] * 4  # two of them in 32 bits
    tables = 4 * max_num_seqs * max_blocks
    return sum(map(padded_num_bytes, (*per_token, *per_sequence, tables)))


def _awaited(
    input_ids: Integers, rows_of_tokens: Integers, sampled_rows: Integers
) -> dict[str, npt.NDArray[Any]]:
    (places,) = (input_ids == ON_DEVICE).nonzero()
    return {
        "awaited_places": places,
        "awaited_rows": rows_of_tokens[places],
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


def _token_rows(tensors: dict[str, Tensor]) -> TokenRows:
    return TokenRows(
        awaited_places=tensors["awaited_places"],
        awaited_rows=tensors["awaited_rows"],
        sampled_rows=tensors["sampled_rows"],
    )


def _from_zero(ends: Integers) -> npt.NDArray[np.int32]:
    """Running sums with the 0 they begin at."""
    starts = np.zeros(len(ends) + 1, dtype=np.int32)
    starts[1:] = ends
    return starts


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
