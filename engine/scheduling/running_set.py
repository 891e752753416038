"""The state of every sequence: waiting, running with its blocks on the device, parked, or removed.

    waiting ──admit──► running ──preempt──► parked (swapped or dropped) ──admit──► running
       └─────────────────── remove: finished, aborted, replaced ──────────────────────┘

No other module changes a sequence's state.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from penstock.engine.blocks import BlockManager
from penstock.engine.request import Retention, Sequence, SequenceStatus
from penstock.engine.scheduling.preemption import PreemptionCosts, choose_victim
from penstock.engine.scheduling.sessions import Sessions
from penstock.engine.scheduling.tenant_slots import TenantSlots
from penstock.engine.scheduling.waiting_queue import WaitingQueue, is_returning


@dataclass(slots=True)
class SchedulerCounters:
    """The scheduler's totals since start."""

    num_steps: int = 0
    num_refused: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_swaps: int = 0  # victims whose KV went to the host tier
    num_recomputes: int = 0  # victims whose KV was dropped
    num_fallbacks: int = 0  # of those, because the host tier was full
    swap_out_s: float = 0.0
    swap_in_s: float = 0.0
    masks_s: float = 0.0
    num_masks: int = 0
    spent_compute_us: int = 0  # that outputs have told
    spent_block_us: int = 0

    @property
    def num_preemptions(self) -> int:
        return self.num_swaps + self.num_recomputes


class RunningSet:
    """All live sequences, with those that run.

    Args:
        max_num_seqs: maximum number of running sequences.
        clock: seconds.
    """

    def __init__(
        self,
        blocks: BlockManager,
        waiting: WaitingQueue,
        costs: PreemptionCosts,
        counters: SchedulerCounters,
        sessions: Sessions,
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
        self._sessions = sessions
        self._max_num_seqs = max_num_seqs
        self.tenant_slots = TenantSlots(max_num_seqs, clock)
        # Kept free at admission, so that running sequences can grow for a while before one must be
        # preempted again.
        self._watermark_blocks = max(1, blocks.num_blocks // 100)
        self._left: list[int] = []  # ids for the device to forget
        self._displaced: set[int] = set()  # parked ones that `displace` chose

    def take_left(self) -> tuple[int, ...]:
        """Return, and clear, the ids of sequences that left the device."""
        left, self._left = tuple(self._left), []
        return left

    @property
    def has_left(self) -> bool:
        return bool(self._left)

    @property
    def num_free_slots(self) -> int:
        return self._max_num_seqs - len(self.running) - sum(self.reserved.values())

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence into the waiting queue."""
        self._add_live(sequence)
        if sequence.request.session:
            self._sessions.add(sequence)
        self.waiting.push(sequence)

    def may_enter(self, sequence: Sequence, num_forks: int, *, is_first: bool) -> bool:
        """Whether tenants' shares allow a waiting sequence a slot, and slots for its forks. A
        preempted sequence may always return, unless it was displaced.

        Args:
            is_first: no tenant before it was passed over.
        """
        if is_returning(sequence) and sequence.seq_id not in self._displaced:
            return True
        tenant, num_slots = sequence.request.tenant, 1 + num_forks
        if self.tenant_slots.is_within_share(tenant, num_slots):
            return True
        # Only if no tenant was passed over: otherwise narrow requests that overtake a wide one
        # would keep it out for ever.
        return is_first and self.tenant_slots.leaves_enough(tenant, num_slots)

    def admit(self, sequence: Sequence, *, num_forks: int = 0) -> bool:
        """Give a waiting sequence blocks and a slot; False if there are too few.

        Args:
            num_forks: sequences that will soon fork from it; slots are reserved for them.
        """
        if self.num_free_slots <= num_forks:
            return False
        # One block per running sequence lets all of them grow before one must be preempted.
        num_spared = max(self._watermark_blocks, len(self.running)) if self.running else 0
        gives_way = bool(self.running) and self._sessions.gives_way(sequence)
        admit = self._sessions.admit if gives_way else self.blocks.admit
        num_computed = admit(sequence, num_spared=num_spared)
        if num_computed is None:
            return False
        self.waiting.serve(sequence, num_tokens=len(sequence.token_ids) - num_computed)
        sequence.num_computed_tokens = num_computed
        self._start_running(sequence)
        if num_forks:
            self.reserved[sequence.seq_id] = num_forks
        return True

    def displace(self, heavy: Set[str]) -> Sequence | None:
        """The sequence to preempt next, since a light tenant's request waits and those that came
        before it have not left the slots free that they leave to others; None if there is no need.
        It returns when its tenant leaves enough, so it takes none of those slots.

        Args:
            heavy: the tenants with far more slots than another.
        """
        head = self.waiting.peek(heavy)
        if head is None or head.request.tenant in heavy or is_returning(head):
            return None
        slots = self.tenant_slots
        beyond = {each for each in heavy if not slots.is_within_share(each, 0)}
        if all(slots.leaves_enough(each, 0) for each in beyond):
            return None
        order = self.waiting.order
        victims = [
            each
            for each in self.running.values()
            if each.request.tenant in beyond
            and each.params.num_branches == 1
            and each.params.beam_search is None  # no other one waits for it
        ]
        victim = choose_victim(victims, order) if victims else None
        if victim is None or order.band(victim) < order.band(head):
            return None
        self._displaced.add(victim.seq_id)
        return victim

    def preempt(self, sequence: Sequence, *, is_idle: bool = False) -> None:
        """Park a running sequence: it gives up its blocks and goes back to the queue.

        Args:
            is_idle: it has nothing to compute, so it does not enter the queue.
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
        has_invalid_kv: bool = False,
    ) -> None:
        """Remove a sequence that has ended; its blocks are free when this returns.

        Args: as in `BlockManager.release`.
        """
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_running(sequence)
        self._displaced.discard(sequence.seq_id)
        self.waiting.discard(sequence)
        self.waiting.charge(sequence, _num_new_tokens(sequence))
        contents = self.blocks.release(sequence, retention=retention, has_invalid_kv=has_invalid_kv)
        if sequence.request.session:
            self._sessions.end(sequence.request, contents)
        self._sessions.leave(sequence.request)
        sequence.move_to(SequenceStatus.FINISHED)
        del self.live[sequence.seq_id]
        self.tenant_slots.remove_sequence(sequence.request.tenant)

    def fork(self, parent: Sequence, child: Sequence, *, num_tokens: int) -> None:
        """Add a new sequence that continues after the parent's first `num_tokens` tokens and
        shares their blocks, in whichever tier. `place_fork` must follow."""
        self._add_live(child)
        if parent.status is SequenceStatus.RUNNING or self.blocks.is_swapped(parent):
            self.blocks.fork(parent, child, num_tokens=num_tokens)
            child.num_computed_tokens = num_tokens

    def place_fork(self, child: Sequence) -> None:
        """Run a forked sequence if its blocks are on the device and a slot is free; else queue
        it."""
        is_on_device = child.num_computed_tokens > 0 and not self.blocks.is_swapped(child)
        if is_on_device and self.num_free_slots > 0:
            self._start_running(child)
            return
        if is_on_device:
            self._drop_blocks(child)
        self.waiting.push(child)

    def choose_victim(self) -> Sequence:
        return choose_victim(self.running.values(), self.waiting.order)

    def _add_live(self, sequence: Sequence) -> None:
        self.live[sequence.seq_id] = sequence
        self._sessions.enter(sequence.request)
        self.tenant_slots.add_sequence(sequence.request.tenant, sequence.request.weight)

    def _start_running(self, sequence: Sequence) -> None:
        sequence.move_to(SequenceStatus.RUNNING)
        self._displaced.discard(sequence.seq_id)
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
        # What the device has pooled of it does not move with its blocks.
        prefers_swap = not sequence.needs_every_token and self._costs.prefers_swap(
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
    """Output tokens for which the tenant has not been charged yet."""
    if sequence.params.beam_search is not None:
        return 1  # a beam lasts one step; its parents were charged for the tokens before
    return sequence.num_output_tokens - len(sequence.request.output_token_ids)
