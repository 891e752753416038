"""Response logs in Redis, shared by many gateways: one runs a response, any can read it.

`redis_stream` (a response) and `redis_ownership` (the gateways) document the keys. `redis_writer`
creates and writes the logs that this gateway owns, `redis_reader` follows those of others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakValueDictionary

from redis.asyncio import Redis

from penstock.gateway.storage.conversations.store import (
    StoreUnavailableError,
    store_unavailable,
)
from penstock.gateway.storage.redis.errors import RedisAwayError
from penstock.gateway.storage.redis.health import RedisHealth
from penstock.gateway.storage.redis.shares import RedisShares
from penstock.gateway.storage.response_log.log import ResponseLog, left_behind
from penstock.gateway.storage.response_log.log_store import TakeOver, response_expired
from penstock.gateway.storage.response_log.record import LogHeader
from penstock.gateway.storage.response_log.redis_ownership import Claim, Ownership
from penstock.gateway.storage.response_log.redis_reader import StreamFollower
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.response_log.redis_stream import (
    BROKEN,
    BrokenLogError,
    Command,
    StoredLog,
    ask,
    cancel_key,
    ends,
    header_of,
    load,
    log_key,
    num_bytes_of,
    read_first,
    read_last,
    round_trip,
    unless_foreign,
)
from penstock.gateway.storage.response_log.redis_writer import LogOpener, LogWriter, OwnedLog

_LOG = logging.getLogger(__name__)
_NUM_LOADS = 16  # at a time, so that they do not delay the writer and the lease
_LOG_BYTES, _ENTRY_BYTES = 512, 32  # what Redis takes for a stream and an entry beside the content
_LOOK_S = 0.1  # interval of checks whether somebody still reads


class RedisLogStore:
    """A `LogStore`.

    Args:
        redis: a client with few retries and time-outs above half a second, used only by this store.
        health: notes errors and round trips.
        shares: the account of what tenants keep in this Redis; None: nobody counts it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        redis: Redis,
        settings: RedisLogSettings | None = None,
        health: RedisHealth | None = None,
        *,
        shares: RedisShares | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._health = health = health or RedisHealth()
        self._settings = settings = settings or RedisLogSettings()
        self._clock = clock
        self._shares = shares
        if shares is not None:
            shares.add_kind("resp_", self._evict)
        self._ownership = Ownership(
            redis,
            settings,
            adopt=self._adopt,
            on_beat=self._maintain,
            health=health,
            clock=clock,
        )
        self._writer = LogWriter(
            redis,
            settings,
            on_done=self._forget,
            farewell=self._farewell,
            health=health,
        )
        self._opener = LogOpener(
            redis,
            settings,
            self._ownership,
            age=self._age,
            give_up=self._writer.give_up,
            health=health,
        )
        self._follower = StreamFollower(
            redis,
            settings,
            self._ownership.control_key,
            self._on_control,
            health=health,
            clock=clock,
        )
        self._live: dict[str, ResponseLog] = {}  # responses that run here
        # Those that have readers: many readers of a long one must not each hold a copy.
        self._ended: WeakValueDictionary[str, ResponseLog] = WeakValueDictionary()
        self._load_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._take_over: TakeOver | None = None
        self._has_moved_readers = False  # readers of what was handed over
        self._is_over = False  # nothing is read here any longer
        self._loads = asyncio.Semaphore(_NUM_LOADS)
        self._refresh_s = 0.0  # when to renew the time to live of the running responses' keys
        self._tasks: list[asyncio.Task[None]] = []
        self._forwarding: list[asyncio.Task[None]] = []  # the event loop's references are weak

    @property
    def gateway_id(self) -> str:
        return self._ownership.gateway_id

    async def start(
        self,
        take_over: TakeOver,
        *,
        can_run: Callable[[], bool] = lambda: True,
        pool: Callable[[], bytes] = bytes,  # noqa: ARG002  (the gateways of a Redis have one)
    ) -> None:
        """Start taking over responses (`LogStore.start`). `take_over` must have set
        `ResponseLog.owner` when it returns."""
        self._take_over = take_over
        self._ownership.can_run = can_run
        await self._ownership.appear()
        self._tasks = [
            asyncio.create_task(self._ownership.run()),
            asyncio.create_task(self._follower.run()),
        ]

    async def create(self, header: LogHeader) -> ResponseLog:
        response_id = header.response_id
        key = _key(response_id)
        log = ResponseLog(header, storage=self._writer)
        owned = OwnedLog(
            log=log, key=key, epoch=1, confirmed=header.num_opening_events - 1, is_begun=False
        )
        if self._ownership.is_leaving:
            raise store_unavailable("this gateway is shutting down")
        try:
            await self._opener.open(owned)
        except StoreUnavailableError as error:
            if self._shares is not None:  # for the client's next attempt
                await self._shares.make_room(header.tenant, owned.num_bytes, error.__cause__)
            raise
        self._tell(owned)
        self._live[response_id] = log
        self._writer.own(owned)
        return log

    async def find(self, tenant: str, response_id: str) -> ResponseLog:
        if self._is_over:
            raise left_behind(response_id)
        log = self._known(response_id) or await self._load(response_id)
        if log.header.tenant != tenant:
            raise response_expired(response_id)
        return log

    async def cancel(self, tenant: str, response_id: str) -> None:
        log = self._live.get(response_id)
        if log is None:
            is_ended = await self._look(tenant, response_id)
            if is_ended is None:
                raise response_expired(response_id)
            if not is_ended:
                with self._answering():
                    await self._ownership.cancel(response_id)
        elif log.header.tenant == tenant:
            log.cancel()
        else:
            raise response_expired(response_id)

    async def delete(self, tenant: str, response_id: str) -> None:
        if await self._look(tenant, response_id):
            with self._answering():
                await ask(self._redis, "DEL", _key(response_id))
            self._ended.pop(response_id, None)
            if self._shares is not None:
                self._shares.forget_soon(tenant, response_id)

    async def hand_over(self) -> None:
        self._ownership.is_leaving = True
        await self._writer.flushed()
        self._has_moved_readers = any(log.readers for log in self._live.values())
        self._writer.let_go()
        with contextlib.suppress(RedisAwayError, TimeoutError):
            async with asyncio.timeout(self._settings.hand_over_s):
                await self._ownership.leave()

    async def let_readers_end(self, limit_s: float) -> None:
        with contextlib.suppress(RedisAwayError, TimeoutError):
            async with asyncio.timeout(limit_s):
                if self._has_moved_readers:  # they look for the next owner's log
                    await asyncio.sleep(self._settings.find_s)
                while (  # noqa: ASYNC110  (once in a process's life)
                    self._follower.has_readers and await self._ownership.has_others()
                ):
                    await asyncio.sleep(_LOOK_S)
        self._is_over = True
        self._follower.let_go()

    async def close(self) -> None:
        """Other gateways take over the running responses when the lease expires."""
        await self._writer.flushed()
        tasks = set(self._tasks)
        while tasks:  # redis-py may swallow a cancellation
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=0.1)

    # -- reading ------------------------------------------------------------------------------

    async def _load(self, response_id: str) -> ResponseLog:
        key = log_key(response_id)
        if key is None:
            raise response_expired(response_id)
        async with self._load_locks.setdefault(response_id, asyncio.Lock()), self._loads:
            if (log := self._known(response_id)) is not None:
                return log  # another task has loaded it
            with self._answering():
                stored = await self._read(response_id, key)
            # This gateway may have taken it over meanwhile, or another task loaded it.
            log = self._known(response_id)
            if log is not None:
                return log
            if stored.log.is_ended:
                self._ended[response_id] = stored.log
            else:
                with self._answering():
                    await self._follower.follow(stored)
            return stored.log

    def _known(self, response_id: str) -> ResponseLog | None:
        return (
            self._live.get(response_id)
            or self._follower.find(response_id)
            or self._ended.get(response_id)
        )

    async def _read(self, response_id: str, key: str) -> StoredLog:
        try:
            stored = await load(self._redis, key)
        except BrokenLogError as error:
            if self._health.may_complain(response_id):
                _LOG.info("cannot replay %s: %s", response_id, error)
            stored = None
        if stored is None:
            raise response_expired(response_id)
        return stored

    async def _look(self, tenant: str, response_id: str) -> bool | None:
        """Whether a response has ended, as far as its log shows; None if it does not exist, or is
        another tenant's. A response with a broken log may still run."""
        key = log_key(response_id)
        if key is None:
            return None
        with self._answering():
            first, last = map(
                unless_foreign,
                await round_trip(self._redis, [read_first(key), read_last(key)]),
            )
        try:
            if not first or not last or header_of(first[0][1]).tenant != tenant:
                return None
        except BrokenLogError:
            return None
        fields = last[0][1]
        return BROKEN not in fields and ends(fields)

    @contextlib.contextmanager
    def _answering(self) -> Iterator[None]:
        """Raises: StoreUnavailableError: Redis is unavailable."""
        try:
            yield
        except RedisAwayError as error:
            raise store_unavailable(self._health.describe(error)) from error

    async def _evict(self, tenant: str, response_id: str) -> bool:
        """Delete an ended log to make room; False: it has not ended."""
        is_ended = await self._look(tenant, response_id)
        if is_ended:
            with self._answering():
                await ask(self._redis, "DEL", _key(response_id))
        return is_ended is not False

    # -- owning -------------------------------------------------------------------------------

    async def _adopt(self, claim: Claim) -> None:
        """Continue a response that this gateway has just fenced off."""
        try:
            stored = await load(self._redis, claim.key, storage=self._writer)
        except BrokenLogError as error:
            _LOG.warning("cannot take over %s: %s", claim.response_id, error)
            stored = None
        if stored is None or stored.epoch != claim.epoch or stored.log.is_ended:
            forget = self._ownership.forget(claim.response_id, claim.epoch)
            await ask(self._redis, *forget)
            return
        log = stored.log
        log.epoch = claim.epoch
        is_cancelled = await ask(self._redis, "EXISTS", cancel_key(claim.response_id))
        if self._ownership.is_leaving:
            return  # fence and note are this gateway's, so the next gateway takes it over
        assert self._take_over is not None
        self._writer.own(
            OwnedLog(
                log=log,
                key=claim.key,
                epoch=claim.epoch,
                num_stored=len(log.entries),
                num_bytes=num_bytes_of(log),
            )
        )
        self._live[claim.response_id] = log
        self._take_over(log)
        if is_cancelled:
            log.cancel()

    async def _maintain(self, has_lost_lease: bool) -> None:
        """Called at every heartbeat."""
        owned = list(self._writer.owned.values())
        if has_lost_lease:
            self._writer.suspect_all()
            await round_trip(
                self._redis, [self._ownership.note(log.response_id, log.epoch) for log in owned]
            )
        if self._clock() >= self._refresh_s:
            self._refresh_s = self._clock() + self._settings.ttl_s / 4
            await round_trip(self._redis, [self._age(log.key) for log in owned])
            for log in owned:
                self._tell(log)
        await self._writer.repair()
        await self._follower.check()

    def _on_control(self, fields: dict[bytes, bytes]) -> None:
        if b"look" in fields:
            self._ownership.hurry()
        elif (response_id := fields.get(b"cancel")) is not None:
            log = self._live.get(response_id.decode(errors="replace"))
            if log is not None:
                log.cancel()

    def _forget(self, log: ResponseLog) -> None:
        response_id = log.header.response_id
        if self._live.get(response_id) is log:
            del self._live[response_id]
        if log.is_cancelled and not log.is_ended:
            # The cancel arrived when this gateway no longer ran it: forward it to the new owner.
            self._forwarding = [each for each in self._forwarding if not each.done()]
            self._forwarding.append(asyncio.create_task(self._forward_cancel(response_id)))

    async def _forward_cancel(self, response_id: str) -> None:
        try:
            await self._ownership.cancel(response_id)
        except RedisAwayError as error:
            _LOG.warning("cannot forward the cancel of %s to its owner: %s", response_id, error)

    def _farewell(self, owned: OwnedLog) -> Sequence[Command]:
        if owned.is_begun:
            self._tell(owned)
        return self._age(owned.key), self._ownership.forget(owned.response_id, owned.epoch)

    def _tell(self, owned: OwnedLog) -> None:
        """Tell the account how large a log is by now."""
        if self._shares is not None:
            header, num = owned.log.header, len(owned.log.entries)
            num_bytes = _LOG_BYTES + owned.num_bytes + num * _ENTRY_BYTES
            self._shares.tell_soon(
                header.tenant, header.response_id, num_bytes, ttl_s=self._settings.ttl_s
            )

    def _age(self, key: str) -> Command:
        return "PEXPIRE", key, int(self._settings.ttl_s * 1000)


def _key(response_id: str) -> str:
    key = log_key(response_id)
    assert key is not None
    return key
