"""A device without a model: it keeps tokens in the blocks it is told to, and reads them back.

The next token is a hash of every token before it, as read through the block table. So a block
that is shared wrongly, lost or overwritten changes the tokens, and the test sees it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.batch import Batch, BatchResult

VOCAB_SIZE = 50


def next_token(token_ids: Sequence[int]) -> int:
    digest = hashlib.sha256(repr(list(token_ids)).encode()).digest()
    return digest[0] % VOCAB_SIZE


def expected_output(prompt: Sequence[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


@dataclass
class _Row:
    token_ids: list[int]
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0


@dataclass
class _Handle:
    value: BatchResult

    def result(self) -> BatchResult:
        return self.value


class FakeDevice:
    """Executes batches at once; results may be fetched later (steps in flight)."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[int | None] = [None] * (num_blocks * block_size)
        self.rows: dict[int, _Row] = {}
        self.batches: list[Batch] = []
        self.failing: set[int] = set()  # sequences that get no token

    def submit(self, batch: Batch) -> _Handle:
        self.batches.append(batch)
        for seq_id in batch.left_seq_ids:
            del self.rows[seq_id]
        sampled: dict[int, tuple[int, ...]] = {}
        for item in batch.scheduled:
            if item.entry is not None:
                assert item.seq_id not in self.rows, "entered twice"
                self.rows[item.seq_id] = _Row(
                    list(item.entry.token_ids), num_computed=item.entry.num_computed_tokens
                )
            row = self.rows[item.seq_id]
            row.block_ids.extend(item.new_block_ids)
            self._compute(row, item.num_new_tokens)
            if row.num_computed == len(row.token_ids) and item.seq_id not in self.failing:
                token_id = next_token(self._read(row))
                row.token_ids.append(token_id)
                sampled[item.seq_id] = (token_id,)
        failed = tuple(item.seq_id for item in batch.scheduled if item.seq_id in self.failing)
        return _Handle(BatchResult(step=batch.step, token_ids=sampled, failed_seq_ids=failed))

    def close(self) -> None:
        self.rows.clear()

    def _slot(self, row: _Row, position: int) -> int:
        block_id = row.block_ids[position // self.block_size]
        return block_id * self.block_size + position % self.block_size

    def _compute(self, row: _Row, num_new: int) -> None:
        end = row.num_computed + num_new
        assert num_new > 0
        assert end <= len(row.token_ids), "scheduled past the known tokens"
        for position in range(row.num_computed, end):
            self.slots[self._slot(row, position)] = row.token_ids[position]
        row.num_computed = end

    def _read(self, row: _Row) -> list[int]:
        values = [self.slots[self._slot(row, position)] for position in range(row.num_computed)]
        assert None not in values
        return [value for value in values if value is not None]
