"""A device without a model: it keeps tokens in the blocks it is told to, and reads them back.

The next token is a hash of every token before it and of the branch, as read through the block
table. So a block that is shared wrongly, lost or overwritten changes the tokens; and each read is
compared with the tokens that ought to be there. Every write carries a stamp of its own, so that
what was moved can be told from what was computed again.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.engine.batch import Batch, BatchResult, BlockMoves, SequenceEntry
from penstock.engine.errors import InvalidRequestError
from penstock.engine.lora.slots import NO_ADAPTERS
from penstock.engine.request import FinishReason, StructuredOutputs, TokenLogprobs

VOCAB_SIZE = 50
Slot = tuple[int, int] | None  # token id and stamp


def next_token(token_ids: Sequence[int], index: int = 0) -> int:
    digest = hashlib.sha256(repr((list(token_ids), index)).encode()).digest()
    return digest[0] % VOCAB_SIZE


def candidates(token_ids: Sequence[int], count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest next tokens, best first, of a made-up distribution."""
    digest = hashlib.sha512(repr(list(token_ids)).encode()).digest()
    scored = [(token, -(1 + digest[token] + token / 1000) / 64) for token in range(VOCAB_SIZE)]
    return tuple(sorted(scored, key=lambda item: -item[1])[:count])


def row_of(token_ids: Sequence[int], count: int) -> TokenLogprobs:
    top = candidates(token_ids, count)
    return TokenLogprobs(token_id=top[0][0], logprob=top[0][1], rank=1, top=top)


def expected_output(prompt: Sequence[int], num_tokens: int, index: int = 0) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, index))
    return token_ids[len(prompt) :]


@dataclass
class Row:
    entry: SequenceEntry
    token_ids: list[int]
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0


@dataclass
class _Handle:
    value: BatchResult

    def result(self) -> BatchResult:
        return self.value


class FakeGrammars(set[StructuredOutputs]):
    """Grammars that are compiled once a test says so; those named wrong never are."""

    def __init__(self) -> None:
        super().__init__()
        self.may_compile = threading.Event()
        self.may_compile.set()

    @property
    def num_kept(self) -> int:
        return len(self)

    def compile(self, grammar: StructuredOutputs, *, is_checked: bool = False) -> None:
        assert is_checked, "gateways check grammars"
        assert self.may_compile.wait(60)
        if grammar.text == "wrong":
            raise InvalidRequestError("it is wrong", param="structured_outputs")
        self.add(grammar)

    def drop(self, grammar: StructuredOutputs) -> None:
        self.remove(grammar)

    def size(self, grammar: StructuredOutputs) -> int:
        return len(grammar.text)


class FakeDevice:
    """Executes batches at once; results may be fetched later (steps in flight)."""

    def __init__(self, *, num_blocks: int, block_size: int, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.blocks: list[list[Slot]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: list[list[Slot]] = [[None] * block_size for _ in range(num_host_blocks)]
        self.rows: dict[int, Row] = {}
        self.batches: list[Batch] = []
        self.failing: dict[int, FinishReason] = {}  # sequences that get no token
        self.num_computed = 0  # tokens, over all steps
        self.tokens_per_s = math.inf  # as it says of itself; no clock runs
        self.left_stamps: dict[int, list[int]] = {}  # of those who left, by seq_id
        self.returns: list[tuple[list[int], list[int]]] = []  # stamps at leaving, and back again
        self.grammars = FakeGrammars()
        self.adapters = NO_ADAPTERS
        self.wake: Callable[[], None] = lambda: None
        self.guesses = False  # report forced tokens, of which some are none
        self.num_drafts = self.num_right_drafts = 0
        self._stamp = 0

    def submit(self, batch: Batch) -> _Handle:
        self.batches.append(batch)
        for seq_id in batch.left_seq_ids:
            row = self.rows.pop(seq_id, None)  # may have left before it was ever scheduled
            if row is not None:
                self.left_stamps[seq_id] = [stamp for _, stamp in self._read(row)]
        self._move(batch.moves)
        for item in batch.scheduled:
            if item.entry is not None:
                assert item.seq_id not in self.rows, "entered twice"
                self.rows[item.seq_id] = Row(
                    item.entry,
                    list(item.entry.token_ids),
                    num_computed=item.entry.num_computed_tokens,
                )
            self.rows[item.seq_id].block_ids.extend(item.new_block_ids)
            self.rows[item.seq_id].token_ids.extend(item.draft_token_ids)
        # As in a layer: every row's tokens are stored before any row reads.
        for item in batch.scheduled:
            self._compute(self.rows[item.seq_id], item.num_new_tokens)
        for item in batch.scheduled:
            before = self.left_stamps.pop(item.seq_id, None)
            if item.entry is not None and before is not None:
                stamps = [stamp for _, stamp in self._read(self.rows[item.seq_id])]
                self.returns.append((before, stamps[: item.entry.num_computed_tokens]))
        return _Handle(self._sample(batch))

    def check(self) -> None:
        """It never ends."""

    def close(self) -> None:
        self.rows.clear()

    def _move(self, moves: BlockMoves) -> None:
        for kind, sources, targets in (
            (moves.swap_outs, self.blocks, self.host),
            (moves.swap_ins, self.host, self.blocks),
            (moves.copies, self.blocks, self.blocks),
        ):
            read = [list(sources[source]) for source, _ in kind]
            assert len({target for _, target in kind}) == len(kind), "two sources for one block"
            for (_, target), content in zip(kind, read, strict=True):
                targets[target] = content

    def _sample(self, batch: Batch) -> BatchResult:
        sampled: dict[int, tuple[int, ...]] = {}
        logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
        prompt_logprobs: dict[int, tuple[int, tuple[TokenLogprobs, ...]]] = {}
        for item in batch.scheduled:
            row = self.rows[item.seq_id]
            known = [token for token, _ in self._read(row)]
            if item.draft_token_ids:
                sampled[item.seq_id] = self._check_drafts(row, known, item.draft_token_ids)
                continue
            if row.entry.num_prompt_logprobs is not None:
                first = row.num_computed - item.num_new_tokens + 1
                stop = min(row.num_computed, row.entry.num_prompt_tokens - 1) + 1
                entries = tuple(
                    TokenLogprobs(token_id=row.token_ids[place], logprob=-float(place), rank=1)
                    for place in range(first, stop)
                )
                if entries:
                    prompt_logprobs[item.seq_id] = (first, entries)
            if row.num_computed < len(row.token_ids):
                continue
            if item.seq_id in self.failing:
                row.token_ids.append(0)  # a step already planned may count on one
                continue
            token_id = next_token(known, row.entry.index)
            if row.entry.num_logprobs is not None:
                logprobs[item.seq_id] = (row_of(known, row.entry.num_logprobs),)
            row.token_ids.append(token_id)
            sampled[item.seq_id] = (token_id,)
        return BatchResult(
            step=batch.step,
            token_ids=sampled,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            ended_seq_ids={
                item.seq_id: self.failing[item.seq_id]
                for item in batch.scheduled
                if item.seq_id in self.failing
            },
            forced_token_ids={
                seq_id: self._guess(self.rows[seq_id])
                for seq_id in sampled
                if self.guesses and self.rows[seq_id].entry.is_drafted
            },
            compute_s=batch.num_tokens / self.tokens_per_s,
        )

    def _guess(self, row: Row) -> tuple[int, ...]:
        """The next tokens, and after some of them a wrong one."""
        right = expected_output(row.token_ids, 1 + row.token_ids[-1] % 4, row.entry.index)
        return (*right[:-1], right[-1] ^ 1)

    def _check_drafts(self, row: Row, known: list[int], drafts: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens of a sequence with drafts: those that were right, and one more."""
        first = len(known) - len(drafts)
        new = [next_token(known[:first], row.entry.index)]
        for number, draft in enumerate(drafts, 1):
            if new[-1] != draft:
                break
            new.append(next_token(known[: first + number], row.entry.index))
        self.num_drafts += len(drafts)
        self.num_right_drafts += len(new) - 1
        row.token_ids[first:] = new
        row.num_computed = len(row.token_ids) - 1
        return tuple(new)

    def _compute(self, row: Row, num_new: int) -> None:
        end = row.num_computed + num_new
        assert num_new > 0
        assert end <= len(row.token_ids), "scheduled past the known tokens"
        for position in range(row.num_computed, end):
            self._stamp += 1
            block = self.blocks[row.block_ids[position // self.block_size]]
            block[position % self.block_size] = (row.token_ids[position], self._stamp)
        row.num_computed = end
        self.num_computed += num_new

    def _read(self, row: Row) -> list[tuple[int, int]]:
        slots = [
            self.blocks[row.block_ids[position // self.block_size]][position % self.block_size]
            for position in range(row.num_computed)
        ]
        values = [slot for slot in slots if slot is not None]
        assert [token for token, _ in values] == row.token_ids[: row.num_computed], "wrong KV"
        return values
