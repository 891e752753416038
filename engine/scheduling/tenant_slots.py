"""Which tenant may use a free slot, of the `max_num_seqs` in which sequences run at once.

A tenant's share of the slots is by its weight, of the tenants that are here or were a moment ago,
and one slot at least. Up to its share a tenant may take any free slot. Tenants that hold more leave
a few slots to the others, so that a newcomer beside a flood begins in the next step and not when
one of the flood's sequences ends. A tenant that is alone may use them all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_ONE_KEPT_OF, _MAX_KEPT = 8, 4  # slots; with fewer than eight none is kept
_MEMORY_S = 10.0  # for which a tenant that left still counts


@dataclass(slots=True, eq=False)
class _Tenant:
    weight: float
    num_here: int = 0  # sequences: waiting, running and parked
    num_slots: int = 0
    left_s: float = 0.0  # when the last of them left


class TenantSlots:
    """Counts slots by tenant.

    Args:
        max_num_seqs: slots in all.
        clock: seconds.
    """

    def __init__(self, max_num_seqs: int, clock: Callable[[], float]) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_kept = min(max_num_seqs // _ONE_KEPT_OF, _MAX_KEPT)
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._holders: dict[str, _Tenant] = {}  # of slots
        self._total_weight = 0.0
        self._leavers: deque[tuple[float, str]] = deque()  # tenants, by when they left

    def add_sequence(self, tenant: str, weight: float) -> None:
        """A sequence is here."""
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Tenant(0.0)
        self._total_weight += weight - found.weight
        found.weight = weight
        found.num_here += 1

    def remove_sequence(self, tenant: str) -> None:
        """It is gone; its slot, if it had one, was released before."""
        found = self._tenants[tenant]
        found.num_here -= 1
        if not found.num_here:
            found.left_s = self._clock()
            self._leavers.append((found.left_s, tenant))

    def acquire(self, tenant: str) -> None:
        """A sequence of this tenant, added before, gets a slot."""
        found = self._holders[tenant] = self._tenants[tenant]
        found.num_slots += 1

    def release(self, tenant: str) -> None:
        found = self._holders[tenant]
        found.num_slots -= 1
        if not found.num_slots:
            del self._holders[tenant]

    def is_within_share(self, tenant: str, num_slots: int) -> bool:
        """Whether a tenant that is here holds no more than its share with so many more."""
        self._forget()
        own = self._tenants[tenant]
        return own.num_slots + num_slots <= self._share(own)

    def leaves_enough(self, tenant: str, num_slots: int) -> bool:
        """Whether a tenant beyond its share may have so many more: who is leaves some to others,
        unless all are asked for at once."""
        num_beyond = num_slots + self._tenants[tenant].num_slots
        num_beyond += sum(
            other.num_slots
            for name, other in self._holders.items()
            if name != tenant and other.num_slots > self._share(other)
        )
        return num_beyond <= max(self._max_num_seqs - self._num_kept, num_slots)

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
