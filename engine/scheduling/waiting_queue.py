"""The order of service: the queue of sequences that wait for a slot.

    1. band     under the policy `priority`, the request's priority, lower first; for every
                `aging_s` of waiting it moves up by one, at most to the most urgent priority seen:
                nothing starves, and a backlog does not overtake others by its age alone
    2. return   sequences that have run before and were preempted, by arrival: their streams pause
    3. tenant   by deficit round robin over tokens (`FairTurns`)
    4. arrival  within a tenant; turns of sessions may yield to later ones (`sessions`)

Under `fcfs` there is one band; with a single tenant that is the order of arrival. `QueueStats`
measures how fast the queue drains, and reports positions to requests that ask.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from penstock.engine.config import SchedulingPolicy
from penstock.engine.request import Request, RequestOutput, Sequence, SequenceStatus

Rank = tuple[int, float, int]
Entry = tuple[Rank, int, Sequence]  # the int: tokens it has to compute


class ServiceOrder:
    """Ranks sequences, regardless of tenant; lower comes first.

    Args:
        clock: seconds, the clock of requests' `arrival_s`.
    """

    def __init__(
        self, policy: SchedulingPolicy, *, aging_s: float, clock: Callable[[], float]
    ) -> None:
        self._is_fcfs = policy == "fcfs"
        self._aging_s = aging_s
        self._clock = clock
        self._top_band = math.inf  # the most urgent priority seen

    def note(self, sequence: Sequence) -> bool:
        """Record a sequence's priority; whether it may change other sequences' ranks."""
        priority = sequence.request.priority
        if self._is_fcfs or priority >= self._top_band:
            return False
        self._top_band = priority
        return True

    def rank(self, sequence: Sequence) -> Rank:
        """Band, arrival, order of submission."""
        request = sequence.request
        return self.band(sequence), request.arrival_s + sequence.patience_s, sequence.seq_id

    def band(self, sequence: Sequence) -> int:
        if self._is_fcfs:
            return 0
        priority = sequence.request.priority
        top = int(min(self._top_band, priority))
        return max(priority - self._num_aged(sequence), top)

    def next_change_s(self, sequence: Sequence) -> float:
        """When aging next improves the sequence's rank."""
        if self._is_fcfs:
            return math.inf
        return sequence.request.arrival_s + (self._num_aged(sequence) + 1) * self._aging_s

    def now_s(self) -> float:
        return self._clock()

    def _num_aged(self, sequence: Sequence) -> int:
        return max(0, int((self._clock() - sequence.request.arrival_s) // self._aging_s))


class WaitingQueue:
    """Waiting sequences by band, tenant and arrival: heaps of heaps, with entries renewed as
    sequences age. Operations take O(log n); removal is lazy: an outdated entry is skipped when it
    reaches the top.

    Attributes:
        num_tokens: tokens that the waiting sequences have to compute.
        num_tokens_of: the same by tenant.
        num_served_tokens: the same of all sequences served so far.
    """

    def __init__(self, order: ServiceOrder) -> None:
        self.order = order
        self.num_tokens = 0
        self.num_tokens_of = Counter[str]()
        self.num_served_tokens = 0
        self._bands: dict[int, _Band] = {}
        self._order_of_bands: list[int] = []  # a heap
        self._waiting: dict[int, Entry] = {}  # by seq_id: the one that is valid
        self._aging: list[tuple[float, int, Sequence]] = []  # when a rank changes

    def push(self, sequence: Sequence) -> None:
        if self.order.note(sequence):
            for *_, other in list(self._waiting.values()):
                self._place(other)
        self._place(sequence)
        change_s = self.order.next_change_s(sequence)
        if change_s < math.inf:
            heapq.heappush(self._aging, (change_s, sequence.seq_id, sequence))

    def peek(self, passed: Collection[str] = ()) -> Sequence | None:
        """The next sequence, or None.

        Args:
            passed: tenants to pass over.
        """
        if passed:
            heads = (self._bands[band].peek_past(passed) for band in sorted(self._bands))
            return next((head for head in heads if head is not None), None)
        self._age()
        while self._order_of_bands:
            head = self._bands[self._order_of_bands[0]].peek()
            if head is not None:
                return head
            del self._bands[heapq.heappop(self._order_of_bands)]
        return None

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence if it waits."""
        entry = self._waiting.pop(sequence.seq_id, None)
        if entry is not None:
            tenant = sequence.request.tenant
            self.num_tokens -= entry[1]
            self.num_tokens_of[tenant] -= entry[1]
            if not self.num_tokens_of[tenant]:
                del self.num_tokens_of[tenant]

    def serve(self, sequence: Sequence, *, num_tokens: int) -> None:
        """Remove a head because it is served.

        Args:
            num_tokens: tokens to compute for it now, without its output.
        """
        entry = self._waiting[sequence.seq_id]
        self.num_served_tokens += entry[1]
        if not is_returning(sequence):
            self._bands[entry[0][0]].serve(sequence, num_tokens)
        self.discard(sequence)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """Charge a tenant for output; does nothing for a band in which nothing waits."""
        band = self._bands.get(self.order.band(sequence))
        if band is not None:
            band.turns.charge(sequence.request.tenant, sequence.request.weight, num_tokens)

    def in_order(self) -> Iterator[Sequence]:
        """All waiting sequences in the order of service, if nothing changed: O(n log n) in all."""
        self._age()
        for band in sorted(self._bands):
            yield from self._bands[band].in_order()

    def __len__(self) -> int:
        return len(self._waiting)

    def _place(self, sequence: Sequence) -> None:
        rank = self.order.rank(sequence)
        self.discard(sequence)
        num_tokens = len(sequence.token_ids) - sequence.num_computed_tokens
        self.num_tokens += num_tokens
        self.num_tokens_of[sequence.request.tenant] += num_tokens
        entry = self._waiting[sequence.seq_id] = (rank, num_tokens, sequence)
        band = self._bands.get(rank[0])
        if band is None:
            band = self._bands[rank[0]] = _Band(self._is_valid)
            heapq.heappush(self._order_of_bands, rank[0])
        band.push(entry)

    def _is_valid(self, entry: Entry) -> bool:
        return self._waiting.get(entry[2].seq_id) is entry

    def _age(self) -> None:
        now_s = self.order.now_s()
        due = []
        while self._aging and self._aging[0][0] <= now_s:
            due.append(heapq.heappop(self._aging)[2])
        for sequence in due:  # after the loop: rounding may make its next change due at once
            if sequence.seq_id in self._waiting:
                self.push(sequence)


_Line = list[Entry]  # a heap; ranks of different sequences differ: seq_id is in them


class _Band:
    """The waiting sequences of one band.

    Args:
        is_valid: whether an entry is its sequence's current one.
    """

    def __init__(self, is_valid: Callable[[Entry], bool]) -> None:
        self.turns = FairTurns()
        self._is_valid = is_valid
        self._returning: _Line = []
        self._lines: dict[str, _Line] = {}  # by tenant
        # A tenant's entry may hold an old turn: turns only grow, so it reaches the top too early,
        # never too late.
        self._tenants: list[tuple[Turn, str]] = []

    def push(self, entry: Entry) -> None:
        if is_returning(entry[2]):
            heapq.heappush(self._returning, entry)
            return
        request = entry[2].request
        line = self._lines.get(request.tenant)
        if line is None:
            line = self._lines[request.tenant] = []
            turn = self.turns.join(request.tenant, request.weight)
            heapq.heappush(self._tenants, (turn, request.tenant))
        heapq.heappush(line, entry)

    def peek(self) -> Sequence | None:
        head = self._head(self._returning)
        while head is None and self._tenants:
            turn, tenant = self._tenants[0]
            head = self._head(self._lines[tenant])
            if head is None:
                heapq.heappop(self._tenants)
                del self._lines[tenant]
            elif turn != (now := self.turns.turn(tenant)):
                heapq.heapreplace(self._tenants, (now, tenant))
                head = None
        return head

    def peek_past(self, passed: Collection[str]) -> Sequence | None:
        """The first sequence in the order of service, those of some tenants left out."""
        head = self._head(self._returning)
        if head is not None and head.request.tenant in passed:
            others = [each for each in self._returning if each[2].request.tenant not in passed]
            head = self._head(sorted(others))  # a heap too
        if head is not None:
            return head
        heads = {
            self.turns.turn(tenant): head
            for tenant, line in self._lines.items()
            if tenant not in passed and (head := self._head(line)) is not None
        }
        return heads[min(heads)] if heads else None

    def serve(self, sequence: Sequence, num_tokens: int) -> None:
        """Serve a head that is not a returning sequence."""
        request = sequence.request
        if request.tenant == self._tenants[0][1]:  # else others were passed over for it
            self.turns.serve(request.tenant)
        self.turns.charge(request.tenant, request.weight, num_tokens)

    def in_order(self) -> Iterator[Sequence]:
        for *_, sequence in sorted(filter(self._is_valid, self._returning)):
            yield sequence
        turns = self.turns.copy()
        lines = {
            tenant: sorted(filter(self._is_valid, line), reverse=True)
            for tenant, line in self._lines.items()
        }
        tenants = [(turns.turn(tenant), tenant) for tenant, line in lines.items() if line]
        heapq.heapify(tenants)
        while tenants:
            tenant = tenants[0][1]
            _, num_tokens, sequence = lines[tenant].pop()
            yield sequence
            turns.serve(tenant)
            turns.charge(tenant, sequence.request.weight, num_tokens)
            if lines[tenant]:
                heapq.heapreplace(tenants, (turns.turn(tenant), tenant))
            else:
                heapq.heappop(tenants)

    def _head(self, line: _Line) -> Sequence | None:
        while line and not self._is_valid(line[0]):
            heapq.heappop(line)
        return line[0][2] if line else None


def is_returning(sequence: Sequence) -> bool:
    """Whether it, or the sequence from which it was forked, has run before."""
    return (
        sequence.status is SequenceStatus.PREEMPTED
        or sequence.index > 0
        or sequence.num_output_tokens > len(sequence.request.output_token_ids)
    )


QUANTUM_TOKENS = 16.0  # small, since empty rounds cost nothing
_MAX_IDLE = 64  # accounts kept before old ones are closed
Turn = tuple[int, int]  # round, and position in it; a tenant's turn only grows


@dataclass(slots=True)
class _Account:
    turn: Turn
    credit: float  # tokens, more than 0


class FairTurns:
    """Deficit round robin over tenants, by tokens, with weights.

    In every round a tenant is served until its credit of `weight × quantum` tokens is used up. What
    it uses beyond that (a request is served whole, and its output is charged when it ends) is a
    debt: it is next served in the first round in which its credit is positive again. Instead of
    stepping through empty rounds, each tenant has the number of its round, and the lowest is
    served. A tenant that was idle joins the current round: idleness earns no credit, and cancels
    no debt.

    Operations take constant time (closing accounts: amortised).

    Source: Shreedhar and Varghese, Efficient Fair Queuing Using Deficit Round Robin, SIGCOMM 1995;
    the debt is surplus round robin's.

    Args:
        quantum_tokens: credit per round of a tenant of weight 1.
    """

    def __init__(self, quantum_tokens: float = QUANTUM_TOKENS) -> None:
        self._quantum = quantum_tokens
        self._accounts: dict[str, _Account] = {}
        self._round = 0  # of the tenant served last; no waiting tenant is in an earlier one
        self._num_turns = 0
        self._max_accounts = _MAX_IDLE

    def join(self, tenant: str, weight: float) -> Turn:
        """A tenant starts to wait; its turn. Lower turns come first."""
        return self._account(tenant, weight).turn

    def turn(self, tenant: str) -> Turn:
        """The turn of a tenant that has joined and still waits."""
        return self._accounts[tenant].turn

    def serve(self, tenant: str) -> None:
        """Serve a waiting tenant: its round becomes the current one."""
        self._round = max(self._round, self._accounts[tenant].turn[0])

    def charge(self, tenant: str, weight: float, num_tokens: float) -> None:
        """Charge a tenant for tokens, whether it waits or not."""
        account = self._account(tenant, weight)
        account.credit -= num_tokens
        if account.credit <= 0.0:
            each = self._quantum * weight
            num_rounds = math.floor(-account.credit / each) + 1
            account.credit += num_rounds * each
            account.turn = self._next_turn(account.turn[0] + num_rounds)

    def copy(self) -> FairTurns:
        """A copy, for simulating future turns."""
        return copy.deepcopy(self)

    def _account(self, tenant: str, weight: float) -> _Account:
        """The tenant's account, moved to the current round if its own is over."""
        account = self._accounts.get(tenant)
        if account is None or account.turn[0] < self._round:
            self._close_old()
            account = _Account(self._next_turn(self._round), self._quantum * weight)
            self._accounts[tenant] = account
        return account

    def _close_old(self) -> None:
        # An account whose round is over is equivalent to a new one.
        if len(self._accounts) >= self._max_accounts:
            self._accounts = {
                tenant: account
                for tenant, account in self._accounts.items()
                if account.turn[0] >= self._round
            }
            self._max_accounts = 2 * len(self._accounts) + _MAX_IDLE

    def _next_turn(self, number: int) -> Turn:
        self._num_turns += 1
        return number, self._num_turns


POSITIONS_INTERVAL_S = 0.25
_MAX_SHARE = 0.02  # of the time, for computing positions in a long queue
_MEMORY_S = 10.0  # after which a measurement weighs 1/e


class QueueStats:
    """Measures how fast the queue drains, and reports positions; updated after every step.

    Args:
        clock: seconds.
    """

    def __init__(self, queue: WaitingQueue, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._clock = clock
        self._told: dict[str, int] = {}  # for requests that asked: the last position sent, or -1
        self._positions_due_s = -math.inf
        self._last_s = clock()
        self._had_waiting = False
        self._num_served = 0
        self._busy_s = self._busy_tokens = 0.0  # while the queue was not empty; both decay alike

    @property
    def tokens_per_s(self) -> float:
        """Rate of prompt tokens leaving a non-empty queue; 0 if not measured yet."""
        return self._busy_tokens / self._busy_s if self._busy_s > 0 else 0.0

    def add(self, request: Request) -> None:
        """Add a new request to the statistics."""
        if not self._had_waiting:
            self._last_s, self._num_served = self._clock(), self._queue.num_served_tokens
        self._had_waiting = True
        if request.wants_queue_position:
            self._told[request.request_id] = -1

    def update(self) -> list[RequestOutput]:
        """Changed positions, for requests that asked; at most every `POSITIONS_INTERVAL_S`."""
        if not (self._had_waiting or self._told or len(self._queue)):
            return []
        now_s, num_served = self._clock(), self._queue.num_served_tokens
        if self._had_waiting:
            self._measure(now_s - self._last_s, num_served - self._num_served)
        self._last_s, self._num_served = now_s, num_served
        self._had_waiting = len(self._queue) > 0
        if not self._told or now_s < self._positions_due_s:
            return []
        outputs = self._positions()
        cost_s = self._clock() - now_s
        self._positions_due_s = now_s + max(POSITIONS_INTERVAL_S, cost_s / _MAX_SHARE)
        return outputs

    def _measure(self, elapsed_s: float, num_served: int) -> None:
        if elapsed_s > 0:
            kept = math.exp(-elapsed_s / _MEMORY_S)
            self._busy_s = self._busy_s * kept + elapsed_s
            self._busy_tokens = self._busy_tokens * kept + num_served

    def _positions(self) -> list[RequestOutput]:
        told, self._told = self._told, {}
        outputs, num_tokens = [], 0
        for position, sequence in enumerate(self._queue.in_order()):
            request_id = sequence.request.request_id
            if request_id in told and not is_returning(sequence):
                self._told[request_id] = position
                if told[request_id] != position:
                    outputs.append(
                        RequestOutput(
                            request_id=request_id,
                            queue_position=position,
                            num_tokens_ahead=num_tokens,
                        )
                    )
            num_tokens += len(sequence.token_ids) - sequence.num_computed_tokens
        return outputs
