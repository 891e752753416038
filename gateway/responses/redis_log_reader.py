"""Follows streams in Redis: the responses of other gateways that are read here, and what other
gateways tell this one. One blocking XREAD for all of them, each from an id of its own.

In a cluster one XREAD cannot span slots: there the streams are asked for in one pipeline every
`_POLL_S`, which costs that much latency and nothing else.

A followed log lives as long as somebody holds it; it is followed no longer.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from redis.asyncio import Redis, RedisCluster
from redis.exceptions import RedisError

from penstock.gateway.responses.log import ResponseLog
from penstock.gateway.responses.log_store import response_expired
from penstock.gateway.responses.redis_stream import (
    BrokenLogError,
    Command,
    StoredLog,
    StreamEntry,
    ask,
    log_key,
    round_trip,
    store_unavailable,
)

_LOG = logging.getLogger(__name__)
_BLOCK_MS = 500  # shorter than any time-out of a connection
_POLL_S = 0.02
_RETRY_S = 0.1
_PATIENCE_S = 10.0  # with a Redis that is away, before those who read are told
_PAGE_ENTRIES = 512


@dataclass(slots=True)
class _Followed:
    log: weakref.ref[ResponseLog]
    position: bytes


class StreamFollower:
    """Follows.

    Args:
        control_key: the stream of what this gateway is told.
        on_control: is given the fields of each entry there.
    """

    def __init__(
        self,
        redis: Redis,
        control_key: str,
        on_control: Callable[[dict[bytes, bytes]], None],
    ) -> None:
        self._redis = redis
        self._is_cluster = isinstance(redis, RedisCluster)
        self._control_key = control_key.encode()
        self._control_position = b"0-0"
        self._on_control = on_control
        self._followed: dict[bytes, _Followed] = {}
        self._is_blocked = False

    def find(self, response_id: str) -> ResponseLog | None:
        """A log that is followed here already."""
        followed = self._followed.get((log_key(response_id) or "").encode())
        return None if followed is None else followed.log()

    async def follow(self, stored: StoredLog) -> None:
        """Keep a log that was read up to a position up to date.

        Raises:
            RedisError: Redis does not answer.
        """
        key = (log_key(stored.log.header.response_id) or "").encode()
        self._followed[key] = _Followed(weakref.ref(stored.log), stored.position)
        if self._is_blocked and not self._is_cluster:
            # What waits in Redis does not know of it; an entry of its own makes it return.
            wake: Command = ("XADD", self._control_key, "MAXLEN", "~", 1000, "*", b"wake", b"")
            await round_trip(self._redis, [wake])

    async def run(self) -> None:
        """Until cancelled. Redis may come and go: every stream is followed on from where it was."""
        last_answer_s = time.monotonic()
        while True:
            try:
                found = await (self._poll() if self._is_cluster else self._block())
            except (RedisError, OSError) as error:
                _LOG.debug("cannot follow streams in Redis: %s", error)
                if time.monotonic() - last_answer_s > _PATIENCE_S:
                    for key in list(self._followed):
                        self._fail(key, store_unavailable())
                await asyncio.sleep(_RETRY_S)
            except Exception:  # a bug of ours; those who read must not wait for ever
                _LOG.exception("following streams failed")
                await asyncio.sleep(_RETRY_S)
            else:
                last_answer_s = time.monotonic()
                for key, entries in found:
                    self._take(key, entries)

    async def check(self) -> None:
        """Fail the followed logs that Redis has no more (they expired, or were lost).

        Raises:
            RedisError: Redis does not answer.
        """
        keys = list(self._live())
        if not keys:
            return
        for key, exists in zip(
            keys, await round_trip(self._redis, [("EXISTS", key) for key in keys]), strict=True
        ):
            if exists == 0:
                self._fail(key)

    async def _block(self) -> list[tuple[bytes, list[StreamEntry]]]:
        positions = {self._control_key: self._control_position, **self._live()}
        self._is_blocked = True
        try:
            found = await ask(
                self._redis,
                *("XREAD", "COUNT", _PAGE_ENTRIES, "BLOCK", _BLOCK_MS, "STREAMS"),
                *(*positions, *positions.values()),
            )
        finally:
            self._is_blocked = False
        return [(key, entries) for key, entries in found or ()]

    async def _poll(self) -> list[tuple[bytes, list[StreamEntry]]]:
        await asyncio.sleep(_POLL_S)
        positions = {self._control_key: self._control_position, **self._live()}
        replies = await round_trip(
            self._redis,
            [
                ("XRANGE", key, b"(" + position, "+", "COUNT", _PAGE_ENTRIES)
                for key, position in positions.items()
            ],
        )
        return [
            (key, entries)
            for key, entries in zip(positions, replies, strict=True)
            if isinstance(entries, list)
        ]

    def _live(self) -> dict[bytes, bytes]:
        """Key and position of every log that somebody still holds."""
        return dict(self._drop_unread())

    def _drop_unread(self) -> Iterator[tuple[bytes, bytes]]:
        for key, followed in list(self._followed.items()):
            if followed.log() is None:
                del self._followed[key]
            else:
                yield key, followed.position

    def _take(self, key: bytes, entries: list[StreamEntry]) -> None:
        if key == self._control_key:
            for entry_id, fields in entries:
                self._control_position = entry_id
                self._on_control(fields)
            return
        followed = self._followed.get(key)
        log = None if followed is None else followed.log()
        if followed is None or log is None:
            return
        stored = StoredLog(log, followed.position)
        try:
            stored.add(entries)
        except BrokenLogError as error:
            _LOG.warning("%s cannot be followed: %s", log.header.response_id, error)
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
