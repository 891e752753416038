"""Which ended logs a store of one process keeps: bounded in bytes and age, the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.tenant_shares import TenantShares

LOG_BYTES = 512  # an ended log's objects and dictionary slots, without its content


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: str
    ended_s: float


class EndedLogs:
    """An index; the store has the logs themselves.

    Args:
        max_bytes: of all of them; beyond it a tenant loses its oldest (`tenant_shares`).
        ttl_s: how long after its end a log can be read.
        shares: of the tenants in all stores of this process; None: there is only this store.
        clock: seconds.
        forget: deletes a log that is no longer kept.

    Attributes:
        being_read: decoded logs, each shared by all of its current readers.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        ttl_s: float,
        shares: TenantShares | None,
        clock: Callable[[], float],
        forget: Callable[[str], None],
    ) -> None:
        self.being_read: WeakValueDictionary[str, ResponseLog] = WeakValueDictionary()
        self._shelf = (shares or TenantShares()).shelf(max_bytes, drop=self._drop)
        self._ttl_s = ttl_s
        self._clock = clock
        self._forget = forget
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return self._shelf.num_bytes

    def __contains__(self, response_id: str) -> bool:
        return response_id in self._kept

    def has(self, tenant: str, response_id: str) -> bool:
        """Whether there is a tenant's log."""
        kept = self._kept.get(response_id)
        return kept is not None and kept.tenant == tenant

    def add(
        self, tenant: str, response_id: str, num_bytes: int, *, ended_s: float | None = None
    ) -> None:
        """A log has ended now, or then."""
        self._kept[response_id] = _Kept(tenant, self._clock() if ended_s is None else ended_s)
        self._shelf.put(tenant, response_id, LOG_BYTES + num_bytes)
        self.drop_old()

    def remove(self, response_id: str) -> None:
        """A log was deleted."""
        self._shelf.remove(self._kept.pop(response_id).tenant, response_id)
        self.being_read.pop(response_id, None)

    def clear(self) -> None:
        """All logs were lost."""
        for response_id in list(self._kept):
            self.remove(response_id)

    def drop_old(self) -> None:
        horizon = self._clock() - self._ttl_s
        while self._kept:
            response_id, oldest = next(iter(self._kept.items()))
            if oldest.ended_s > horizon:
                return
            self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        self.remove(response_id)
        self._forget(response_id)
