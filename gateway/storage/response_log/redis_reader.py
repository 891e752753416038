"""Follows streams in Redis: responses of other gateways that have readers here, and commands from
other gateways. One blocking XREAD serves all of them, each from its own position.

In a cluster one XREAD cannot span slots. There the streams are polled every `_POLL_S`, with an
independent pipeline per node, which only costs that much latency.

A log is followed as long as it is referenced, and another gateway runs its response.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence

from redis.asyncio import Redis

from penstock.gateway.storage.conversations.store import store_unavailable
from penstock.gateway.storage.redis.cluster import ClusterClient, node_name
from penstock.gateway.storage.redis.errors import RedisAwayError, detail_of, is_foreign
from penstock.gateway.storage.redis.health import FOREIGN_EVERY_S, RedisHealth
from penstock.gateway.storage.redis.trips import Command, ask, round_trip
from penstock.gateway.storage.response_log.log import left_behind, response_expired
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.response_log.redis_stream import (
    RedisLog,
    StreamEntry,
    parse_id,
    read_key,
)
from penstock.gateway.storage.response_log.replica import BrokenLogError, Role

_LOG = logging.getLogger(__name__)
_BLOCK_MS, _LEAST_BLOCK_MS = 500, 50  # shorter than any time-out of a connection
_POLL_S = 0.02
_RETRY_S = 0.1
_LONGEST_TRY_S = 2.0  # a longer try means that this process was frozen
_PAGE_ENTRIES = 512
_MARK_EVERY_S, _MARK_S = 5.0, 15  # the mark says that a log has readers


class StreamFollower:
    """Follows logs and the control stream.

    Args:
        control_key: the stream of commands to this gateway.
        health: notes errors.
        clock: monotonic seconds.

    Attributes:
        commands: the fields of each entry in the control stream, for whoever obeys them.
    """

    def __init__(
        self,
        redis: Redis,
        settings: RedisLogSettings,
        control_key: str,
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
        self._health = health
        self._clock = clock
        self.commands: asyncio.Queue[dict[bytes, bytes]] = asyncio.Queue()
        self._followed: dict[bytes, weakref.ref[RedisLog]] = {}
        self._new: list[RedisLog] = []  # of which nobody knows yet that they have readers here
        self._is_control_foreign = False  # its key holds something else
        self._is_blocked = False
        self._mark_due_s = 0.0
        self._away_s = defaultdict[str, float](float)  # by node: time of consecutive failed tries

    def follow(self, log: RedisLog, *, is_read: bool) -> None:
        """Follow a log from its position.

        Args:
            is_read: it has, or is to have, a reader: `announce` it.
        """
        self._followed[log.key.encode()] = weakref.ref(log)
        if is_read:
            self._new.append(log)

    async def announce(self) -> None:
        """Mark new logs as read for the gateways that run them, and begin to read them at once.

        Raises:
            RedisAwayError: Redis is unavailable.
        """
        new, self._new = self._new, []
        if not new:
            return
        await self._mark_read(new)
        if self._is_blocked and not self._is_cluster:
            # The blocking XREAD does not include it yet; a control entry makes XREAD return.
            wake: Command = ("XADD", self._control_key, "MAXLEN", "~", 1000, "*", b"wake", b"")
            await round_trip(self._redis, [wake])

    @property
    def has_readers(self) -> bool:
        """Whether a followed log is being read."""
        return any(log.readers for log in self._live().values())

    def let_go(self) -> None:
        """Follow nothing any longer: readers get 503 `response_moved`."""
        for key, log in self._live().items():
            self._fail(key, left_behind(log.response_id))

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
            await self._mark_read([log for log in self._live().values() if log.readers])
        self._is_control_foreign = False  # perhaps
        keys = list(self._live())
        if not keys:
            return
        for key, exists in zip(
            keys, await round_trip(self._redis, [("EXISTS", key) for key in keys]), strict=True
        ):
            if exists == 0:
                self._fail(key)

    async def _mark_read(self, logs: Sequence[RedisLog]) -> None:
        keys = [read_key(log.response_id) for log in logs]
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
        positions = {} if self._is_control_foreign else {self._control_key: self._control_position}
        for key, log in self._live().items():
            positions[key] = b"%d-%d" % log.replica.position
        return positions

    def _live(self) -> dict[bytes, RedisLog]:
        """Every log, by its key, that is to be followed on."""
        live = {}
        for key, reference in list(self._followed.items()):
            log = reference()
            if log is None or log.replica.role is not Role.FOLLOWED:
                del self._followed[key]
            else:
                live[key] = log
        return live

    def _add_entries(self, key: bytes, position: bytes, entries: list[StreamEntry]) -> None:
        if key == self._control_key:
            if position == self._control_position:
                for entry_id, fields in entries:
                    self._control_position = entry_id
                    self.commands.put_nowait(fields)
            return
        reference = self._followed.get(key)
        log = None if reference is None else reference()
        if log is None:
            return
        try:
            log.receive(parse_id(position), entries)
        except BrokenLogError as error:
            _LOG.warning("cannot follow %s: %s", log.response_id, error)
            self._fail(key)

    def _fail(self, key: bytes, error: Exception | None = None) -> None:
        reference = self._followed.pop(key, None)
        log = None if reference is None else reference()
        if log is not None:
            log.fail(error or response_expired(log.response_id))
