"""Follows streams in Redis: responses of other gateways that have readers here, and commands from
other gateways. One blocking XREAD serves all of them, each from its own position.

In a cluster one XREAD cannot span slots. There the streams are polled every `_POLL_S`, with an
independent pipeline per node, which only costs that much latency.

A log is followed as long as it is referenced.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from penstock.gateway.storage.conversations.store import store_unavailable
from penstock.gateway.storage.redis.cluster import ClusterClient, node_name
from penstock.gateway.storage.redis.errors import RedisAwayError, detail_of, is_foreign
from penstock.gateway.storage.redis.health import FOREIGN_EVERY_S, RedisHealth
from penstock.gateway.storage.response_log.log import ResponseLog, left_behind
from penstock.gateway.storage.response_log.log_store import response_expired
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.response_log.redis_stream import (
    BrokenLogError,
    Command,
    StoredLog,
    StreamEntry,
    ask,
    log_key,
    read_key,
    round_trip,
)

_LOG = logging.getLogger(__name__)
_BLOCK_MS, _LEAST_BLOCK_MS = 500, 50  # shorter than any time-out of a connection
_POLL_S = 0.02
_RETRY_S = 0.1
_LONGEST_TRY_S = 2.0  # a longer try means that this process was stopped
_PAGE_ENTRIES = 512
_MARK_EVERY_S, _MARK_S = 5.0, 15  # the mark says that a log has readers


@dataclass(slots=True)
class _Followed:
    log: weakref.ref[ResponseLog]
    position: bytes


class StreamFollower:
    """Follows logs and the control stream.

    Args:
        control_key: the stream of commands to this gateway.
        on_control: called with the fields of each entry in it.
        health: notes errors.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        redis: Redis,
        settings: RedisLogSettings,
        control_key: str,
        on_control: Callable[[dict[bytes, bytes]], None],
        *,
        health: RedisHealth,
        clock: Callable[[], float],
    ) -> None:
        self._redis = redis
        self._settings = settings
        client: object = redis  # by its type, it is never a `ClusterClient`
        self._is_cluster = isinstance(client, ClusterClient)
        self._control_key = control_key.encode()
        self._control_position = b"0-0"
        self._on_control = on_control
        self._health = health
        self._clock = clock
        self._followed: dict[bytes, _Followed] = {}
        self._is_control_foreign = False  # its key holds something else
        self._is_blocked = False
        self._mark_due_s = 0.0
        self._away_s = defaultdict[str, float](float)  # by node: time of consecutive failed tries

    def find(self, response_id: str) -> ResponseLog | None:
        """The log, if it is already followed here."""
        followed = self._followed.get((log_key(response_id) or "").encode())
        return None if followed is None else followed.log()

    async def follow(self, stored: StoredLog) -> None:
        """Follow a log from the position up to which it was read.

        Raises:
            RedisAwayError: Redis is unavailable.
        """
        key = (log_key(stored.log.header.response_id) or "").encode()
        self._followed[key] = _Followed(weakref.ref(stored.log), stored.position)
        await self._mark_read([stored.log])
        if self._is_blocked and not self._is_cluster:
            # The blocking XREAD does not include it yet; a control entry makes XREAD return.
            wake: Command = ("XADD", self._control_key, "MAXLEN", "~", 1000, "*", b"wake", b"")
            await round_trip(self._redis, [wake])

    @property
    def has_readers(self) -> bool:
        """Whether a followed log is being read."""
        logs = [followed.log() for followed in self._followed.values()]
        return any(log is not None and log.readers for log in logs)

    def let_go(self) -> None:
        """Follow nothing any longer: readers get 503 `response_moved`."""
        for key, followed in list(self._followed.items()):
            log = followed.log()
            if log is not None:
                self._fail(key, left_behind(log.header.response_id))

    async def run(self) -> None:
        """Follow until cancelled. After an absence of Redis, each stream continues where it was."""
        if self._is_cluster:
            await self._poll_nodes()
            return
        while True:
            if positions := self._positions():
                await self._read("", positions, self._block)
            else:
                await asyncio.sleep(_RETRY_S)

    async def _poll_nodes(self) -> None:
        polls: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                await asyncio.sleep(_POLL_S)
                by_node = defaultdict[str, dict[bytes, bytes]](dict)
                for key, position in self._positions().items():
                    by_node[node_name(self._redis, key)][key] = position
                for node, positions in by_node.items():
                    if node not in polls or polls[node].done():
                        read = self._read(node, positions, self._poll)
                        polls[node] = asyncio.create_task(read)
        finally:
            for task in polls.values():
                task.cancel()

    async def _read(
        self,
        node: str,
        positions: dict[bytes, bytes],
        read: Callable[[dict[bytes, bytes]], Awaitable[list[tuple[bytes, list[StreamEntry]]]]],
    ) -> None:
        """Read the entries after some positions, once."""
        begun_s = self._clock()
        try:
            found = await read(positions)
        except RedisAwayError as error:
            _LOG.debug("cannot follow streams in Redis: %s", error)
            await asyncio.sleep(_RETRY_S)
            self._away_s[node] += min(self._clock() - begun_s, _LONGEST_TRY_S)
            if self._away_s[node] > self._settings.outage_s:
                for key in positions:
                    self._fail(key, store_unavailable(self._health.describe(error)))
        except Exception as error:  # foreign content or a bug; following must continue
            if is_foreign(error):
                await self._drop_foreign(positions)
            else:
                _LOG.exception("following streams failed")
            await asyncio.sleep(_RETRY_S)
        else:
            self._away_s[node] = 0.0
            for key, entries in found:
                self._add_entries(key, positions[key], entries)

    async def _drop_foreign(self, positions: dict[bytes, bytes]) -> None:
        """Follow no key any longer that is not a stream: one makes an XREAD of all keys fail."""
        try:
            found = await self._poll(positions)
        except RedisAwayError as error:
            _LOG.debug("cannot follow streams in Redis: %s", error)
            return
        self._is_control_foreign = self._control_key not in dict(found)

    async def check(self) -> None:
        """Fail the followed logs that Redis no longer has (they expired or were lost), and mark the
        others as read for their owners.

        Raises:
            RedisAwayError: Redis is unavailable.
        """
        if self._clock() >= self._mark_due_s:
            self._mark_due_s = self._clock() + _MARK_EVERY_S
            logs = [followed.log() for followed in self._followed.values()]
            await self._mark_read([log for log in logs if log is not None and log.readers])
        self._is_control_foreign = False  # perhaps
        keys = list(self._live())
        if not keys:
            return
        for key, exists in zip(
            keys, await round_trip(self._redis, [("EXISTS", key) for key in keys]), strict=True
        ):
            if exists == 0:
                self._fail(key)

    async def _mark_read(self, logs: Sequence[ResponseLog]) -> None:
        keys = [read_key(log.header.response_id) for log in logs]
        await round_trip(self._redis, [("SET", key, b"1", "EX", _MARK_S) for key in keys])

    async def _block(self, positions: dict[bytes, bytes]) -> list[tuple[bytes, list[StreamEntry]]]:
        # A distant Redis answers later than it stops blocking.
        block_ms = max(_BLOCK_MS - int(self._health.round_trip_s * 1e3), _LEAST_BLOCK_MS)
        self._is_blocked = True
        try:
            found = await ask(
                self._redis,
                *("XREAD", "COUNT", _PAGE_ENTRIES, "BLOCK", block_ms, "STREAMS"),
                *(*positions, *positions.values()),
            )
        finally:
            self._is_blocked = False
        return [(key, entries) for key, entries in found or ()]

    async def _poll(self, positions: dict[bytes, bytes]) -> list[tuple[bytes, list[StreamEntry]]]:
        replies = await round_trip(
            self._redis,
            [
                ("XRANGE", key, b"(" + position, "+", "COUNT", _PAGE_ENTRIES)
                for key, position in positions.items()
            ],
        )
        found = []
        for key, reply in zip(positions, replies, strict=True):
            if isinstance(reply, RedisAwayError):
                raise reply
            if isinstance(reply, Exception):
                name = key.decode()
                if not is_foreign(reply):
                    _LOG.error("cannot follow %s", name, exc_info=reply)
                elif self._health.may_complain(name, every_s=FOREIGN_EVERY_S):
                    _LOG.warning("cannot follow %s: it is no stream (%s)", name, detail_of(reply))
                self._fail(key)
            else:
                found.append((key, reply))
        return found

    def _positions(self) -> dict[bytes, bytes]:
        control = {} if self._is_control_foreign else {self._control_key: self._control_position}
        return {**control, **self._live()}

    def _live(self) -> dict[bytes, bytes]:
        """Key and position of every log that is still referenced."""
        return dict(self._drop_unread())

    def _drop_unread(self) -> Iterator[tuple[bytes, bytes]]:
        for key, followed in list(self._followed.items()):
            if followed.log() is None:
                del self._followed[key]
            else:
                yield key, followed.position

    def _add_entries(self, key: bytes, position: bytes, entries: list[StreamEntry]) -> None:
        if key == self._control_key:
            if position != self._control_position:
                return
            for entry_id, fields in entries:
                self._control_position = entry_id
                self._on_control(fields)
            return
        followed = self._followed.get(key)
        log = None if followed is None else followed.log()
        if followed is None or log is None or position != followed.position:
            return  # no longer followed, or already read by a poll of the slot's new node
        stored = StoredLog(log, followed.position)
        try:
            stored.add(entries)
        except BrokenLogError as error:
            _LOG.warning("cannot follow %s: %s", log.header.response_id, error)
            self._fail(key)
            return
        followed.position = stored.position
        if log.is_ended:
            del self._followed[key]

    def _fail(self, key: bytes, error: Exception | None = None) -> None:
        followed = self._followed.pop(key, None)
        log = None if followed is None else followed.log()
        if log is not None:
            log.fail(error or response_expired(log.header.response_id))
