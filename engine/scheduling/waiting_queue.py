"""The order of service: who waits for a slot, and who comes before whom.

    1. band     under the policy `priority` a request's priority, lower first; for every `aging_s`
                it has been here it moves up by one, as far as the most urgent priority ever seen:
                nothing starves, and a backlog does not overtake others by its age alone
    2. return   what has run before and was parked, by arrival: its stream is pausing
    3. tenant   by deficit round robin over tokens (`FairTurns`)
    4. arrival  within a tenant

Under `fcfs` there is one band; with one tenant that is plainly the order of arrival. `QueueStats`
says how fast the queue drains, and tells those who asked where they stand.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from penstock.engine.config import SchedulingPolicy
from penstock.engine.request import Request, RequestOutput, Sequence, SequenceStatus

Rank = tuple[int, float, int]
Entry = tuple[Rank, int, Sequence]  # with the tokens it is to compute


class ServiceOrder:
    """Ranks sequences, whoever's they are; lower comes first.

    Args:
        clock: seconds, by the same clock as requests' `arrival_s`.
    """

    def __init__(
        self, policy: SchedulingPolicy, *, aging_s: float, clock: Callable[[], float]
    ) -> None:
        self._is_fcfs = policy == "fcfs"
        self._aging_s = aging_s
        self._clock = clock
        self._top_band = math.inf  # the most urgent priority seen

    def note(self, sequence: Sequence) -> bool:
        """Take note of a sequence's priority; whether others' ranks may change by it."""
        priority = sequence.request.priority
        if self._is_fcfs or priority >= self._top_band:
            return False
        self._top_band = priority
        return True

    def rank(self, sequence: Sequence) -> Rank:
        """Band, arrival, order of submission."""
        request = sequence.request
        return self.band(sequence), request.arrival_s, sequence.seq_id

    def band(self, sequence: Sequence) -> int:
        if self._is_fcfs:
            return 0
        priority = sequence.request.priority
        top = int(min(self._top_band, priority))
        return max(priority - self._num_aged(sequence), top)

    def next_change_s(self, sequence: Sequence) -> float:
        """When the sequence's rank may next improve by itself."""
        if self._is_fcfs:
            return math.inf
        return sequence.request.arrival_s + (self._num_aged(sequence) + 1) * self._aging_s

    def now_s(self) -> float:
        return self._clock()

    def _num_aged(self, sequence: Sequence) -> int:
        return max(0, int((self._clock() - sequence.request.arrival_s) // self._aging_s))


class WaitingQueue:
    """Waiting sequences by band, tenant and arrival: heaps of heaps, with entries renewed as
    sequences age. Operations take O(log n); removal marks, and an entry that is out of date is
    skipped when it surfaces.

    Attributes:
        num_tokens: of all that wait, as far as they are to be computed.
        num_served_tokens: those of all that were served.
    """

    def __init__(self, order: ServiceOrder) -> None:
        self.order = order
        self.num_tokens = 0
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
        """Who is next, or None.

        Args:
            passed: tenants whose turn it may be, but whose next cannot be served now.
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
        """Take out a sequence, wherever it stands, if it waits."""
        entry = self._waiting.pop(sequence.seq_id, None)
        if entry is not None:
            self.num_tokens -= entry[1]

    def serve(self, sequence: Sequence, *, num_tokens: int) -> None:
        """Take out a head because it is served.

        Args:
            num_tokens: to be computed for it now, not counting its output.
        """
        entry = self._waiting[sequence.seq_id]
        self.num_served_tokens += entry[1]
        if not is_returning(sequence):
            self._bands[entry[0][0]].serve(sequence, num_tokens)
        self.discard(sequence)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence that was served has had output; while nobody waits, nobody owes anything."""
        band = self._bands.get(self.order.band(sequence))
        if band is not None:
            band.turns.charge(sequence.request.tenant, sequence.request.weight, num_tokens)

    def in_order(self) -> Iterator[Sequence]:
        """All that wait as they would be served if nothing changed: O(n log n) in all."""
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
        for sequence in due:  # pushed only now: rounding may make its next change due at once
            if sequence.seq_id in self._waiting:
                self.push(sequence)


_Line = list[Entry]  # a heap; ranks of different sequences differ: seq_id is in them


class _Band:
    """Those of one band.

    Args:
        is_valid: whether an entry's sequence waits, and waits there.
    """

    def __init__(self, is_valid: Callable[[Entry], bool]) -> None:
        self.turns = FairTurns()
        self._is_valid = is_valid
        self._returning: _Line = []
        self._lines: dict[str, _Line] = {}  # by tenant
        # A tenant's entry may name a turn it has used up since: turns only grow, so it surfaces
        # too early, never too late.
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
        """The same without some tenants' newcomers."""
        head = self._head(self._returning)
        if head is not None:
            return head
        heads = {
            self.turns.turn(tenant): head
            for tenant, line in self._lines.items()
            if tenant not in passed and (head := self._head(line)) is not None
        }
        return heads[min(heads)] if heads else None

    def serve(self, sequence: Sequence, num_tokens: int) -> None:
        """A head that is no returning one is served."""
        request = sequence.request
        if request.tenant == self._tenants[0][1]:  # else its turn has not come: others were passed
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
    """Whether it, or the sequence it parted from, has run here before."""
    return (
        sequence.status is SequenceStatus.PREEMPTED
        or sequence.index > 0
        or sequence.num_output_tokens > len(sequence.request.output_token_ids)
    )


QUANTUM_TOKENS = 16.0  # as fine as it may be, since empty rounds cost nothing
_MAX_IDLE = 64  # accounts kept at least, before old ones are closed
Turn = tuple[int, int]  # round, place in it; a tenant's only grows


@dataclass(slots=True)
class _Account:
    turn: Turn
    credit: float  # tokens, more than 0


class FairTurns:
    """Deficit round robin over tenants, by tokens, with weights.

    In every round a tenant is served until its credit of `weight × quantum` tokens is used up. What
    it takes beyond that (a request is served whole, and its output is charged when it ends) is a
    debt that it sits out: it is next served in the first round whose credit is positive again.
    Instead of walking through rounds that serve nobody, each tenant carries the number of the round
    it is in, and the lowest is served. A tenant that comes back from having nothing to do joins the
    present round: idleness earns no credit, and cancels no debt.

    Operations take constant time (closing accounts: amortised).

    Source: Shreedhar and Varghese, Efficient Fair Queuing Using Deficit Round Robin, SIGCOMM 1995;
    the debt is surplus round robin's.

    Args:
        quantum_tokens: credit per round of a tenant of weight 1.
    """

    def __init__(self, quantum_tokens: float = QUANTUM_TOKENS) -> None:
        self._quantum = quantum_tokens
        self._accounts: dict[str, _Account] = {}
        self._round = 0  # of the tenant served last: no waiting one is behind it
        self._num_turns = 0
        self._max_accounts = _MAX_IDLE

    def join(self, tenant: str, weight: float) -> Turn:
        """A tenant has something to be served; its turn. Lower turns come first."""
        return self._account(tenant, weight).turn

    def turn(self, tenant: str) -> Turn:
        """Of a tenant that has joined and still waits."""
        return self._accounts[tenant].turn

    def serve(self, tenant: str) -> None:
        """A tenant that waits is being served: this is its round."""
        self._round = max(self._round, self._accounts[tenant].turn[0])

    def charge(self, tenant: str, weight: float, num_tokens: float) -> None:
        """A tenant has taken tokens, whether it waits or not."""
        account = self._account(tenant, weight)
        account.credit -= num_tokens
        if account.credit <= 0.0:
            each = self._quantum * weight
            num_rounds = math.floor(-account.credit / each) + 1
            account.credit += num_rounds * each
            account.turn = self._next_turn(account.turn[0] + num_rounds)

    def copy(self) -> FairTurns:
        """One to play through what is to come."""
        return copy.deepcopy(self)

    def _account(self, tenant: str, weight: float) -> _Account:
        """Brought into the present round, if its own is over."""
        account = self._accounts.get(tenant)
        if account is None or account.turn[0] < self._round:
            self._close_old()
            account = _Account(self._next_turn(self._round), self._quantum * weight)
            self._accounts[tenant] = account
        return account

    def _close_old(self) -> None:
        # An account whose round is over is as good as none.
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
_MAX_SHARE = 0.02  # of the time, for playing through the order of a long queue
_MEMORY_S = 10.0  # after which a measurement weighs 1/e


class QueueStats:
    """How fast the queue drains, and who stands where: looked at after every step.

    Args:
        clock: seconds.
    """

    def __init__(self, queue: WaitingQueue, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._clock = clock
        self._told: dict[str, int] = {}  # of requests that asked: the position they know, or -1
        self._positions_due_s = -math.inf
        self._last_s = clock()
        self._had_waiting = False
        self._num_served = 0
        self._busy_s = self._busy_tokens = 0.0  # while somebody waited, both fading alike

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that leave the queue while somebody waits; 0 before anybody did."""
        return self._busy_tokens / self._busy_s if self._busy_s > 0 else 0.0

    def add(self, request: Request) -> None:
        """A new request waits."""
        self._had_waiting = True
        if request.wants_queue_position:
            self._told[request.request_id] = -1

    def update(self) -> list[RequestOutput]:
        """The new positions of those that asked, at most every `POSITIONS_INTERVAL_S`."""
        now_s = self._clock()
        self._measure(now_s)
        if not self._told or now_s < self._positions_due_s:
            return []
        outputs = self._positions()
        cost_s = self._clock() - now_s
        self._positions_due_s = now_s + max(POSITIONS_INTERVAL_S, cost_s / _MAX_SHARE)
        return outputs

    def _measure(self, now_s: float) -> None:
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        num_new, self._num_served = (
            self._queue.num_served_tokens - self._num_served,
            self._queue.num_served_tokens,
        )
        if self._had_waiting and elapsed_s > 0:
            kept = math.exp(-elapsed_s / _MEMORY_S)
            self._busy_s = self._busy_s * kept + elapsed_s
            self._busy_tokens = self._busy_tokens * kept + num_new
        self._had_waiting = len(self._queue) > 0

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
