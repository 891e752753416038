"""Carries out what the machines of this gateway's running logs say: `LogOpener` creates logs,
`LogWriter` appends to them.

All headers of one iteration of the event loop, and those that arrive while others are in flight,
are sent together. So a burst of new responses needs one connection and a few round trips.

All entries appended in one iteration of the event loop are sent in one pipeline (with a cluster,
one independent pipeline per node). The latency of a round trip is shared by all, and the next
pipeline is filled while one is in flight. A distant Redis gets the time of some round trips before
a response continues without it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from penstock.gateway.storage.conversations.store import UnreadableDataError, store_unavailable
from penstock.gateway.storage.redis.cluster import node_name
from penstock.gateway.storage.redis.errors import RedisAwayError, detail_of, is_foreign
from penstock.gateway.storage.redis.health import FOREIGN_EVERY_S, RedisHealth
from penstock.gateway.storage.redis.trips import (
    Command,
    drive,
    drive_all,
    in_time,
    lean_round_trip,
    round_trip,
)
from penstock.gateway.storage.response_log import replica as do
from penstock.gateway.storage.response_log.log_store import LogExistsError
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.response_log.redis_steps import (
    mark_broken,
    open_log,
    verify,
    write,
)
from penstock.gateway.storage.response_log.redis_stream import RedisLog
from penstock.gateway.storage.response_log.replica import Role

_LOG = logging.getLogger(__name__)
_WRITING_TICKS = 5  # see `in_time`
_LOOK_S = 0.01  # interval of checks whether a log has been verified
_RETRY_S = 0.005
# Of the patience: what one or two take if a new connection and a repetition come first.
_WRITING_ROUND_TRIPS, _OPENING_ROUND_TRIPS = 6, 10
_NUM_OPENED_AT_ONCE = 256  # a header may contain a long prompt
_OPENING_TICKS = 100  # see `in_time`: connecting may take twenty iterations of the event loop


@dataclass(slots=True, eq=False)
class _Opening:
    log: RedisLog
    done: asyncio.Future[None]


class LogOpener:
    """Creates the logs of new responses.

    Args:
        health: notes errors.
    """

    def __init__(
        self, redis: Redis, settings: RedisLogSettings, gateway_id: str, *, health: RedisHealth
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._gateway_id = gateway_id
        self._health = health
        self._waiting: deque[_Opening] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def open(self, log: RedisLog) -> None:
        """Store a log's header, and a note that this gateway runs the response.

        Raises:
            StoreUnavailableError: Redis is unavailable.
            LogExistsError: another response has this id.
        """
        opening = _Opening(log, asyncio.get_running_loop().create_future())
        self._waiting.append(opening)
        if self._sender is None:
            # Starts in the loop's next iteration, and includes all that is opened in this one.
            self._sender = asyncio.create_task(self._send())
        try:
            await opening.done
        except asyncio.CancelledError:
            if not opening.done.cancelled():  # the log was already open
                log.do(log.replica.not_opened(is_refused=False))
            raise

    async def _send(self) -> None:
        try:
            while self._waiting:
                num = min(len(self._waiting), _NUM_OPENED_AT_ONCE)
                batch = [self._waiting.popleft() for _ in range(num)]
                await self._open_all([opening for opening in batch if not opening.done.done()])
        finally:
            self._sender = None

    async def _open_all(self, batch: list[_Opening]) -> None:
        timeout_s = self._health.patience_s(
            self._settings.request_timeout_s, num_round_trips=_OPENING_ROUND_TRIPS
        )
        ttl_s = self._settings.ttl_s
        steps = [open_log(opening.log, self._gateway_id, ttl_s=ttl_s) for opening in batch]
        failures: Sequence[Exception | None]
        try:
            failures = await in_time(
                drive_all(self._redis, steps), timeout_s, num_ticks=_OPENING_TICKS
            )
        except Exception as error:  # raised to each waiting caller
            failures = [error] * len(batch)
        for opening, failure in zip(batch, failures, strict=True):
            self._close_opening(opening, failure)

    def _close_opening(self, opening: _Opening, failure: Exception | None) -> None:
        log, is_wanted = opening.log, not opening.done.cancelled()
        if failure is not None:
            is_refused = isinstance(failure, LogExistsError)
            log.do(log.replica.not_opened(is_refused=is_refused))
            if is_wanted:
                opening.done.set_exception(self._told(failure))
            return
        log.do(log.replica.opened())
        if is_wanted:
            opening.done.set_result(None)
        else:
            log.do(log.replica.not_opened(is_refused=False))

    def _told(self, failure: Exception) -> Exception:
        """What the caller gets."""
        if isinstance(failure, RedisAwayError):
            error = store_unavailable(self._health.describe(failure))
            error.__cause__ = failure
            return error
        if is_foreign(failure):
            if self._health.may_complain("notes", every_s=FOREIGN_EVERY_S):
                _LOG.warning("cannot note responses in Redis (%s)", detail_of(failure))
            return UnreadableDataError("the list of running responses")
        return failure


class LogWriter:
    """Writes logs.

    Args:
        running: the logs of the responses that this gateway runs, by response.
        health: tells the distance of Redis; notes errors.
    """

    def __init__(
        self,
        redis: Redis,
        settings: RedisLogSettings,
        running: Mapping[str, RedisLog],
        *,
        health: RedisHealth,
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._running = running
        self._health = health
        self._to_mark: dict[RedisLog, None] = {}
        # By node:
        self._dirty = defaultdict[str, dict[RedisLog, None]](dict)
        self._chores = defaultdict[str, list[Command]](list)  # for the next pipeline
        self._flushers: dict[str, asyncio.Task[None]] = {}
        self._errors: dict[str, RedisAwayError] = {}  # why the current write is not stored yet

    def store(self, log: RedisLog) -> None:
        """`replica.STORE`, soon."""
        node = log.node or self._node_of(log)
        self._dirty[node][log] = None
        if node not in self._flushers:
            # Starts in the loop's next iteration, and includes all that is appended in this one.
            self._flushers[node] = asyncio.create_task(self._flush(node))

    def _node_of(self, log: RedisLog) -> str:
        log.node = node_name(self._redis, log.key)
        return log.node

    def mark(self, log: RedisLog) -> None:
        """`replica.MEND`, at the next heartbeat."""
        self._to_mark[log] = None

    async def mark_now(self, log: RedisLog) -> None:
        """As far as Redis can be reached."""
        await self._mark([log])

    def add_chores(self, *commands: Command) -> None:
        """Commands for the next pipelines. Each has a key as its first argument."""
        for command in commands:
            self._chores[node_name(self._redis, str(command[1]))].append(command)

    async def settle(self, log: RedisLog) -> None:
        """Wait until a log that is VERIFYING has been verified, or cannot be now."""
        # Does not wait for the flusher to end: while other responses run, it may never end.
        while log.replica.role is Role.VERIFYING and log.node in self._flushers:
            await asyncio.wait({self._flushers[log.node]}, timeout=_LOOK_S)

    async def flushed(self) -> None:
        """Wait until all appended entries are stored, or are visible without being stored."""
        while self._flushers:
            await asyncio.wait(self._flushers.values())

    async def mend(self) -> None:
        """Do what could not be done earlier. Called repeatedly, as it may not succeed at once.

        Raises:
            RedisAwayError: Redis is unavailable.
        """
        for log in self._running.values():
            if log.replica.pending & do.STORE:
                self.store(log)
        await self._mark(list(self._to_mark))
        chores = [command for node in list(self._chores) for command in self._chores.pop(node)]
        replies: Sequence[Any] = ()
        try:
            replies = await round_trip(self._redis, chores)
        finally:
            self._keep_failed(chores, replies)

    async def _mark(self, logs: Sequence[RedisLog]) -> None:
        results = await drive_all(self._redis, [mark_broken(log) for log in logs])
        for log, result in zip(logs, results, strict=True):
            if isinstance(result, int):
                log.do(result)
                if not log.replica.is_partial:
                    self._to_mark.pop(log, None)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _keep_failed(self, chores: Sequence[Command], replies: Sequence[Any]) -> None:
        for chore, reply in zip(chores, replies or [RedisAwayError()] * len(chores), strict=True):
            if isinstance(reply, RedisAwayError):
                self.add_chores(chore)

    # -- pipelines ----------------------------------------------------------------------------

    async def _flush(self, node: str) -> None:
        try:
            while batch := self._dirty.pop(node, None):
                await self._write(node, batch)
        finally:
            del self._flushers[node]

    async def _write(self, node: str, batch: Collection[RedisLog]) -> None:
        work = self._attempt_until_stored(node, batch)
        patience_s = self._health.patience_s(
            self._settings.ack_timeout_s, num_round_trips=_WRITING_ROUND_TRIPS
        )
        error: Exception | None = None
        try:
            await in_time(work, patience_s, num_ticks=_WRITING_TICKS)
        except RedisAwayError as late_error:
            error = self._errors.get(node, late_error)
        except Exception:  # a bug; the responses continue
            _LOG.exception("writing response logs failed")
        else:
            return
        finally:
            self._errors.pop(node, None)
        self._suspect(node)
        num_lost = 0
        for log in batch:
            was_resumable = log.is_resumable
            # What is stored as far as it goes is verified at the next heartbeat.
            log.do(log.replica.late(log.replica.epoch) & ~do.STORE)
            num_lost += was_resumable and not log.is_resumable
        if num_lost and error is not None:
            self._complain(num_lost, error)

    def _complain(self, num_logs: int, error: Exception) -> None:
        why = self._health.describe(error)
        if self._health.may_complain(f"writing: {why}"):
            text = "%s: %d responses continue without it and cannot be resumed (%s)"
            _LOG.warning(text, why, num_logs, detail_of(error))

    def _suspect(self, node: str) -> None:
        """Verify the logs at one node before more is added to them."""
        for log in self._running.values():
            if log.node == node:
                log.replica.unsure(log.replica.epoch)

    async def _attempt_until_stored(self, node: str, batch: Collection[RedisLog]) -> None:
        while batch:
            try:
                await self._attempt(node, batch)
            except RedisAwayError as error:
                self._errors[node] = error
                self._suspect(node)
            batch = [log for log in batch if log.replica.pending & do.STORE]
            if batch:
                await asyncio.sleep(_RETRY_S)

    async def _attempt(self, node: str, batch: Collection[RedisLog]) -> None:
        """Write each log's entries that are not stored."""
        is_unsure = False
        for log in batch:
            replica, known = log.replica, log.node
            if known != self._node_of(log):
                # The slot's new node may lack entries that the previous node confirmed.
                replica.unsure(replica.epoch)
            is_unsure |= replica.role is Role.VERIFYING
        if is_unsure:
            await drive(self._redis, verify(batch))
        chores = self._chores.pop(node, [])
        chores_replies: Sequence[Any] = ()
        try:
            steps = write(batch, max_bytes=self._settings.max_log_bytes, chores=chores)
            commands = next(steps, None)
            if commands is None:
                return
            replies = await lean_round_trip(self._redis, commands)
            try:
                steps.send(replies)
            except StopIteration as stop:
                chores_replies = stop.value
        finally:
            if chores:
                self._keep_failed(chores, chores_replies)
        if isinstance(replies[0], RedisAwayError):
            self._errors[node] = replies[0]
