"""Opens the logs of new responses in Redis.

Those of one turn of the event loop, and those that come while others are on their way, go together:
a crowd of new responses needs one connection and a few round trips, and a loop that is busy with
the crowd is not late for each of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from redis.asyncio import Redis

from penstock.gateway.redis_errors import RedisAwayError
from penstock.gateway.responses.log_store import LogExistsError
from penstock.gateway.responses.redis_log_writer import OwnedLog
from penstock.gateway.responses.redis_ownership import Ownership
from penstock.gateway.responses.redis_patience import in_time
from penstock.gateway.responses.redis_stream import (
    Command,
    add_header,
    is_begun_by,
    is_refused_id,
    read_first,
    round_trip,
    store_unavailable,
)

_NUM_AT_ONCE = 256  # a header may hold a long prompt
_NUM_TICKS = 100  # of Redis' time: connecting alone may take twenty turns of the loop


@dataclass(slots=True, eq=False)
class _Opening:
    owned: OwnedLog
    header: Command
    done: asyncio.Future[None]
    failure: Exception | None = None


class LogOpener:
    """
    Args:
        timeout_s: what Redis has for a batch.
        age: gives a stream its time to live.
        give_up: told of a log that nobody will write, and that Redis may have begun.
    """

    def __init__(
        self,
        redis: Redis,
        ownership: Ownership,
        *,
        timeout_s: float,
        age: Callable[[str], Command],
        give_up: Callable[[OwnedLog], None],
    ) -> None:
        self._redis = redis
        self._ownership = ownership
        self._timeout_s = timeout_s
        self._age = age
        self._give_up = give_up
        self._waiting: deque[_Opening] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def open(self, owned: OwnedLog) -> None:
        """Have Redis take the log's header, and a note that this gateway runs it.

        Raises:
            StoreUnavailableError: Redis does not answer, or refuses.
            LogExistsError: another response has that id.
        """
        header = add_header(owned.key, owned.log.header)
        opening = _Opening(owned, header, asyncio.get_running_loop().create_future())
        self._waiting.append(opening)
        if self._sender is None:
            # It starts in the loop's next turn: all that is opened in this one goes along.
            self._sender = asyncio.create_task(self._send())
        try:
            await opening.done
        except asyncio.CancelledError:
            if not opening.done.cancelled():  # it was open already
                self._give_up(owned)
            raise

    async def _send(self) -> None:
        try:
            while self._waiting:
                num = min(len(self._waiting), _NUM_AT_ONCE)
                batch = [self._waiting.popleft() for _ in range(num)]
                await self._open_all([opening for opening in batch if not opening.done.done()])
        finally:
            self._sender = None

    async def _open_all(self, batch: list[_Opening]) -> None:
        try:
            await in_time(self._store(batch), self._timeout_s, num_ticks=_NUM_TICKS)
        except Exception as error:  # theirs, each of whom waits
            for opening in batch:
                opening.failure = error
        for opening in batch:
            self._settle(opening)

    async def _store(self, batch: list[_Opening]) -> None:
        """Raises: RedisAwayError: Redis cannot serve now."""
        # First the notes: a log without one would never be carried on.
        notes = [self._ownership.note(each.owned.response_id, each.owned.epoch) for each in batch]
        _take_failures(batch, await round_trip(self._redis, notes))
        noted = [opening for opening in batch if opening.failure is None]
        # And again: if this gateway stood still meanwhile, another has found a note without a log
        # and dropped it.
        commands = [
            command
            for each, note in zip(batch, notes, strict=True)
            if each.failure is None
            for command in (each.header, self._age(each.owned.key), note)
        ]
        _take_failures(noted, (await round_trip(self._redis, commands))[::3])
        await self._look_again([each for each in noted if is_refused_id(each.failure)])

    async def _look_again(self, refused: list[_Opening]) -> None:
        """Their headers were refused: each is there already, its acknowledgement lost; or
        another's is."""
        firsts = await round_trip(self._redis, [read_first(each.owned.key) for each in refused])
        forget: list[Command] = []
        for opening, first in zip(refused, firsts, strict=True):
            owned = opening.owned
            if isinstance(first, Exception):
                opening.failure = first
            elif is_begun_by(first, owned.log.header):
                opening.failure = None
            else:
                opening.failure = LogExistsError(owned.response_id)
                forget.append(self._ownership.forget(owned.response_id, owned.epoch))
        await round_trip(self._redis, forget)

    def _settle(self, opening: _Opening) -> None:
        owned, failure = opening.owned, opening.failure
        owned.is_begun = failure is None
        is_wanted = not opening.done.cancelled()
        if not isinstance(failure, LogExistsError) and (failure is not None or not is_wanted):
            self._give_up(owned)
        if not is_wanted:
            return
        if isinstance(failure, RedisAwayError):
            error = store_unavailable()
            error.__cause__ = failure
            opening.done.set_exception(error)
        elif failure is not None:
            opening.done.set_exception(failure)
        else:
            opening.done.set_result(None)


def _take_failures(openings: list[_Opening], replies: list[object]) -> None:
    for opening, reply in zip(openings, replies, strict=True):
        if isinstance(reply, Exception):
            opening.failure = reply
