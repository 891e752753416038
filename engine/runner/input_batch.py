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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.batch import Batch, ScheduledSequence, SequenceEntry
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.sampling.prompt_logprobs import PromptSpan
from penstock.engine.sampling.rows import SamplingRow
from penstock.kernels.paged_layout import PagedLayout


class DeviceSequence:
    """What the device remembers of one sequence. Its block table is a row of `InputBatch`."""

    __slots__ = (
        "index",
        "num_blocks",
        "num_computed",
        "num_logprobs",
        "num_prompt",
        "num_prompt_logprobs",
        "params",
        "row",
        "token_ids",
    )

    def __init__(self, entry: SequenceEntry, row: int) -> None:
        self.row = row
        self.token_ids = list(entry.token_ids)
        self.num_prompt = entry.num_prompt_tokens
        self.num_computed = entry.num_computed_tokens
        self.num_blocks = 0
        self.index = entry.index
        self.params = entry.params
        self.num_logprobs = entry.num_logprobs
        self.num_prompt_logprobs = entry.num_prompt_logprobs

    def sampling_row(self) -> SamplingRow:
        return SamplingRow(
            params=self.params,
            token_ids=self.token_ids,
            num_prompt_tokens=self.num_prompt,
            index=self.index,
            num_logprobs=self.num_logprobs,
        )

    def prompt_span(self, seq_id: int, start: int, first_row: int) -> PromptSpan | None:
        """The prompt tokens that follow those just computed, of which the first is at position
        `start` and in row `first_row` of the step; None if there are none or nobody asks."""
        if self.num_prompt_logprobs is None:
            return None
        token_ids = self.token_ids[start + 1 : min(self.num_computed + 1, self.num_prompt)]
        if not token_ids:
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
        sampled_tokens: int64 [num_sampled], the place of those tokens among num_tokens.
        prompt_spans: the prompt tokens whose log-probabilities somebody wants.
    """

    input_ids: Tensor
    context: ForwardContext
    sampled_seq_ids: tuple[int, ...]
    sampled_tokens: Tensor
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
        self._block_tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._block_size = block_size
        self._device = device

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
            self._extend_table(item)

    def prepare(self, batch: Batch, kv_pool: Tensor, *, needs_prompt_lens: bool) -> StepInputs:
        """The tensors of a step; counts its tokens as computed."""
        sequences = [self._sequences[item.seq_id] for item in batch.scheduled]
        query_lens = np.array([item.num_new_tokens for item in batch.scheduled], dtype=np.int64)
        ends = np.cumsum(query_lens)
        input_ids: list[int] = []
        sampled: list[int] = []
        spans: list[PromptSpan | None] = []
        for row, (item, sequence) in enumerate(zip(batch.scheduled, sequences, strict=True)):
            start, stop = sequence.num_computed, sequence.num_computed + item.num_new_tokens
            assert start < stop <= len(sequence.token_ids), f"row {row}: no tokens {start}…{stop}"
            sequence.num_computed = stop
            spans.append(sequence.prompt_span(item.seq_id, start, len(input_ids)))
            input_ids.extend(sequence.token_ids[start:stop])
            if stop == len(sequence.token_ids):
                sampled.append(row)
        seq_lens = np.array([sequence.num_computed for sequence in sequences], dtype=np.int64)
        positions = np.arange(ends[-1]) + np.repeat(seq_lens - ends, query_lens)
        prompt_lens = np.repeat([sequence.num_prompt for sequence in sequences], query_lens)
        return StepInputs(
            input_ids=self._tensor(np.array(input_ids, dtype=np.int64)),
            context=ForwardContext(
                kv_pool=kv_pool,
                layout=self._layout(sequences, query_lens, seq_lens, positions),
                positions=self._tensor(positions),
                prompt_lens=self._tensor(prompt_lens) if needs_prompt_lens else None,
            ),
            sampled_seq_ids=tuple(batch.scheduled[row].seq_id for row in sampled),
            sampled_tokens=self._tensor(ends[sampled] - 1),
            prompt_spans=tuple(span for span in spans if span is not None),
        )

    def sampling_rows(self, seq_ids: Sequence[int]) -> list[SamplingRow]:
        return [self._sequences[seq_id].sampling_row() for seq_id in seq_ids]

    def append(self, seq_id: int, token_id: int) -> None:
        """A token this device sampled; input of the sequence's next step."""
        self._sequences[seq_id].token_ids.append(token_id)

    def _enter(self, seq_id: int, entry: SequenceEntry) -> None:
        known = self._sequences.pop(seq_id, None)
        row = self._free_rows.pop() if known is None else known.row
        self._sequences[seq_id] = DeviceSequence(entry, row)

    def _extend_table(self, item: ScheduledSequence) -> None:
        sequence = self._sequences[item.seq_id]
        end = sequence.num_blocks + len(item.new_block_ids)
        assert end <= self._block_tables.shape[1], f"{end} blocks for sequence {item.seq_id}"
        self._block_tables[sequence.row, sequence.num_blocks : end] = item.new_block_ids
        sequence.num_blocks = end

    def _layout(
        self,
        sequences: Sequence[DeviceSequence],
        query_lens: npt.NDArray[np.int64],
        seq_lens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> PagedLayout:
        rows = np.array([sequence.row for sequence in sequences])
        max_seq_len = int(seq_lens.max())
        num_columns = -(-max_seq_len // self._block_size)
        block_of_token, offsets = np.divmod(positions, self._block_size)
        blocks = self._block_tables[np.repeat(rows, query_lens), block_of_token].astype(np.int64)
        starts = np.concatenate(([0], np.cumsum(query_lens)))
        return PagedLayout(
            query_start_loc=self._tensor(starts.astype(np.int32)),
            seq_lens=self._tensor(seq_lens.astype(np.int32)),
            block_tables=self._tensor(self._block_tables[rows, :num_columns]),
            slot_mapping=self._tensor(blocks * self._block_size + offsets),
            max_query_len=int(query_lens.max()),
            max_seq_len=max_seq_len,
        )

    def _tensor(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
