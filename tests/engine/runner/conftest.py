"""A scheduler of a few lines: sequences, chunks and blocks as the test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from penstock.engine.batch import Batch, BatchResult, BlockMoves, ScheduledSequence, SequenceEntry
from penstock.engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from penstock.engine.request import SamplingParams
from penstock.engine.runner.model_runner import ModelRunner

BLOCK_SIZE = 4


class Driver:
    """Feeds a runner batches by hand and keeps the tokens of every sequence."""

    def __init__(
        self,
        path: Path,
        *,
        num_blocks: int = 80,
        num_host_blocks: int = 40,
        max_model_len: int = 128,
        device: Literal["cpu", "cuda"] = "cpu",
    ) -> None:
        config = EngineConfig(
            model=ModelConfig(max_model_len=max_model_len),
            cache=CacheConfig(
                block_size=BLOCK_SIZE, num_blocks=num_blocks, num_host_blocks=num_host_blocks
            ),
            device=DeviceConfig(device=device, num_threads=1),
        )
        self.runner = ModelRunner(config, path, eos_token_ids=(2,))
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self._prompts: dict[int, int] = {}
        self._params: dict[int, SamplingParams] = {}
        self._computed: dict[int, int] = {}
        self._entering: set[int] = set()
        self._left: list[int] = []
        self._free = list(range(num_blocks))
        self._free_host = list(range(num_host_blocks))
        self._parked: dict[int, list[int]] = {}
        self._unsent: dict[int, list[int]] = {}
        self._swap_outs: list[tuple[int, int]] = []
        self._swap_ins: list[tuple[int, int]] = []
        self._step = 0

    def add(self, seq_id: int, prompt: Sequence[int], **params: Any) -> None:
        self.tokens[seq_id] = list(prompt)
        self._prompts[seq_id] = len(prompt)
        self._params[seq_id] = SamplingParams(**({"temperature": 0.0, "max_tokens": 99} | params))
        self._enter(seq_id)

    def preempt(self, seq_id: int) -> None:
        """Take its blocks; its next step enters it anew with all its tokens."""
        self.leave(seq_id)
        self._enter(seq_id)

    def park(self, seq_id: int) -> None:
        """Give its blocks up at once: the next step saves them in host memory first."""
        table = self.tables[seq_id]
        self._parked[seq_id] = [self._free_host.pop(i % 2 - 1) for i in range(len(table))]
        self._swap_outs += zip(table, self._parked[seq_id], strict=True)
        self.leave(seq_id)

    def resume(self, seq_id: int) -> None:
        """Its next step enters it anew with what `park` saved."""
        parked = self._parked.pop(seq_id)
        self.tables[seq_id] = self._unsent[seq_id] = self._allocate(len(parked))
        self._swap_ins += zip(parked, self.tables[seq_id], strict=True)
        self._entering.add(seq_id)

    def leave(self, seq_id: int) -> None:
        self._free.extend(self.tables.pop(seq_id))
        self._left.append(seq_id)

    def step(
        self,
        shares: Mapping[int, int],
        copies: Sequence[tuple[int, int]] = (),
        drafts: Mapping[int, tuple[int, ...]] | None = None,
    ) -> BatchResult:
        """Compute so many tokens of each sequence, and its drafts; -1 stands for all that are
        known."""
        drafts = drafts or {}
        batch = Batch(
            step=self._step,
            scheduled=tuple(
                self._schedule(seq_id, num_new, drafts.get(seq_id, ()))
                for seq_id, num_new in shares.items()
            ),
            left_seq_ids=tuple(self._left),
            moves=BlockMoves(
                swap_outs=tuple(self._swap_outs),
                swap_ins=tuple(self._swap_ins),
                copies=tuple(copies),
            ),
        )
        self._free_host += [host for host, _ in self._swap_ins]
        for sent in (self._left, self._swap_outs, self._swap_ins):
            sent.clear()
        self._step += 1
        result = self.runner.execute(batch)
        assert result.step == batch.step
        for seq_id, token_ids in result.token_ids.items():
            self.tokens[seq_id].extend(token_ids)
        for seq_id in drafts:
            self._computed[seq_id] = len(self.tokens[seq_id]) - 1
        return result

    def output(self, seq_id: int) -> list[int]:
        return self.tokens[seq_id][self._prompts[seq_id] :]

    def _enter(self, seq_id: int) -> None:
        self.tables[seq_id] = []
        self._computed[seq_id] = 0
        self._entering.add(seq_id)

    def _schedule(
        self, seq_id: int, num_new: int, drafts: tuple[int, ...] = ()
    ) -> ScheduledSequence:
        computed = self._computed[seq_id]
        if num_new < 0:
            num_new = len(self.tokens[seq_id]) - computed
        num_new += len(drafts)
        num_missing = -(-(computed + num_new) // BLOCK_SIZE) - len(self.tables[seq_id])
        new_block_ids = self._allocate(num_missing)
        self.tables[seq_id] = self.tables[seq_id] + new_block_ids
        self._computed[seq_id] = computed + num_new
        entry = None
        if seq_id in self._entering:
            self._entering.remove(seq_id)
            entry = SequenceEntry(
                token_ids=tuple(self.tokens[seq_id]),
                num_prompt_tokens=self._prompts[seq_id],
                num_computed_tokens=computed,
                index=0,
                params=self._params[seq_id],
                num_logprobs=self._params[seq_id].num_logprobs,
                num_prompt_logprobs=self._params[seq_id].prompt_logprobs,
            )
        return ScheduledSequence(
            seq_id=seq_id,
            num_new_tokens=num_new,
            new_block_ids=(*self._unsent.pop(seq_id, ()), *new_block_ids),
            entry=entry,
            draft_token_ids=drafts,
        )

    def _allocate(self, num_blocks: int) -> list[int]:
        """From both ends, so that tables are anything but consecutive."""
        return [self._free.pop(0 if i % 2 else -1) for i in range(num_blocks)]


@pytest.fixture
def driver() -> Callable[..., Driver]:
    return Driver
