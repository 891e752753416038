"""Whose a free place is, among those that run at once.

A tenant's share of the places is by its weight, of the tenants that are here or were a moment ago,
and one place at least. Up to its share a tenant may take any place that is free. Those that hold
more leave a few places to the others, so that whoever comes beside a flood begins in the next step
and not when one of the flood's sequences ends. A tenant that is alone may have them all.

Not known here: which of its sequences a tenant's next one is, blocks, tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_ONE_KEPT_OF, _MAX_KEPT = 8, 4  # places; with fewer than eight none is kept
_MEMORY_S = 10.0  # for which a tenant that left is still reckoned with


@dataclass(slots=True, eq=False)
class _Tenant:
    weight: float
    num_here: int = 0  # sequences: waiting, running and parked
    num_places: int = 0
    left_s: float = 0.0  # when the last of them left


class Places:
    """Counts them by tenant.

    Args:
        max_num_seqs: places in all.
        clock: seconds.
    """

    def __init__(self, max_num_seqs: int, clock: Callable[[], float]) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_kept = min(max_num_seqs // _ONE_KEPT_OF, _MAX_KEPT)
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._holders: dict[str, _Tenant] = {}  # of places
        self._total_weight = 0.0
        self._leavers: deque[tuple[float, str]] = deque()  # tenants, by when they left

    def come(self, tenant: str, weight: float) -> None:
        """A sequence is here."""
        found = self._tenants.get(tenant)
        if found is None:
            found = self._tenants[tenant] = _Tenant(0.0)
        self._total_weight += weight - found.weight
        found.weight = weight
        found.num_here += 1

    def go(self, tenant: str) -> None:
        """It is no more; its place, if it had one, was given back before."""
        found = self._tenants[tenant]
        found.num_here -= 1
        if not found.num_here:
            found.left_s = self._clock()
            self._leavers.append((found.left_s, tenant))

    def take(self, tenant: str) -> None:
        """A sequence of this tenant's, which is here, has a place now."""
        found = self._holders[tenant] = self._tenants[tenant]
        found.num_places += 1

    def give_back(self, tenant: str) -> None:
        found = self._holders[tenant]
        found.num_places -= 1
        if not found.num_places:
            del self._holders[tenant]

    def is_within_share(self, tenant: str, num_places: int) -> bool:
        """Whether a tenant that is here holds no more than its share with so many more."""
        self._forget()
        own = self._tenants[tenant]
        return own.num_places + num_places <= self._share(own)

    def leaves_enough(self, tenant: str, num_places: int) -> bool:
        """Whether a tenant beyond its share may have so many more: who is leaves some to others,
        unless all are asked for at once."""
        num_beyond = num_places + self._tenants[tenant].num_places
        num_beyond += sum(
            other.num_places
            for name, other in self._holders.items()
            if name != tenant and other.num_places > self._share(other)
        )
        return num_beyond <= max(self._max_num_seqs - self._num_kept, num_places)

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
