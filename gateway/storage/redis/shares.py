"""How tenants share what is stored in Redis: `tenant_shares` for all gateways.

    penstock:{stored}:order, :objects, :ends, :tenants    see `shares.lua`

The account is in one slot, the objects are in many. A gateway writes an object, tells the account
its size, and deletes what the account names; so a tenant may be over its quota by what its gateways
write at once. An object in use is named, found to be in use, and becomes the most recently used.

A Redis with `maxmemory` counts as full at three quarters of it, or when it says so. A cluster,
whose nodes fill each for itself, is full only when a node says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, TypeAlias

from redis.exceptions import RedisError

from penstock.gateway.storage.conversations.store import StoreUnavailableError, UnreadableDataError
from penstock.gateway.storage.redis.errors import state_of
from penstock.gateway.storage.redis.link import RedisLink, Script
from penstock.gateway.storage.tenant_shares import QuotaOf, no_quotas

_LOG = logging.getLogger(__name__)
_SCRIPT = Script(files("penstock.gateway.storage.redis").joinpath("shares.lua").read_text("utf-8"))
_KEYS = [f"penstock:{{stored}}:{name}" for name in ("order", "objects", "ends", "tenants")]
_SHARE_OF_MAXMEMORY = 0.75  # the rest is Redis's own for these objects, and what else it keeps
_LOOK_EVERY_S = 60.0  # at maxmemory
_AWAY_S = 1.0  # after a failure, until the account is told again
_NUM_AT_ONCE = 256
_MAX_UNTOLD = 10_000  # changes that wait for a Redis that is away; then the oldest are forgotten
_MAX_ROUNDS = 16  # of naming and deleting, 64 objects each
_AS_IT_WAS, _GONE = -1, 0

_Name: TypeAlias = tuple[str, str]  # tenant, id
_Changes: TypeAlias = Mapping[_Name, tuple[int, int]]  # bytes, and ms to live
# Deletes an object of a tenant by its id; False: it is in use. What is not there is deleted.
Drop: TypeAlias = Callable[[str, str], Awaitable[bool]]


class RedisShares:
    """The account of one Redis, as one gateway uses it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self,
        link: RedisLink,
        quota_of: QuotaOf = no_quotas,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._link = link
        self._quota_of = quota_of
        self._clock = clock
        self._drops: dict[str, Drop] = {}  # by the beginning of ids
        self._untold: dict[_Name, tuple[int, int]] = {}
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._away_until_s = 0.0
        self._max_bytes, self._look_at_s = 0, 0.0

    def add_kind(self, prefix: str, drop: Drop) -> None:
        """The objects whose ids begin with `prefix` are deleted by `drop`."""
        self._drops[prefix] = drop

    def max_bytes_of(self, tenant: str) -> int | None:
        """The most that one object of a tenant can have; None: no bound."""
        return self._quota_of(tenant).num_bytes

    async def tell(self, tenant: str, object_id: str, num_bytes: int, *, ttl_s: float) -> None:
        """An object has been written; returns when what had to go for it is gone. While Redis is
        away, this returns at once, and the account is told later."""
        self._note(tenant, object_id, num_bytes, ttl_s)
        await self._settle()

    def tell_soon(self, tenant: str, object_id: str, num_bytes: int, *, ttl_s: float) -> None:
        """`tell` without waiting."""
        self._note(tenant, object_id, num_bytes, ttl_s)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._settle(), name="redis-shares")

    def forget_soon(self, tenant: str, object_id: str) -> None:
        """An object has been deleted."""
        self.tell_soon(tenant, object_id, _GONE, ttl_s=0.0)

    async def make_room(self, tenant: str, num_bytes: int, error: BaseException | None) -> bool:
        """After a write that failed: whether it may be tried again, because Redis was full and the
        tenant furthest over its share has lost something."""
        if error is None or state_of(error) != "out_of_memory":
            return False
        try:
            async with self._lock:
                for _ in range(_MAX_ROUNDS):
                    named = await self._run({}, room=max(1, num_bytes), asker=tenant)
                    dropped = await self._drop(named)
                    await self._run(dropped)
                    if not named or any(size == _GONE for size, _ in dropped.values()):
                        return bool(named)
        except (StoreUnavailableError, UnreadableDataError):
            pass
        return False

    async def aclose(self) -> None:
        """Wait for what is being told."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_AWAY_S)
            self._task.cancel()

    def _note(self, tenant: str, object_id: str, num_bytes: int, ttl_s: float) -> None:
        self._untold.pop((tenant, object_id), None)
        self._untold[tenant, object_id] = num_bytes, round(ttl_s * 1000)
        if len(self._untold) > _MAX_UNTOLD:
            del self._untold[next(iter(self._untold))]

    async def _settle(self) -> None:
        """Tell what is untold, and delete what is named."""
        async with self._lock:
            while self._untold and self._clock() >= self._away_until_s:
                names = list(self._untold)[:_NUM_AT_ONCE]
                changes = {name: self._untold.pop(name) for name in names}
                try:
                    await self._look_at_maxmemory()
                    await self._fit(changes)
                except (StoreUnavailableError, UnreadableDataError):  # the link has logged it
                    self._away_until_s = self._clock() + _AWAY_S
                    self._untold = {**changes, **self._untold}

    async def _fit(self, changes: _Changes) -> None:
        """Tell changes, and delete until nothing more is named, or all of that is in use."""
        tenants = {tenant for tenant, _ in changes}
        tried = set[_Name]()
        for _ in range(_MAX_ROUNDS):
            named = [name for name in await self._run(changes, tenants) if name not in tried]
            if not named:
                return
            tried.update(named)
            changes = await self._drop(named)

    async def _drop(self, named: Sequence[_Name]) -> dict[_Name, tuple[int, int]]:
        """Delete objects; returns the changes to tell."""
        changes = {}
        for tenant, object_id in named:
            kinds = (drop for start, drop in self._drops.items() if object_id.startswith(start))
            drop = next(kinds, None)
            is_gone = drop is None or await drop(tenant, object_id)
            changes[tenant, object_id] = (_GONE if is_gone else _AS_IT_WAS), 0
        return changes

    async def _run(
        self, changes: _Changes, tenants: Iterable[str] = (), *, room: int = 0, asker: str = ""
    ) -> list[_Name]:
        """Run `shares.lua`; returns what it names."""
        of_tenants: list[Any] = []
        for tenant in tenants:
            quota = self._quota_of(tenant)
            of_tenants += (tenant, quota.num_bytes or 0, quota.num_objects or 0)
        of_objects = [part for name, change in changes.items() for part in (*name, *change)]
        num = len(of_tenants) // 3
        reply: list[bytes] = await self._link.run(
            _SCRIPT, _KEYS, [self._max_bytes, room, asker, num, *of_tenants, *of_objects]
        )
        words = [word.decode(errors="replace") for word in reply]
        return list(zip(words[::2], words[1::2], strict=True))

    async def _look_at_maxmemory(self) -> None:
        if self._clock() < self._look_at_s or self._link.address.is_cluster:
            return
        self._look_at_s = self._clock() + _LOOK_EVERY_S
        try:
            found = await self._link.client.info("memory")
        except RedisError as error:  # not permitted, or away: what follows will tell
            _LOG.debug("cannot read maxmemory: %s", error)
        else:
            self._max_bytes = int(_SHARE_OF_MAXMEMORY * int(found.get("maxmemory", 0)))
