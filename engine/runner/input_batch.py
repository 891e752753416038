"""From a `Batch` to the tensors of one forward pass.

A sequence is sent whole once; what later batches leave out is remembered here: its tokens, its
block table and how much of it is computed. A sampled token is appended to this copy at once,
since the next batch may need it before policy has seen it.

                 row a (decode)   row b (a chunk of prompt)      row c (decode)
    input_ids    [a17,            b4, b5, b6, b7,                c30]     flat, no padding
    positions    [17,             4,  5,  6,  7,                 30]
    seq_lens     [18,             8,                             31]

Not known here: models, how tokens are chosen, why a sequence was scheduled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.batch import Batch, ScheduledSequence, SequenceEntry
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.sampling.prompt_logprobs import PromptSpan
from penstock.engine.sampling.rows import SamplingRow
from penstock.engine.sampling.sampling_table import SamplingBatch, SamplingTable
from penstock.kernels.paged_layout import PagedLayout

Integers = npt.NDArray[np.int64]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step, ready to run.

    Attributes:
        input_ids: int64 [num_tokens]
        sampled_seq_ids: sequences whose last known token is computed in this step, in order.
        sampled_tokens: int64 [num_sampled], the place of those tokens among num_tokens; None if
            they are all of them.
        sampling: what those sequences ask for.
        prompt_spans: the prompt tokens whose log-probabilities somebody wants.
    """

    input_ids: Tensor
    context: ForwardContext
    sampled_seq_ids: tuple[int, ...]
    sampled_tokens: Tensor | None
    sampling: SamplingBatch
    prompt_spans: tuple[PromptSpan, ...]


class InputBatch:
    """The sequences on this device.

    Args:
        max_num_seqs: sequences at once.
        max_blocks: blocks of one sequence at most.
    """

    def __init__(
        self, *, max_num_seqs: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self._sequences: dict[int, DeviceSequence] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        # By row: how many tokens are known and computed, and the last one.
        self._num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_computed = np.zeros(max_num_seqs, dtype=np.int64)
        self._last_token = np.zeros(max_num_seqs, dtype=np.int64)
        self._block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._sampling = SamplingTable(max_num_seqs, device)
        self._block_size = block_size
        self._device = device
        self._is_cpu = device.type == "cpu"

    def update(self, batch: Batch) -> None:
        """Forget who left, take in who entered, extend block tables."""
        for seq_id in batch.left_seq_ids:
            # A sequence that left before it was ever scheduled was never here.
            sequence = self._sequences.pop(seq_id, None)
            if sequence is not None:
                self._free_rows.append(sequence.row)
        for item in batch.scheduled:
            if item.entry is not None:
                self._enter(item.seq_id, item.entry)
            if item.new_block_ids:
                self._extend_table(item)

    def prepare(self, batch: Batch, kv_pool: Tensor, *, needs_prompt_lens: bool) -> StepInputs:
        """The tensors of a step; counts its tokens as computed."""
        scheduled = batch.scheduled
        sequences = [self._sequences[item.seq_id] for item in scheduled]
        rows = np.array([sequence.row for sequence in sequences])
        query_lens = np.array([item.num_new_tokens for item in scheduled])
        starts = self._num_computed[rows]
        seq_lens = starts + query_lens
        num_tokens = self._num_tokens[rows]
        assert (seq_lens <= num_tokens).all(), f"{seq_lens} of {num_tokens} tokens"
        self._num_computed[rows] = seq_lens
        ends = query_lens.cumsum()
        (sampled,) = (seq_lens == num_tokens).nonzero()
        is_decode = len(sampled) == ends[-1]
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
        max_seq_len = int(seq_lens.max())
        num_columns = -(-max_seq_len // self._block_size)
        layout = PagedLayout(
            query_start_loc=self._tensor(_from_zero(ends)),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            block_tables=self._tensor(self._block_tables[rows, :num_columns]),
            slot_mapping=self._tensor(slots),
            max_query_len=int(query_lens.max()),
            max_seq_len=max_seq_len,
        )
        prompt_lens = None
        if needs_prompt_lens:
            lens = np.array([sequence.num_prompt for sequence in sequences])
            prompt_lens = self._tensor(lens.repeat(query_lens))
        return StepInputs(
            input_ids=self._tensor(input_ids),
            context=ForwardContext(
                kv_pool=kv_pool,
                layout=layout,
                positions=self._tensor(positions),
                prompt_lens=prompt_lens,
            ),
            sampled_seq_ids=tuple(scheduled[row].seq_id for row in sampled),
            sampled_tokens=None if is_decode else self._tensor(ends[sampled] - 1),
            sampling=self._sampling.select(rows[sampled], seq_lens[sampled]),
            prompt_spans=tuple(self._prompt_spans(scheduled, sequences, starts, seq_lens)),
        )

    def append(self, seq_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """A token for each, as this device sampled it; input of the sequence's next step."""
        sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence.token_ids.append(token_id)
        rows = [sequence.row for sequence in sequences]
        self._last_token[rows] = token_ids
        self._num_tokens[rows] += 1

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

    def _extend_table(self, item: ScheduledSequence) -> None:
        sequence = self._sequences[item.seq_id]
        end = sequence.num_blocks + len(item.new_block_ids)
        assert end <= self._block_tables.shape[1], f"{end} blocks for sequence {item.seq_id}"
        self._block_tables[sequence.row, sequence.num_blocks : end] = item.new_block_ids
        sequence.num_blocks = end

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

    def _tensor(self, array: npt.NDArray[np.int32] | Integers) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._is_cpu else tensor.to(self._device)


def _from_zero(ends: Integers) -> npt.NDArray[np.int32]:
    """Running sums with the 0 they begin at."""
    starts = np.zeros(len(ends) + 1, dtype=np.int32)
    starts[1:] = ends
    return starts
