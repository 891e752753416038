"""Where every sequence is: waiting, running with its blocks on the device, parked, or gone.

    waiting ──admit──► running ──preempt──► parked (swapped or dropped) ──admit──► running
       └─────────────────── remove: finished, aborted, replaced ──────────────────────┘

The only module that moves one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.engine.blocks import BlockManager
from penstock.engine.request import Retention, Sequence, SequenceStatus
from penstock.engine.scheduling.preemption import PreemptionCosts, choose_victim
from penstock.engine.scheduling.tenant_slots import TenantSlots
from penstock.engine.scheduling.waiting_queue import WaitingQueue, is_returning


@dataclass(slots=True)
class SchedulerCounters:
    """What scheduling counts: totals since start, which only grow."""

    num_steps: int = 0
    num_refused: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_swaps: int = 0  # victims whose KV went to the host tier
    num_recomputes: int = 0  # victims whose KV was dropped
    num_fallbacks: int = 0  # of those, because the host tier was full
    swap_out_s: float = 0.0
    swap_in_s: float = 0.0

    @property
    def num_preemptions(self) -> int:
        return self.num_swaps + self.num_recomputes


class RunningSet:
    """Live sequences, and those that run.

    Args:
        max_num_seqs: running at once.
        clock: seconds.
    """

    def __init__(
        self,
        blocks: BlockManager,
        waiting: WaitingQueue,
        costs: PreemptionCosts,
        counters: SchedulerCounters,
        *,
        max_num_seqs: int,
        clock: Callable[[], float],
    ) -> None:
        self.blocks = blocks
        self.waiting = waiting
        self.running: dict[int, Sequence] = {}  # by seq_id, in order of admission
        self.live: dict[int, Sequence] = {}  # by seq_id: waiting, running and parked
        self.reserved: dict[int, int] = {}  # by seq_id of a running one: slots for its forks
        self._costs = costs
        self._counters = counters
        self._max_num_seqs = max_num_seqs
        self.tenant_slots = TenantSlots(max_num_seqs, clock)
        # Kept free at admission, so that those who run can grow for a while before the newcomer
        # would have to leave again.
        self._watermark_blocks = max(1, blocks.num_blocks // 100)
        self._left: list[int] = []  # ids the device may forget

    def take_left(self) -> tuple[int, ...]:
        """Ids of sequences that left the device since the last call."""
        left, self._left = tuple(self._left), []
        return left

    @property
    def has_left(self) -> bool:
        return bool(self._left)

    @property
    def num_free_slots(self) -> int:
        return self._max_num_seqs - len(self.running) - sum(self.reserved.values())

    def enlist(self, sequence: Sequence) -> None:
        """A new sequence waits for a slot."""
        self._come(sequence)
        self.waiting.push(sequence)

    def may_enter(self, sequence: Sequence, num_forks: int, *, is_first: bool) -> bool:
        """Whether a waiting sequence may have a slot and its forks theirs, were they free. One
        that comes back always may.

        Args:
            is_first: it is nobody else's turn.
        """
        if is_returning(sequence):
            return True
        tenant, num_slots = sequence.request.tenant, 1 + num_forks
        if self.tenant_slots.is_within_share(tenant, num_slots):
            return True
        # Were others to enter instead of whose turn it is, a wide request would never get in.
        return is_first and self.tenant_slots.leaves_enough(tenant, num_slots)

    def admit(self, sequence: Sequence, *, num_forks: int = 0) -> bool:
        """Give a waiting sequence blocks and a slot; False if there are too few.

        Args:
            num_forks: sequences that will soon need a slot beside it.
        """
        if self.num_free_slots <= num_forks:
            return False
        # One block for each that runs lets all of them grow for a while before one must leave.
        num_spared = max(self._watermark_blocks, len(self.running)) if self.running else 0
        num_computed = self.blocks.admit(sequence, num_spared=num_spared)
        if num_computed is None:
            return False
        self.waiting.serve(sequence, num_tokens=len(sequence.token_ids) - num_computed)
        sequence.num_computed_tokens = num_computed
        self._start_running(sequence)
        if num_forks:
            self.reserved[sequence.seq_id] = num_forks
        return True

    def preempt(self, sequence: Sequence, *, is_idle: bool = False) -> None:
        """Park a running sequence: it gives up its blocks and waits again.

        Args:
            is_idle: it has nothing to compute, and so does not wait either.
        """
        self._stop_running(sequence)
        self._park_blocks(sequence)
        sequence.move_to(SequenceStatus.PREEMPTED)
        if not is_idle:
            self.waiting.push(sequence)

    def remove(
        self,
        sequence: Sequence,
        *,
        retention: Retention | None = None,
        is_spoilt: bool = False,
    ) -> None:
        """A sequence has ended; its blocks are free when this returns.

        Args: see `BlockManager.release`.
        """
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence)
        self.waiting.discard(sequence)
        self.waiting.charge(sequence, _num_new_tokens(sequence))
        self.blocks.release(sequence, retention=retention, is_spoilt=is_spoilt)
        sequence.move_to(SequenceStatus.FINISHED)
        del self.live[sequence.seq_id]
        self.tenant_slots.remove_sequence(sequence.request.tenant)

    def fork(self, parent: Sequence, child: Sequence, *, num_tokens: int) -> None:
        """A new sequence goes on after the parent's first `num_tokens` tokens, sharing their
        blocks wherever those are. It has a token to compute, and is placed by `place_fork`."""
        self._come(child)
        if parent.status is SequenceStatus.RUNNING or self.blocks.is_swapped(parent):
            self.blocks.fork(parent, child, num_tokens=num_tokens)
            child.num_computed_tokens = num_tokens

    def place_fork(self, child: Sequence) -> None:
        """Let a forked sequence run if its blocks are on the device and a slot is free."""
        is_on_device = child.num_computed_tokens > 0 and not self.blocks.is_swapped(child)
        if is_on_device and self.num_free_slots > 0:
            self._start_running(child)
            return
        if is_on_device:
            self._drop_blocks(child)
        self.waiting.push(child)

    def choose_victim(self) -> Sequence:
        return choose_victim(self.running.values(), self.waiting.order)

    def _come(self, sequence: Sequence) -> None:
        self.live[sequence.seq_id] = sequence
        self.tenant_slots.add_sequence(sequence.request.tenant, sequence.request.weight)

    def _start_running(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceStatus.RUNNING)
        self.tenant_slots.acquire(sequence.request.tenant)
        self.running[sequence.seq_id] = sequence

    def _stop_running(self, sequence: Sequence) -> None:
        del self.running[sequence.seq_id]
        self.tenant_slots.release(sequence.request.tenant)
        self.reserved.pop(sequence.seq_id, None)
        if sequence.is_on_device:
            self._left.append(sequence.seq_id)
            sequence.is_on_device = False

    def _park_blocks(self, sequence: Sequence) -> None:
        prefers_swap = self._costs.prefers_swap(
            num_tokens=sequence.num_computed_tokens,
            num_blocks=-(-sequence.num_computed_tokens // self.blocks.block_size),
            num_to_save=self.blocks.num_blocks_to_save(sequence),
        )
        if prefers_swap and self.blocks.swap_out(sequence):
            self._counters.num_swaps += 1
            return
        self._counters.num_fallbacks += prefers_swap and sequence.num_computed_tokens > 0
        self._counters.num_recomputes += 1
        self._drop_blocks(sequence)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        sequence.num_computed_tokens = 0


def _num_new_tokens(sequence: Sequence) -> int:
    """Output that its tenant has not been charged for yet."""
    if sequence.params.beam_search is not None:
        return 1  # a beam lasts a step; its past is its parents'
    return sequence.num_output_tokens - len(sequence.request.output_token_ids)
