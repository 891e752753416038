"""The entries of the responses that this gateway owns, on their way into Redis.

Whatever was appended in one turn of the event loop leaves in one pipeline, and is seen when Redis
has confirmed it: a round trip of latency, shared by all. While one pipeline is under way the next
one gathers. What Redis does not confirm in time is shown all the same, and its log is no longer
resumable: it goes on without Redis, which is told so when it answers again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from penstock.gateway.responses.log import ResponseLog, ResponseMovedError
from penstock.gateway.responses.redis_patience import in_time
from penstock.gateway.responses.redis_stream import (
    Command,
    add_broken,
    add_entry,
    is_begun_by,
    is_refused_id,
    lean_round_trip,
    parse_id,
    read_first,
    read_last,
    round_trip,
)

_LOG = logging.getLogger(__name__)
_NUM_TICKS = 5  # of the time that Redis has for an answer
_RETRY_S = 0.005


@dataclass(slots=True, eq=False, kw_only=True)
class OwnedLog:
    """A log that this gateway writes.

    Attributes:
        num_stored: entries that Redis confirmed.
        confirmed: number of the last of them under this epoch; 0: none but the fence.
        num_bytes: of entries sent.
        is_suspect: what Redis has of it is not known for sure.
        is_begun: Redis has its header, and no other's under its id.
    """

    log: ResponseLog
    key: str
    epoch: int
    num_stored: int = 0
    confirmed: int = 0
    num_bytes: int = 0
    is_suspect: bool = False
    is_begun: bool = True

    @property
    def response_id(self) -> str:
        return self.log.header.response_id

    @property
    def is_stored(self) -> bool:
        return self.num_stored == len(self.log.entries)

    def confirm(self, num_entries: int) -> None:
        """Redis has the first `num_entries`."""
        if num_entries > self.num_stored:
            self.num_stored = num_entries
            self.confirmed = self.log.entries[num_entries - 1].last_number
            self.log.publish(num_entries)


class LogWriter:
    """Writes logs.

    Args:
        ack_timeout_s: how long Redis may take to confirm an entry.
        max_log_bytes: of one log; a longer one is not resumable.
        on_done: told the id of a response that is not owned any more: it ended, or was lost.
        farewell: what is left to do in Redis when a log is not owned any more.
    """

    def __init__(
        self,
        redis: Redis,
        *,
        ack_timeout_s: float,
        max_log_bytes: int,
        on_done: Callable[[str], None],
        farewell: Callable[[OwnedLog], Sequence[Command]],
    ) -> None:
        self.owned: dict[str, OwnedLog] = {}
        self._redis = redis
        self._ack_timeout_s = ack_timeout_s
        self._max_log_bytes = max_log_bytes
        self._on_done = on_done
        self._farewell = farewell
        self._dirty: dict[str, OwnedLog] = {}
        self._torn: dict[str, OwnedLog] = {}  # Redis does not know yet
        self._chores: list[Command] = []  # farewells that go with the next pipeline
        self._flusher: asyncio.Task[None] | None = None

    def own(self, owned: OwnedLog) -> None:
        self.owned[owned.response_id] = owned

    def appended(self, log: ResponseLog) -> None:
        """See that the log's last entry is stored, and then seen."""
        response_id = log.header.response_id
        owned = self.owned.get(response_id)
        if owned is not None and owned.log is log:
            self._dirty[response_id] = owned
            self._start_flush()
        elif log.failure is None:
            log.publish(len(log.entries))
            if log.is_ended:
                self._on_done(response_id)

    async def flushed(self) -> None:
        """Wait until all that was appended is stored, or was shown without."""
        while self._flusher is not None:
            await asyncio.shield(self._flusher)

    def suspect_all(self) -> None:
        """Redis was away, or this gateway: look at what is stored before anything is added."""
        for owned in self.owned.values():
            owned.is_suspect = True

    def give_up(self, owned: OwnedLog) -> None:
        """Go on without Redis."""
        self.owned.pop(owned.response_id, None)
        self._torn[owned.response_id] = owned
        owned.log.is_resumable = False
        owned.log.publish(len(owned.log.entries))
        if owned.log.is_ended:
            self._on_done(owned.response_id)

    def let_go(self) -> None:
        """Leave what is owned to other gateways, as Redis has it: from now on nothing is added,
        least of all an end because this gateway goes down."""
        for owned in list(self.owned.values()):
            self._part_with(owned)

    async def settle(self) -> None:
        """Look after what an absence of Redis left behind: logs whose state is not known, such as
        are broken, farewells. Repeated until it is done.

        Raises:
            RedisError: Redis does not answer.
        """
        suspects = {key: owned for key, owned in self.owned.items() if owned.is_suspect}
        if suspects:
            self._dirty.update(suspects)
            self._start_flush()
        await self._let_go_of_others()
        chores = self._chores[:]
        torn = [owned for owned in self._torn.values() if owned.is_begun]
        marks = [add_broken(owned.key, owned.epoch) for owned in torn]
        if marks or chores:
            replies = await round_trip(self._redis, [*marks, *chores])
            del self._chores[: len(chores)]
            await self._see_marks(torn, replies[: len(torn)])

    async def _let_go_of_others(self) -> None:
        """Of what this gateway could not begin for sure: another may have."""
        unsure = [owned for owned in self._torn.values() if not owned.is_begun]
        firsts = await round_trip(self._redis, [read_first(owned.key) for owned in unsure])
        for owned, first in zip(unsure, firsts, strict=True):
            if isinstance(first, Exception):
                continue
            if is_begun_by(first, owned.log.header):
                owned.is_begun = True
            else:
                del self._torn[owned.response_id]
                self._chores += self._farewell(owned)

    async def _see_marks(self, torn: list[OwnedLog], replies: list[Any]) -> None:
        marked = []
        for owned, reply in zip(torn, replies, strict=True):
            if not isinstance(reply, Exception) or is_refused_id(reply):
                marked.append(owned)
        lasts = await round_trip(self._redis, [read_last(owned.key) for owned in marked])
        for owned, last in zip(marked, lasts, strict=True):
            if not isinstance(last, Exception):
                del self._torn[owned.response_id]
                self._chores += self._farewell(owned)
                if last and parse_id(last[0][0])[0] > owned.epoch:
                    self._lose(owned)

    # -- one pipeline after the other ---------------------------------------------------------

    def _start_flush(self) -> None:
        if self._flusher is None:
            # It starts in the loop's next turn: all that is appended in this one goes along.
            self._flusher = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        try:
            while self._dirty:
                batch, self._dirty = list(self._dirty.values()), {}
                await self._write(batch)
        finally:
            self._flusher = None

    async def _write(self, batch: list[OwnedLog]) -> None:
        work = self._attempt_until_stored(batch)
        try:
            await in_time(work, self._ack_timeout_s, num_ticks=_NUM_TICKS)
        except TimeoutError:
            pass
        except Exception:  # a bug of ours; the responses go on
            _LOG.exception("writing response logs failed")
        else:
            return
        late = [owned for owned in batch if self._is_owned(owned) and not owned.is_stored]
        if late:
            _LOG.warning("Redis does not answer: %d responses go on without it", len(late))
        self.suspect_all()
        for owned in late:
            self.give_up(owned)

    async def _attempt_until_stored(self, batch: list[OwnedLog]) -> None:
        while batch:
            try:
                batch = await self._attempt(batch)
            except (RedisError, OSError):
                self.suspect_all()
            if batch:
                await asyncio.sleep(_RETRY_S)

    async def _attempt(self, batch: list[OwnedLog]) -> list[OwnedLog]:
        """Write what is not stored of each log; those for which that has to be tried again."""
        suspects = [owned for owned in batch if owned.is_suspect]
        if suspects:
            await self._verify(suspects)
        commands: list[Command] = []
        parts: list[tuple[OwnedLog, int, int]] = []  # a log, its commands' end, its entries'
        for owned in batch:
            if self._is_owned(owned) and not owned.is_stored:
                commands += self._commands(owned)
                parts.append((owned, len(commands), len(owned.log.entries)))
        if not commands:
            return []
        chores = self._chores[:]
        replies = await lean_round_trip(self._redis, [*commands, *chores])
        del self._chores[: len(chores)]
        begin, again = 0, []
        for owned, end, num_entries in parts:
            if not self._confirmed(owned, replies[begin:end], num_entries):
                again.append(owned)
            begin = end
        return again

    def _commands(self, owned: OwnedLog) -> Sequence[Command]:
        entries = owned.log.entries[owned.num_stored :]
        commands = [add_entry(owned.key, owned.epoch, entry) for entry in entries]
        owned.num_bytes += sum(len(command[-1]) for command in commands)
        return commands

    def _confirmed(self, owned: OwnedLog, replies: list[Any], num_entries: int) -> bool:
        """Take Redis' word for one log; False if it must be asked again."""
        if not self._is_owned(owned):
            return True
        failures = [reply for reply in replies if isinstance(reply, Exception)]
        if None in replies or owned.num_bytes > self._max_log_bytes:
            self.give_up(owned)  # it is not there any more, or has become too long
        elif failures:
            # An id that is not above the last one: the entry is there already, its
            # acknowledgement lost; or another gateway's fence is. Else it cannot be written now.
            owned.is_suspect = True
            if not isinstance(replies[-1], Exception) and not all(map(is_refused_id, failures)):
                self.give_up(owned)  # what follows was stored, and it was not
            return not self._is_owned(owned)
        else:
            owned.confirm(num_entries)
            self._finish_if_ended(owned)
        return True

    async def _verify(self, suspects: list[OwnedLog]) -> None:
        """Find out what Redis has of logs."""
        lasts = await round_trip(self._redis, [read_last(owned.key) for owned in suspects])
        for owned, last in zip(suspects, lasts, strict=True):
            if isinstance(last, Exception) or not self._is_owned(owned):
                continue
            epoch, number = parse_id(last[0][0]) if last else (0, 0)
            if epoch > owned.epoch:
                self._lose(owned)
            elif epoch < owned.epoch or number < owned.confirmed or not self._take(owned, number):
                self.give_up(owned)  # Redis has lost some of it
            else:
                owned.is_suspect = False
                self._finish_if_ended(owned)

    def _take(self, owned: OwnedLog, number: int) -> bool:
        """Count as stored what ends with `number`; False if no entry does."""
        if number == owned.confirmed:
            return True
        entries = owned.log.entries
        for index in range(owned.num_stored, len(entries)):
            if entries[index].last_number == number:
                owned.confirm(index + 1)
                return True
        return False

    def _is_owned(self, owned: OwnedLog) -> bool:
        return self.owned.get(owned.response_id) is owned

    def _finish_if_ended(self, owned: OwnedLog) -> None:
        if owned.log.is_ended:
            del self.owned[owned.response_id]
            self._chores += self._farewell(owned)
            self._on_done(owned.response_id)

    def _lose(self, owned: OwnedLog) -> None:
        """Another gateway has fenced it."""
        _LOG.warning("another gateway has taken %s over", owned.response_id)
        self._part_with(owned)

    def _part_with(self, owned: OwnedLog) -> None:
        self.owned.pop(owned.response_id, None)
        self._on_done(owned.response_id)
        owned.log.fail(ResponseMovedError(owned.response_id))
