"""Writes the logs of this gateway's responses to Redis: `LogOpener` creates them, `LogWriter`
appends.

All headers of one iteration of the event loop, and those that arrive while others are in flight,
are sent together. So a burst of new responses needs one connection and a few round trips.

All entries appended in one iteration of the event loop are sent in one pipeline (with a cluster,
one independent pipeline per node), and become visible when Redis has confirmed them. The latency of
a round trip is shared by all, and the next pipeline is filled while one is in flight. Entries that
Redis does not confirm in time become visible nevertheless, and their log is no longer resumable: it
continues without Redis, and is marked as broken when Redis answers again. A distant Redis gets the
time of some round trips.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from penstock.gateway.storage.conversations.store import UnreadableDataError, store_unavailable
from penstock.gateway.storage.redis.cluster import node_name
from penstock.gateway.storage.redis.errors import RedisAwayError, detail_of, is_foreign
from penstock.gateway.storage.redis.health import FOREIGN_EVERY_S, RedisHealth
from penstock.gateway.storage.response_log.log import ResponseLog, ResponseMovedError
from penstock.gateway.storage.response_log.log_store import LogExistsError, response_expired
from penstock.gateway.storage.response_log.redis_ownership import Ownership
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.response_log.redis_stream import (
    Command,
    add_broken,
    add_entry,
    add_header,
    ask,
    in_time,
    is_begun_by,
    is_refused_id,
    lean_round_trip,
    parse_id,
    read_first,
    read_key,
    read_last,
    round_trip,
)
from penstock.gateway.wake_ups import WRITES

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
    owned: OwnedLog
    header: Command
    done: asyncio.Future[None]
    failure: Exception | None = None


class LogOpener:
    """Creates the logs of new responses.

    Args:
        age: the command that sets a stream's time to live.
        give_up: called with a log that Redis may have, but that will not be written.
        health: notes errors.
    """

    def __init__(
        self,
        redis: Redis,
        settings: RedisLogSettings,
        ownership: Ownership,
        *,
        age: Callable[[str], Command],
        give_up: Callable[[OwnedLog], None],
        health: RedisHealth,
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._ownership = ownership
        self._age = age
        self._give_up = give_up
        self._health = health
        self._waiting: deque[_Opening] = deque()
        self._sender: asyncio.Task[None] | None = None

    async def open(self, owned: OwnedLog) -> None:
        """Store the log's header, and a note that this gateway owns it.

        Raises:
            StoreUnavailableError: Redis is unavailable.
            LogExistsError: another response has this id.
        """
        header = add_header(owned.key, owned.log.header)
        owned.num_bytes = len(header[-1])
        opening = _Opening(owned, header, asyncio.get_running_loop().create_future())
        self._waiting.append(opening)
        if self._sender is None:
            # Starts in the loop's next iteration, and includes all that is opened in this one.
            self._sender = asyncio.create_task(self._send())
        try:
            await opening.done
        except asyncio.CancelledError:
            if not opening.done.cancelled():  # the log was already open
                self._give_up(owned)
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
        try:
            await in_time(self._store(batch), timeout_s, num_ticks=_OPENING_TICKS)
        except Exception as error:  # raised to each waiting caller
            for opening in batch:
                opening.failure = error
        for opening in batch:
            self._close_opening(opening)

    async def _store(self, batch: list[_Opening]) -> None:
        """Raises: RedisAwayError: Redis is unavailable."""
        # First the notes: a log without a note would never be taken over.
        notes = [self._ownership.note(each.owned.response_id, each.owned.epoch) for each in batch]
        _note_failures(batch, await round_trip(self._redis, notes))
        noted = [opening for opening in batch if opening.failure is None]
        # Again with the headers: if this gateway was stopped in between, another may have found a
        # note without a log and removed it.
        commands = [
            command
            for each, note in zip(batch, notes, strict=True)
            if each.failure is None
            for command in (each.header, self._age(each.owned.key), note)
        ]
        _note_failures(noted, (await round_trip(self._redis, commands))[::3])
        await self._look_again(
            [each for each in noted if each.failure is not None and _is_taken(each.failure)]
        )

    async def _look_again(self, refused: list[_Opening]) -> None:
        """Check refused headers: either Redis already has the header, and the reply was lost, or it
        has another response's, or something else."""
        firsts = await round_trip(self._redis, [read_first(each.owned.key) for each in refused])
        forget: list[Command] = []
        for opening, first in zip(refused, firsts, strict=True):
            owned = opening.owned
            if isinstance(first, Exception) and not is_foreign(first):
                opening.failure = first
            elif not isinstance(first, Exception) and is_begun_by(first, owned.log.header):
                opening.failure = None
            else:
                opening.failure = LogExistsError(owned.response_id)
                forget.append(self._ownership.forget(owned.response_id, owned.epoch))
        await round_trip(self._redis, forget)

    def _close_opening(self, opening: _Opening) -> None:
        owned, failure = opening.owned, opening.failure
        owned.is_begun = failure is None
        is_wanted = not opening.done.cancelled()
        if not isinstance(failure, LogExistsError) and (failure is not None or not is_wanted):
            self._give_up(owned)
        if not is_wanted:
            return
        if isinstance(failure, RedisAwayError):
            error = store_unavailable(self._health.describe(failure))
            error.__cause__ = failure
            opening.done.set_exception(error)
        elif failure is not None and is_foreign(failure):
            if self._health.may_complain("notes", every_s=FOREIGN_EVERY_S):
                _LOG.warning("cannot note responses in Redis (%s)", detail_of(failure))
            opening.done.set_exception(UnreadableDataError("the list of running responses"))
        elif failure is not None:
            opening.done.set_exception(failure)
        else:
            opening.done.set_result(None)


def _is_taken(failure: Exception) -> bool:
    return is_refused_id(failure) or is_foreign(failure)


def _note_failures(openings: list[_Opening], replies: list[object]) -> None:
    for opening, reply in zip(openings, replies, strict=True):
        if isinstance(reply, Exception):
            opening.failure = reply


@dataclass(slots=True, eq=False, kw_only=True)
class OwnedLog:
    """A log that this gateway writes.

    Attributes:
        num_stored: entries that Redis has confirmed.
        confirmed: number of the last of them under this epoch; 0: only the fence.
        num_bytes: of header and entries sent.
        is_suspect: it is uncertain which entries Redis has.
        is_begun: Redis has this log's header, and not another's under its id.
        node: the cluster's node that confirmed the entries.
    """

    log: ResponseLog
    key: str
    epoch: int
    num_stored: int = 0
    confirmed: int = 0
    num_bytes: int = 0
    is_suspect: bool = False
    is_begun: bool = True
    node: str = ""

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
        on_done: called with a log that is no longer owned: it ended or was lost.
        farewell: the commands to send to Redis when a log is no longer owned.
        health: tells the distance of Redis; notes errors.
    """

    def __init__(
        self,
        redis: Redis,
        settings: RedisLogSettings,
        *,
        on_done: Callable[[ResponseLog], None],
        farewell: Callable[[OwnedLog], Sequence[Command]],
        health: RedisHealth,
    ) -> None:
        self.owned: dict[str, OwnedLog] = {}
        self._redis = redis
        self._settings = settings
        self._on_done = on_done
        self._farewell = farewell
        self._health = health
        self._torn: dict[str, OwnedLog] = {}  # logs without a broken mark in Redis yet
        # By node:
        self._dirty = defaultdict[str, dict[str, OwnedLog]](dict)
        self._chores = defaultdict[str, list[Command]](list)  # for the next pipeline
        self._flushers: dict[str, asyncio.Task[None]] = {}
        self._errors: dict[str, RedisAwayError] = {}  # why the current write is not stored yet

    def own(self, owned: OwnedLog) -> None:
        owned.node = node_name(self._redis, owned.key)
        before = self.owned.get(owned.response_id)
        if before is not None:  # another gateway had it in between, unnoticed by this one
            self._lose(before)
        self.owned[owned.response_id] = owned

    def appended(self, log: ResponseLog) -> None:
        """Store the log's last entry, then make it visible."""
        response_id = log.header.response_id
        owned = self.owned.get(response_id)
        if owned is not None and owned.log is log:
            self._flush_soon(owned)
        elif log.failure is None:
            log.publish(len(log.entries))
            if log.is_ended:
                self._on_done(log)

    async def verify(self, log: ResponseLog, *, is_superseded: bool) -> None:
        """Check whether another gateway has fenced the log."""
        owned = self.owned.get(log.header.response_id)
        if owned is not None and owned.log is log:
            owned.is_suspect = True
            self._flush_soon(owned)
            # Does not wait for the flusher to end: while other responses run, it may never end.
            while owned.is_suspect and self._is_owned(owned) and owned.node in self._flushers:
                await asyncio.wait({self._flushers[owned.node]}, timeout=_LOOK_S)
        if is_superseded and not log.is_resumable and log.failure is None:
            # It continued without Redis, so another owner's log may differ from what was shown.
            self._on_done(log)
            log.fail(response_expired(log.header.response_id))

    async def is_read_elsewhere(self, log: ResponseLog) -> bool:
        try:
            return bool(await ask(self._redis, "EXISTS", read_key(log.header.response_id)))
        except RedisAwayError:
            return True  # unknown; assume that it is read

    async def flushed(self) -> None:
        """Wait until all appended entries are stored, or are visible without being stored."""
        while self._flushers:
            await asyncio.wait(self._flushers.values())

    def suspect_all(self) -> None:
        """Verify every log before more is added: Redis was unavailable, or this gateway stopped."""
        for owned in self.owned.values():
            owned.is_suspect = True

    def _suspect(self, node: str) -> None:
        """Verify the logs at one node before more is added to them."""
        for owned in self.owned.values():
            owned.is_suspect |= owned.node == node

    def give_up(self, owned: OwnedLog) -> None:
        """Continue a log without Redis."""
        self._disown(owned)
        self._torn[owned.response_id] = owned
        owned.log.is_resumable = False
        owned.log.publish(len(owned.log.entries))
        if owned.log.is_ended:
            self._on_done(owned.log)

    def let_go(self) -> None:
        """Leave the owned logs to other gateways. From now on nothing is added to them, in
        particular no end because this gateway is stopping."""
        for owned in list(self.owned.values()):
            self._part_with(owned)

    async def repair(self) -> None:
        """Clean up after an absence of Redis: verify suspect logs, mark broken ones, send delayed
        farewells. Called repeatedly, as not everything may succeed at once.

        Raises:
            RedisAwayError: Redis is unavailable.
        """
        for owned in self.owned.values():
            if owned.is_suspect:
                self._flush_soon(owned)
        await self._let_go_of_others()
        torn = [owned for owned in self._torn.values() if owned.is_begun]
        marks = [add_broken(owned.key, owned.epoch) for owned in torn]
        await self._see_marks(torn, await round_trip(self._redis, marks))
        chores = [command for node in list(self._chores) for command in self._chores.pop(node)]
        await self._send_with_chores(round_trip, [], chores)

    async def _let_go_of_others(self) -> None:
        """Find out who created the logs for which this gateway's header was not confirmed."""
        unsure = [owned for owned in self._torn.values() if not owned.is_begun]
        firsts = await round_trip(self._redis, [read_first(owned.key) for owned in unsure])
        for owned, first in zip(unsure, firsts, strict=True):
            if isinstance(first, RedisAwayError):
                continue
            if not isinstance(first, Exception) and is_begun_by(first, owned.log.header):
                owned.is_begun = True
            else:
                del self._torn[owned.response_id]
                self._part_in_redis(owned)

    async def _see_marks(self, torn: list[OwnedLog], replies: list[Any]) -> None:
        marked = [
            owned
            for owned, reply in zip(torn, replies, strict=True)
            if not isinstance(reply, RedisAwayError)
        ]
        lasts = await round_trip(self._redis, [read_last(owned.key) for owned in marked])
        for owned, last in zip(marked, lasts, strict=True):
            if not isinstance(last, RedisAwayError):
                del self._torn[owned.response_id]
                self._part_in_redis(owned)
                if (
                    last
                    and not isinstance(last, Exception)
                    and parse_id(last[0][0])[0] > owned.epoch
                ):
                    self._lose(owned)

    # -- pipelines ----------------------------------------------------------------------------

    def _flush_soon(self, owned: OwnedLog) -> None:
        node = owned.node
        self._dirty[node][owned.response_id] = owned
        if node not in self._flushers:
            # Starts in the loop's next iteration, and includes all that is appended in this one.
            self._flushers[node] = asyncio.create_task(self._flush(node))

    async def _flush(self, node: str) -> None:
        try:
            while batch := self._dirty.pop(node, None):
                await self._write(node, list(batch.values()))
        finally:
            del self._flushers[node]

    async def _write(self, node: str, batch: list[OwnedLog]) -> None:
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
        late = [owned for owned in batch if self._is_owned(owned) and not owned.is_stored]
        if late and error is not None:
            self._complain(len(late), error)
        self._suspect(node)
        for owned in late:
            self.give_up(owned)

    def _complain(self, num_logs: int, error: Exception) -> None:
        why = self._health.describe(error)
        if self._health.may_complain(f"writing: {why}"):
            text = "%s: %d responses continue without it and cannot be resumed (%s)"
            _LOG.warning(text, why, num_logs, detail_of(error))

    async def _attempt_until_stored(self, node: str, batch: list[OwnedLog]) -> None:
        while batch:
            try:
                batch = await self._attempt(node, batch)
            except RedisAwayError as error:
                self._errors[node] = error
                self._suspect(node)
            if batch:
                await asyncio.sleep(_RETRY_S)

    async def _attempt(self, node: str, batch: list[OwnedLog]) -> list[OwnedLog]:
        """Write each log's entries that are not stored; returns the logs to try again."""
        for owned in batch:
            if owned.node != (owned_by := node_name(self._redis, owned.key)):
                # The slot's new node may lack entries that the previous node confirmed.
                owned.node, owned.is_suspect = owned_by, True
        suspects = [owned for owned in batch if owned.is_suspect]
        if suspects:
            await self._verify(suspects)
        again: list[OwnedLog] = []
        commands: list[Command] = []
        parts: list[tuple[OwnedLog, int, int]] = []  # log, end of its commands, number of entries
        for owned in batch:
            if not self._is_owned(owned) or owned.is_stored:
                continue
            if owned.is_suspect:  # it may have a gap, so nothing is added
                again.append(owned)
            else:
                commands += self._commands(owned)
                parts.append((owned, len(commands), len(owned.log.entries)))
        if not commands:
            return again
        chores = self._chores.pop(node, [])
        replies = await self._send_with_chores(lean_round_trip, commands, chores)
        begin = 0
        with WRITES:  # readers get what is confirmed
            for owned, end, num_entries in parts:
                if not self._confirmed(owned, replies[begin:end], num_entries):
                    again.append(owned)
                begin = end
        return again

    async def _send_with_chores(
        self,
        send: Callable[[Redis, list[Command]], Awaitable[list[Any]]],
        commands: list[Command],
        chores: list[Command],
    ) -> list[Any]:
        """Send commands and chores; returns the commands' replies. Failed chores are kept."""
        replies: list[Any] = []
        try:
            replies = await send(self._redis, [*commands, *chores])
        finally:
            done = replies[len(commands) :] or [RedisAwayError()] * len(chores)
            for chore, reply in zip(chores, done, strict=True):
                if isinstance(reply, RedisAwayError):
                    self._add_chore(chore)
        return replies

    def _part_in_redis(self, owned: OwnedLog) -> None:
        for chore in self._farewell(owned):
            self._add_chore(chore)

    def _add_chore(self, chore: Command) -> None:
        self._chores[node_name(self._redis, str(chore[1]))].append(chore)

    def _commands(self, owned: OwnedLog) -> Sequence[Command]:
        entries = owned.log.entries[owned.num_stored :]
        commands = [add_entry(owned.key, owned.epoch, entry) for entry in entries]
        owned.num_bytes += sum(len(command[-1]) for command in commands)
        return commands

    def _confirmed(self, owned: OwnedLog, replies: list[Any], num_entries: int) -> bool:
        """Evaluate the replies for one log; False if it must be tried again."""
        if not self._is_owned(owned):
            return True
        failures = [reply for reply in replies if isinstance(reply, Exception)]
        mistake = next(filter(_is_mistake, failures), None)
        if mistake is not None:
            self._give_up_for(owned, mistake)
        elif None in replies or owned.num_bytes > self._settings.max_log_bytes:
            self.give_up(owned)  # the stream no longer exists, or is too long
        elif failures:
            # A refused id means that Redis already has the entry, whose reply was lost, or has
            # another gateway's fence. Other failures mean that it cannot be written now.
            owned.is_suspect = True
            for failure in failures:
                if isinstance(failure, RedisAwayError):
                    self._errors[owned.node] = failure
            if not isinstance(replies[-1], Exception) and not all(map(is_refused_id, failures)):
                self.give_up(owned)  # an entry is missing, but later ones were stored
            return not self._is_owned(owned)
        else:
            owned.confirm(num_entries)
            self._finish_if_ended(owned)
        return True

    async def _verify(self, suspects: list[OwnedLog]) -> None:
        """Find out which entries of the logs Redis has."""
        lasts = await round_trip(self._redis, [read_last(owned.key) for owned in suspects])
        for owned, last in zip(suspects, lasts, strict=True):
            if isinstance(last, RedisAwayError) or not self._is_owned(owned):
                continue
            if isinstance(last, Exception):
                self._give_up_for(owned, last)
                continue
            epoch, number = parse_id(last[0][0]) if last else (0, 0)
            if epoch > owned.epoch:
                self._lose(owned)
            elif (
                epoch < owned.epoch
                or number < owned.confirmed
                or not self._confirm_up_to(owned, number)
            ):
                self.give_up(owned)  # Redis has lost entries
            else:
                owned.is_suspect = False
                self._finish_if_ended(owned)

    def _confirm_up_to(self, owned: OwnedLog, number: int) -> bool:
        """Count the entries up to number `number` as stored; False if there is no such entry."""
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

    def _disown(self, owned: OwnedLog) -> None:
        if self._is_owned(owned):  # otherwise it was replaced under a higher epoch
            del self.owned[owned.response_id]

    def _finish_if_ended(self, owned: OwnedLog) -> None:
        if owned.log.is_ended:
            del self.owned[owned.response_id]
            self._part_in_redis(owned)
            self._on_done(owned.log)

    def _lose(self, owned: OwnedLog) -> None:
        """Another gateway has fenced the log."""
        _LOG.warning("another gateway has taken over %s", owned.response_id)
        self._part_with(owned)

    def _give_up_for(self, owned: OwnedLog, mistake: Exception) -> None:
        if is_foreign(mistake):
            detail = detail_of(mistake)
            _LOG.warning("cannot store %s: its key is no stream (%s)", owned.response_id, detail)
        else:
            _LOG.error("cannot store %s", owned.response_id, exc_info=mistake)
        self.give_up(owned)

    def _part_with(self, owned: OwnedLog) -> None:
        self._disown(owned)
        self._on_done(owned.log)
        owned.log.fail(ResponseMovedError(owned.response_id))


def _is_mistake(failure: Exception) -> bool:
    """Whether the failure means that the command was wrong, and not that Redis is unavailable or
    already has the entry or a fence."""
    return not isinstance(failure, RedisAwayError) and not is_refused_id(failure)
