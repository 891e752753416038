"""When blocks run out, or a flood makes way for another tenant: which sequence is preempted, and
whether its KV is swapped out or dropped.

A victim keeps its tokens, so its stream only pauses. Swapped KV comes back from the host tier with
the same bytes; dropped KV is computed again. `auto` picks the cheaper one by measured rates: blocks
to move ÷ the link's rate, against tokens to compute ÷ the prefill rate.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.config import PreemptionMode
from penstock.engine.request import Sequence
from penstock.engine.scheduling.waiting_queue import ServiceOrder

_WEIGHT = 0.2  # of a new measurement in the running mean
_PREFILL_FACTOR = 4  # tokens per sequence from which on a step counts as prefill


def choose_victim(running: Iterable[Sequence], order: ServiceOrder) -> Sequence:
    """The sequence that would be served last: lowest priority, then latest arrival, then latest
    submission."""
    return max(running, key=order.rank)


class PreemptionCosts:
    """Estimates what parking a victim costs, swapped or recomputed.

    Args:
        block_move_s: seconds to move a block between the tiers, as measured at start.

    Attributes:
        prefill_tokens_per_s: measured rate; 0 before the first prompt.
        block_move_s: as measured last.
    """

    def __init__(self, mode: PreemptionMode, *, block_move_s: float = 0.0) -> None:
        self._mode = mode
        self.block_move_s = block_move_s
        self._token_s: float | None = None  # of prefill; unknown before the first
        self.prefill_tokens_per_s = 0.0

    def prefers_swap(self, *, num_tokens: int, num_blocks: int, num_to_save: int) -> bool:
        """Whether a victim should be swapped out.

        Args:
            num_tokens: computed so far; they are computed again if dropped.
            num_blocks: blocks to bring back if swapped.
            num_to_save: how many of them the host tier does not have yet.
        """
        if self._mode != "auto":
            return self._mode == "swap"
        if self._token_s is None:
            return True
        return (num_blocks + num_to_save) * self.block_move_s <= num_tokens * self._token_s

    def observe(self, batch: Batch, result: BatchResult) -> None:
        """Update the rates from a step's measurements."""
        seconds = result.swap_out_s + result.swap_in_s
        if seconds > 0 and (num_moves := len(batch.moves.swap_outs) + len(batch.moves.swap_ins)):
            self.block_move_s = _mean(self.block_move_s or None, seconds / num_moves)
        if result.compute_s > 0 and batch.scheduled:
            num_tokens = batch.num_tokens
            is_prefill = num_tokens >= _PREFILL_FACTOR * len(batch.scheduled)
            if is_prefill and not any(item.num_drafts for item in batch.scheduled):
                self._token_s = _mean(self._token_s, result.compute_s / num_tokens)
                self.prefill_tokens_per_s = 1.0 / self._token_s


def _mean(known: float | None, new: float) -> float:
    return new if known is None else known + _WEIGHT * (new - known)
