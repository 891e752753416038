"""Which tenant may use a free one of the `max_num_seqs` slots.

The slots are shared by weight among the tenants that are active or were so recently; a share is at
least one slot. Up to its share a tenant may use any free slot. Tenants beyond their share leave a
few slots to the others, so that beside a flood another tenant's request starts in the next step,
not when one of the flood's sequences ends. A single tenant may use all slots; then another's first
request displaces a few of its sequences (`RunningSet.displace`).

Who holds many slots beside a tenant that holds few is heavy: `heavy_tenants` limits what it gets of
a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

_ONE_KEPT_OF, _MAX_KEPT = 8, 4  # slots; of fewer than eight none is kept free
_MEMORY_S = 10.0  # how long an inactive tenant still counts
# After this, steps are no shorter than for one tenant: what another would wait for is not worth it.
_RETURN_S, _MAX_AWAY = 300.0, 100
_HEAVY = 4.0  # times the slots of the lightest, by weight
_NOBODY: Set[str] = frozenset()


@dataclass(slots=True, eq=False)
class _Tenant:
    weight: float
    num_here: int = 0  # sequences: waiting, running and parked
    num_slots: int = 0
    left_s: float = 0.0  # when the last of them left


class TenantSlots:
    """Counts slots by tenant.

    Args:
        max_num_seqs: total number of slots.
        clock: seconds.
    """

    def __init__(self, max_num_seqs: int, clock: Callable[[], float]) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_kept = min(max_num_seqs // _ONE_KEPT_OF, _MAX_KEPT)
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._holders: dict[str, _Tenant] = {}  # of slots
        self._total_weight = 0.0
        self._leavers: deque[tuple[float, str]] = deque()  # inactive tenants, oldest first
        self._away: dict[str, float] = {}  # forgotten ones: when they left, oldest first

    def add_sequence(self, tenant: str, weight: float) -> None:
        """Count a sequence of this tenant."""
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Tenant(0.0)
            self._away.pop(tenant, None)
        self._total_weight += weight - found.weight
        found.weight = weight
        found.num_here += 1

    def remove_sequence(self, tenant: str) -> None:
        """A sequence was removed; its slot, if it had one, must be released before."""
        found = self._tenants[tenant]
        found.num_here -= 1
        if not found.num_here:
            found.left_s = self._clock()
            self._leavers.append((found.left_s, tenant))

    def acquire(self, tenant: str) -> None:
        """Give a slot to a sequence that was added before."""
        found = self._holders[tenant] = self._tenants[tenant]
        found.num_slots += 1

    def release(self, tenant: str) -> None:
        found = self._holders[tenant]
        found.num_slots -= 1
        if not found.num_slots:
            del self._holders[tenant]

    def is_within_share(self, tenant: str, num_slots: int) -> bool:
        """Whether an active tenant stays within its share with `num_slots` more."""
        self._forget()
        own = self._tenants[tenant]
        return own.num_slots + num_slots <= self._share(own)

    def leaves_enough(self, tenant: str, num_slots: int) -> bool:
        """Whether a tenant beyond its share may have `num_slots` more: all tenants beyond their
        share together leave some slots free, unless a single request needs them."""
        num_beyond = num_slots + self._tenants[tenant].num_slots
        num_beyond += sum(
            other.num_slots
            for name, other in self._holders.items()
            if name != tenant and other.num_slots > self._share(other)
        )
        return num_beyond <= max(self._max_num_seqs - self._num_kept, num_slots)

    @property
    def are_several(self) -> bool:
        """Whether more than one tenant is active, or was so a moment ago."""
        if len(self._tenants) > 1:
            self._forget()
        return len(self._tenants) > 1

    def another_may_come(self) -> bool:
        """Whether a tenant that is not active was so in the last minutes."""
        self._forget()
        newest_s = next(reversed(self._away.values()), -math.inf)
        return newest_s > self._clock() - _RETURN_S

    def heavy_tenants(self) -> Set[str]:
        """Those that hold four times as many slots, by weight, as the tenant that holds fewest; one
        without a slot counts as if it had one. Empty if all hold about as many."""
        if not self.are_several:
            return _NOBODY
        least = min(max(each.num_slots, 1) / each.weight for each in self._tenants.values())
        return {
            name
            for name, each in self._holders.items()
            if each.num_slots / each.weight >= _HEAVY * least
        }

    def by_weight(self, amounts: Mapping[str, int]) -> dict[str, float]:
        """What tenants have that is more than nothing, divided by their weights."""
        return {name: num / self._tenants[name].weight for name, num in amounts.items() if num}

    def _share(self, tenant: _Tenant) -> float:
        if len(self._tenants) == 1:
            return self._max_num_seqs
        return max(1.0, self._max_num_seqs * tenant.weight / self._total_weight)

    def _forget(self) -> None:
        until_s = self._clock() - _MEMORY_S
        while self._leavers and self._leavers[0][0] <= until_s:
            left_s, name = self._leavers.popleft()
            tenant = self._tenants.get(name)
            if tenant is not None and not tenant.num_here and tenant.left_s == left_s:
                self._total_weight -= tenant.weight
                del self._tenants[name]
                self._away[name] = left_s
                if len(self._away) > _MAX_AWAY:
                    del self._away[next(iter(self._away))]
