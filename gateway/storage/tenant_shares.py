"""How tenants share what is stored: quotas of bytes and objects, and who loses what if it is full.

    beyond its own quota       a tenant loses its own least recently used objects, of any kind
    all within, store full     the tenant with the most there, the furthest over an equal share,
                               loses its least recently used ones, until the store is within again

An object is a conversation with its turns, or the log of a response or of a keyed answer. With one
tenant, as without keys, this is least recently used. An object in use (a turn runs) stays; what a
tenant has in use is never made room for at the cost of others within their share.
`redis.shares` does the same for all gateways of one Redis.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.gateway.errors import RequestRefusedError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreQuota:
    """What a tenant may keep in all stores together. None: no bound of its own."""

    num_bytes: int | None = None
    num_objects: int | None = None


NO_QUOTA = StoreQuota()
QuotaOf = Callable[[str], StoreQuota]  # by tenant


def no_quotas(_: str) -> StoreQuota:
    return NO_QUOTA


class StoreLimitError(RequestRefusedError):
    """413 `store_limit_exceeded`: a conversation would have more than can be stored of it."""

    def __init__(self, conversation_id: str, max_bytes: int) -> None:
        super().__init__(
            f"with these items the conversation {conversation_id!r} would have more than the "
            f"{max_bytes} bytes that can be stored of it",
            code="store_limit_exceeded",
            param="items",
            status=413,
        )


@dataclass(slots=True)
class _Kept:
    num_bytes: int
    used: int  # a number that grows with every use


class TenantShares:
    """What tenants keep in the stores of this process.

    Args:
        quota_of: a tenant's quota; asked whenever it is needed, so that a change takes effect.
    """

    def __init__(self, quota_of: QuotaOf = no_quotas) -> None:
        self.quota_of = quota_of
        self._shelves: list[Shelf] = []
        self._uses = itertools.count()

    def shelf(
        self,
        max_bytes: int,
        *,
        drop: Callable[[str], None],
        is_in_use: Callable[[str], bool] = lambda _: False,
    ) -> Shelf:
        """The account of one more store.

        Args:
            max_bytes: of the store.
            drop: deletes an object, and calls `Shelf.remove`.
            is_in_use: whether an object must stay for now.
        """
        shelf = Shelf(self, max_bytes, drop=drop, is_in_use=is_in_use)
        self._shelves.append(shelf)
        return shelf

    def next_use(self) -> int:
        return next(self._uses)

    def keep_quota(self, tenant: str) -> None:
        """Drop a tenant's oldest objects until it is within its quota."""
        quota = self.quota_of(tenant)
        while quota != NO_QUOTA and self._is_over(tenant, quota):
            oldest = [
                (used, key, shelf)
                for shelf in self._shelves
                for used, key in itertools.islice(shelf.droppable(tenant), 1)
            ]
            if not oldest:
                return
            _, key, shelf = min(oldest, key=lambda each: each[0])
            shelf.drop(key)

    def _is_over(self, tenant: str, quota: StoreQuota) -> bool:
        held = [shelf.held_by(tenant) for shelf in self._shelves]
        num_bytes, num_objects = (sum(each) for each in zip(*held, strict=True))
        return _exceeds(num_bytes, quota.num_bytes) or _exceeds(num_objects, quota.num_objects)


class Shelf:
    """The account of one store: whose objects it has, how large, and in which order of use.

    Attributes:
        num_bytes: of all objects.
    """

    def __init__(
        self,
        shares: TenantShares,
        max_bytes: int,
        *,
        drop: Callable[[str], None],
        is_in_use: Callable[[str], bool],
    ) -> None:
        self.drop = drop
        self.num_bytes = 0
        self._shares = shares
        self._max_bytes = max_bytes
        self._is_in_use = is_in_use
        self._kept: dict[str, OrderedDict[str, _Kept]] = {}  # by tenant, least recently used first
        self._bytes_of: dict[str, int] = {}  # by tenant

    def max_bytes_of(self, tenant: str) -> int:
        """The most that one object of a tenant can have."""
        quota = self._shares.quota_of(tenant).num_bytes
        return self._max_bytes if quota is None else min(quota, self._max_bytes)

    def put(self, tenant: str, key: str, num_bytes: int) -> None:
        """An object is new, or has another size; it is the most recently used. Others may be
        dropped for it, or it itself if it alone is too large."""
        of_tenant = self._kept.setdefault(tenant, OrderedDict())
        kept = of_tenant.setdefault(key, _Kept(0, 0))
        num_more = num_bytes - kept.num_bytes
        kept.num_bytes = num_bytes
        self.num_bytes += num_more
        self._bytes_of[tenant] = self._bytes_of.get(tenant, 0) + num_more
        self.use(tenant, key)
        self._shares.keep_quota(tenant)
        self.make_room()

    def use(self, tenant: str, key: str) -> None:
        of_tenant = self._kept[tenant]
        of_tenant[key].used = self._shares.next_use()
        of_tenant.move_to_end(key)

    def remove(self, tenant: str, key: str) -> None:
        of_tenant = self._kept[tenant]
        num_bytes = of_tenant.pop(key).num_bytes
        self.num_bytes -= num_bytes
        self._bytes_of[tenant] -= num_bytes
        if not of_tenant:
            del self._kept[tenant], self._bytes_of[tenant]

    def discard(self, tenant: str, key: str) -> None:
        """`remove`, where it is there."""
        if key in self._kept.get(tenant, ()):
            self.remove(tenant, key)

    def tenant_of(self, key: str) -> str:
        return next(tenant for tenant, kept in self._kept.items() if key in kept)

    def clear(self) -> None:
        """All objects are gone."""
        self._kept.clear()
        self._bytes_of.clear()
        self.num_bytes = 0

    def make_room(self) -> None:
        """Drop objects until the store is within its size, as far as they are not in use."""
        while self.num_bytes > self._max_bytes and (key := self._next_to_go()) is not None:
            self.drop(key)

    def _next_to_go(self) -> str | None:
        share = self._max_bytes / len(self._kept)
        over = [(size, tenant) for tenant, size in self._bytes_of.items() if size > share]
        for _, tenant in sorted(over, reverse=True):
            for _, key in self.droppable(tenant):
                return key
        return None

    def droppable(self, tenant: str) -> Iterator[tuple[int, str]]:
        """A tenant's objects that are not in use, with their last use, oldest first."""
        for key, kept in self._kept.get(tenant, {}).items():
            if not self._is_in_use(key):
                yield kept.used, key

    def held_by(self, tenant: str) -> tuple[int, int]:
        """Bytes and number of a tenant's objects."""
        return self._bytes_of.get(tenant, 0), len(self._kept.get(tenant, ()))


def _exceeds(value: int, bound: int | None) -> bool:
    return bound is not None and value > bound
