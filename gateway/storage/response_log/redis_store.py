"""Response logs in Redis, shared by many gateways: one runs a response, any can read it.

replica, cursor, leases      what is decided, without I/O
redis_stream, redis_steps    the format, and the protocol in round trips, without I/O
redis_writer                 stores what this gateway runs
redis_reader                 follows what others run
redis_gateways               heartbeats and takeovers
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from typing import Any
from weakref import WeakValueDictionary

from redis.asyncio import Redis

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.store import StoreUnavailableError, store_unavailable
from penstock.gateway.storage.redis.errors import RedisAwayError, detail_of
from penstock.gateway.storage.redis.health import RedisHealth
from penstock.gateway.storage.redis.shares import RedisShares
from penstock.gateway.storage.redis.trips import ask, drive, round_trip
from penstock.gateway.storage.response_log import replica as do
from penstock.gateway.storage.response_log.leases import Leases
from penstock.gateway.storage.response_log.log import ResponseLog, left_behind, response_expired
from penstock.gateway.storage.response_log.record import LogHeader
from penstock.gateway.storage.response_log.redis_gateways import Gateways, log_failure
from penstock.gateway.storage.response_log.redis_reader import StreamFollower
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.response_log.redis_steps import (
    Takeovers,
    control_key,
    forget,
    keep_for,
    read_log,
    running,
    verify_all,
)
from penstock.gateway.storage.response_log.redis_stream import (
    BROKEN,
    RedisLog,
    ends,
    header_of,
    log_key,
    new_opener,
    read_first,
    read_key,
    read_last,
    steer_key,
    unless_foreign,
)
from penstock.gateway.storage.response_log.redis_writer import LogOpener, LogWriter
from penstock.gateway.storage.response_log.replica import BrokenLogError, Commands, Role

_LOG = logging.getLogger(__name__)
_NUM_LOADS = 16  # at a time, so that they do not delay the writer and the lease
_LOG_BYTES, _ENTRY_BYTES = 512, 32  # what Redis takes for a stream and an entry beside the content
_LOOK_S = 0.1  # interval of checks whether somebody still reads


class RedisLogStore:
    """A `LogStore`; the `Storage` of its logs.

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
        self.gateway_id = f"{{{secrets.token_hex(8)}}}"  # its keys share a slot of a cluster
        self.takeovers: asyncio.Queue[ResponseLog] = asyncio.Queue()
        self._redis = redis
        self._health = health = health or RedisHealth()
        self._settings = settings = settings or RedisLogSettings()
        self._clock = clock
        self._shares = shares
        if shares is not None:
            shares.add_kind("resp_", self._evict)
        self._running: dict[str, RedisLog] = {}
        # All that are known here; readers and runs hold them.
        self._logs: WeakValueDictionary[str, RedisLog] = WeakValueDictionary()
        self._load_locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._loads = asyncio.Semaphore(_NUM_LOADS)
        self._leases = Leases(settings)
        takeovers = Takeovers(self.gateway_id, self._leases, self, self)
        self._gateways = Gateways(redis, settings, takeovers, health=health, clock=clock)
        self._by = takeovers
        self._opener = LogOpener(redis, settings, self.gateway_id, health=health)
        self._writer = LogWriter(redis, settings, self._running, health=health)
        self._follower = StreamFollower(
            redis, settings, control_key(self.gateway_id), health=health, clock=clock
        )
        self._can_run: Callable[[], bool] = lambda: True
        self._is_over = False  # nothing is read here any longer
        self._refresh_s = 0.0  # when to renew the time to live of the running responses' keys
        self._scan_now = asyncio.Event()
        self._taking_over: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._errands: set[asyncio.Task[None]] = set()  # the event loop's references are weak

    async def start(
        self,
        *,
        can_run: Callable[[], bool] = lambda: True,
        pool: Callable[[], bytes] = bytes,  # noqa: ARG002  (the gateways of a Redis have one)
    ) -> None:
        self._can_run = can_run
        # The first heartbeat comes before the first response, so that others notice when this
        # gateway dies.
        await self._turn()
        work = (self._beat_on(), self._follower.run(), self._obey())
        self._tasks = [asyncio.create_task(each) for each in work]

    async def create(self, header: LogHeader) -> ResponseLog:
        opener = new_opener(self.gateway_id)
        log = RedisLog(header, key=_key(header.response_id), storage=self, opener=opener)
        if self._leases.is_leaving:
            raise store_unavailable("this gateway is shutting down")
        try:
            await self._opener.open(log)
        except StoreUnavailableError as error:
            if self._shares is not None:  # for the client's next attempt
                await self._shares.make_room(header.tenant, log.num_bytes, error.__cause__)
            raise
        self._tell_size(log)
        return log

    async def find(self, tenant: str, response_id: str) -> ResponseLog:
        if self._is_over:
            raise left_behind(response_id)
        log = self.known(response_id) or await self._load(response_id)
        if log.header.tenant != tenant:
            raise response_expired(response_id)
        if log.replica.pending & do.MEND:  # another gateway may have it, and know more
            with contextlib.suppress(RedisAwayError):
                await self._writer.mark_now(log)
        return log

    async def cancel(self, tenant: str, response_id: str) -> None:
        log = self._running.get(response_id)
        if log is None:
            is_ended = await self._look(tenant, response_id)
            if is_ended is None:
                raise response_expired(response_id)
            if not is_ended:
                with self._answering():
                    await self._gateways.cancel(response_id)
        elif log.header.tenant == tenant:
            log.cancel()
        else:
            raise response_expired(response_id)

    async def steer(self, tenant: str, response_id: str, steer_id: str, text: str) -> None:
        log = await self.find(tenant, response_id)
        if log.run is not None:
            log.steer(steer_id, text)
        elif not log.is_ended:
            with self._answering():
                await self._gateways.steer(response_id, steer_id, text)

    async def delete(self, tenant: str, response_id: str) -> None:
        if await self._look(tenant, response_id):
            with self._answering():
                await ask(self._redis, "DEL", _key(response_id))
            self._logs.pop(response_id, None)
            if self._shares is not None:
                self._shares.forget_soon(tenant, response_id)

    async def hand_over(self) -> None:
        self._leases.is_leaving = True  # from now on nothing is taken over
        await self._writer.flushed()
        for log in list(self._running.values()):
            if log.is_resumable:
                log.do(log.replica.fenced(log.replica.epoch))
        with contextlib.suppress(RedisAwayError, TimeoutError):
            async with asyncio.timeout(self._settings.hand_over_s):
                if self._taking_over is not None:
                    self._taking_over.cancel()
                    await asyncio.wait({self._taking_over})
                await self._gateways.leave()

    async def let_readers_end(self, limit_s: float) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + limit_s  # redis-py may swallow a cancellation
        with contextlib.suppress(RedisAwayError, TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._follower.has_readers and loop.time() < end_s:
                    if not await self._gateways.are_there():
                        break
                    await asyncio.sleep(_LOOK_S)
        self._is_over = True
        self._follower.let_go()

    async def close(self) -> None:
        """Other gateways take over the running responses when the lease expires."""
        await self._writer.flushed()
        tasks = {*self._tasks, *self._errands}
        if self._taking_over is not None:
            tasks.add(self._taking_over)
        while tasks:  # redis-py may swallow a cancellation
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=0.1)

    async def running(self, response_ids: Collection[str]) -> Collection[str]:
        """Those of some responses that run at any gateway, or are to be taken over; all of them if
        Redis is unavailable."""
        try:
            found = await drive(self._redis, running(response_ids, self.gateway_id))
        except RedisAwayError:
            return response_ids
        return found | (self._running.keys() & set(response_ids))

    # -- `Storage` ----------------------------------------------------------------------------

    def store(self, log: ResponseLog) -> None:
        self._writer.store(log)  # type: ignore[arg-type]  # this store makes no others

    def carry_out(self, log: ResponseLog, commands: Commands) -> None:
        assert isinstance(log, RedisLog)
        response_id = log.response_id
        if commands & do.RUN:
            self._running[response_id] = self._logs[response_id] = log
        elif commands & (do.STOP | do.END) and self._running.get(response_id) is log:
            del self._running[response_id]
            if not log.is_resumable:  # from now on it is what Redis has of it
                self._logs.pop(response_id, None)
        if commands & do.MEND:
            self._writer.mark(log)
        if commands & do.RELEASE:
            if log.replica.is_begun:
                self._tell_size(log)
            self._writer.add_chores(
                keep_for(log.key, self._settings.ttl_s),
                forget(self.gateway_id, response_id, log.replica.epoch),
            )
        if commands & do.FOLLOW:
            self._follower.follow(log, is_read=bool(log.readers))
            self._run_errand(self._follower.announce())
        if commands & do.FORWARD:
            self._run_errand(self._gateways.cancel(response_id))

    def doubt(self, log: ResponseLog) -> None:
        log.do(log.replica.unsure(log.replica.epoch))

    async def settle(self, log: ResponseLog) -> None:
        await self._writer.settle(log)  # type: ignore[arg-type]

    async def is_read_elsewhere(self, log: ResponseLog) -> bool:
        try:
            return bool(await ask(self._redis, "EXISTS", read_key(log.response_id)))
        except RedisAwayError:
            return True  # unknown; assume that it is read

    def _run_errand(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except RedisAwayError as error:
                _LOG.warning("cannot tell other gateways: %s", error)

        task = asyncio.create_task(run())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _tell_size(self, log: RedisLog) -> None:
        """Tell the account how large a log is by now."""
        if self._shares is not None:
            num_bytes = _LOG_BYTES + log.num_bytes + len(log.entries) * _ENTRY_BYTES
            self._shares.tell_soon(
                log.header.tenant, log.response_id, num_bytes, ttl_s=self._settings.ttl_s
            )

    # -- `KnownLogs` --------------------------------------------------------------------------

    def known(self, response_id: str) -> RedisLog | None:
        log = self._logs.get(response_id)
        return None if log is None or log.replica.role is Role.LOST else log

    def begin_following(self, log: RedisLog) -> None:
        self._logs[log.response_id] = log

    def taken_over(self, log: RedisLog) -> None:
        self.takeovers.put_nowait(log)

    # -- reading ------------------------------------------------------------------------------

    async def _load(self, response_id: str) -> RedisLog:
        key = log_key(response_id)
        if key is None:
            raise response_expired(response_id)
        async with self._load_locks.setdefault(response_id, asyncio.Lock()), self._loads:
            if (log := self.known(response_id)) is not None:
                return log  # another task has loaded it
            with self._answering():
                log = await self._read(response_id, key)
            # This gateway may have taken it over meanwhile.
            if (known := self.known(response_id)) is not None:
                return known
            self.begin_following(log)
            if log.replica.role is Role.FOLLOWED:
                self._follower.follow(log, is_read=True)
                with self._answering():
                    await self._follower.announce()
            return log

    async def _read(self, response_id: str, key: str) -> RedisLog:
        try:
            log = await drive(self._redis, read_log(key, self))
        except BrokenLogError as error:
            if self._health.may_complain(response_id):
                _LOG.info("cannot replay %s: %s", response_id, error)
            log = None
        if log is None:
            raise response_expired(response_id)
        return log

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

    # -- heartbeats ---------------------------------------------------------------------------

    async def _beat_on(self) -> None:
        """Send heartbeats and look for gateways that are gone, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.beat_s):
                    await self._scan_now.wait()
            self._scan_now.clear()
            await self._turn()

    async def _turn(self) -> None:
        leases = self._leases
        try:
            async with asyncio.timeout(self._gateways.patience_s):
                failure = None
                if not leases.is_leaving:  # otherwise it has no lease
                    failure = await self._gateways.beat()
                await self._maintain()
                if failure is not None:
                    raise failure
            leases.turned(now_s := self._clock())
            if self._taking_over is not None and not self._taking_over.done():
                # A gateway may have left since the running task looked.
                self._taking_over.add_done_callback(lambda _: self._scan_now.set())
            elif leases.may_scan(now_s):
                work = self._gateways.take_over_all(self._can_run)
                self._taking_over = asyncio.create_task(work)
        except (RedisAwayError, TimeoutError) as error:
            why = self._health.describe(error)
            if not leases.was_away and self._health.may_complain(why):
                _LOG.warning("%s (%s)", why, detail_of(error))
            leases.away()
        except Exception as error:  # foreign content or a bug; the lease must still be renewed
            log_failure("maintaining the response logs failed", error, self._health)

    async def _maintain(self) -> None:
        running = list(self._running.values())
        if self._leases.has_lapsed:
            await drive(self._redis, verify_all(running, self._by))
        if self._clock() >= self._refresh_s:
            self._refresh_s = self._clock() + self._settings.ttl_s / 4
            ttl_s = self._settings.ttl_s
            await round_trip(self._redis, [keep_for(log.key, ttl_s) for log in running])
            for log in running:
                self._tell_size(log)
        await self._writer.mend()
        await self._follower.check()

    async def _steer(self, response_id: str, steer_id: str) -> None:
        """Queue a steer that another gateway was asked for. One that cannot be queued is missed by
        that gateway, which reads the log."""
        log = self._running.get(response_id)
        if log is None:
            return
        text = await ask(self._redis, "GET", steer_key(response_id, steer_id))
        try:
            if text is not None:
                log.steer(steer_id, text.decode())
        except RequestRefusedError as error:
            _LOG.info("cannot steer %s: %s", response_id, error)
        except Exception:  # a bug, or foreign content
            _LOG.exception("cannot steer %s", response_id)

    async def _obey(self) -> None:
        """Do what other gateways say."""
        while True:
            fields = await self._follower.commands.get()
            if b"look" in fields:
                self._scan_now.set()
            elif (steer := fields.get(b"steer")) is not None:
                response_id, _, steer_id = steer.decode(errors="replace").partition(" ")
                self._run_errand(self._steer(response_id, steer_id))
            elif (cancelled := fields.get(b"cancel")) is not None:
                response_id = cancelled.decode(errors="replace")
                log = self._running.get(response_id)
                try:
                    if log is not None:
                        log.cancel()
                except Exception:  # a bug
                    _LOG.exception("cannot cancel %s", response_id)


def _key(response_id: str) -> str:
    key = log_key(response_id)
    assert key is not None
    return key
