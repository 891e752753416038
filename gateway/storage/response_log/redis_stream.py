"""How a response lies in Redis: one stream, its entries in the order in which they happened.

    <epoch>-<last sequence number>   h header | d delta | e end
    <epoch>-0                        f fence: the id of the gateway that owns it from here on
    <epoch>-<2^64-1>                 x broken: its owner went on without Redis; nobody may replay it

Redis takes ids in rising order only, and that is the whole protocol. The epoch is 1 for the gateway
that creates the stream, and one more for each that takes it over: its fence makes Redis refuse
whatever the owner before it still sends, and of two that write the same fence one is refused. A
broken mark lets nothing follow under its epoch. Every entry after the header is added with
NOMKSTREAM, so that what expired, or was lost with Redis, does not come back as a torso; and a
reader takes an entry only if its number is the next one.

A stream is never trimmed (a trimmed one has a gap): the writer bounds its bytes, its key's time to
live its age. The keys of a response carry {tree}, its conversation's part of its id, and so lie in
one slot of a cluster.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

from penstock.gateway.storage.conversations.ids import tree_of
from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.redis_cluster import ClusterClient
from penstock.gateway.storage.redis_errors import RedisAwayError, away_told_apart, is_away
from penstock.gateway.storage.response_log.codec import (
    UnreadableEntryError,
    decode_delta,
    decode_end,
    decode_header,
    encode_delta,
    encode_end,
    encode_header,
)
from penstock.gateway.storage.response_log.log import IN_MEMORY, ResponseLog, Storage
from penstock.gateway.storage.response_log.record import DeltaEntry, EndEntry, Entry, ResponseHeader

HEADER, DELTA, END, FENCE, BROKEN = b"h", b"d", b"e", b"f", b"x"
LAST_NUMBER = (1 << 64) - 1
_PAGE_ENTRIES = 512  # of one XRANGE

Command = tuple[str | bytes | int, ...]
StreamEntry = tuple[bytes, dict[bytes, bytes]]  # id, fields
_Result = TypeVar("_Result")


class BrokenLogError(Exception):
    """The stream is marked broken, has a gap, or cannot be read: there is no replaying it."""


def store_unavailable() -> StoreUnavailableError:
    return StoreUnavailableError(
        "the store of responses does not answer; try again later",
        code="session_store_unavailable",
        status=503,
    )


def log_key(response_id: str) -> str | None:
    """The stream of a response; None if the id is none of ours."""
    tree = tree_of(response_id)
    return None if tree is None else f"penstock:log:{{{tree}}}:{response_id}"


def cancel_key(response_id: str) -> str:
    """Set for a while when somebody wants it stopped: whoever takes it over must know."""
    return f"penstock:cancel:{{{tree_of(response_id)}}}:{response_id}"


def read_key(response_id: str) -> str:
    """Set again and again by gateways that follow it for somebody: its owner must not take it for
    unread."""
    return f"penstock:read:{{{tree_of(response_id)}}}:{response_id}"


def add_header(key: str, header: ResponseHeader) -> Command:
    entry_id = f"1-{header.num_opening_events - 1}"
    return "XADD", key, entry_id, HEADER, encode_header(header)


def add_entry(key: str, epoch: int, entry: Entry) -> tuple[str, str, str, str, bytes, bytes]:
    kind, body = (
        (DELTA, encode_delta(entry)) if isinstance(entry, DeltaEntry) else (END, encode_end(entry))
    )
    return "XADD", key, "NOMKSTREAM", f"{epoch}-{entry.last_number}", kind, body


def add_fence(key: str, epoch: int, gateway_id: str) -> Command:
    return "XADD", key, "NOMKSTREAM", f"{epoch}-0", FENCE, gateway_id


def add_broken(key: str, epoch: int) -> Command:
    return "XADD", key, "NOMKSTREAM", f"{epoch}-{LAST_NUMBER}", BROKEN, b""


def read_first(key: str) -> Command:
    return "XRANGE", key, "-", "+", "COUNT", 1


def read_last(key: str) -> Command:
    return "XREVRANGE", key, "+", "-", "COUNT", 1


def parse_id(entry_id: bytes) -> tuple[int, int]:
    """(epoch, number)"""
    epoch, _, number = entry_id.partition(b"-")
    return int(epoch), int(number)


async def round_trip(
    redis: Redis, commands: Sequence[Command], *, is_strict: bool = False
) -> list[Any]:
    """Send commands in one pipeline, of a cluster one per node; replies in their order.

    Args:
        is_strict: the error of a command raises; otherwise it stands in the place of its reply. It
            is a `RedisAwayError` if the command's node cannot serve now.

    Raises:
        RedisAwayError: Redis cannot serve now; of a cluster, if no node ever did.
    """
    client: object = redis  # to its type, a cluster's client is none
    if not commands:
        return []
    with away_told_apart():
        if isinstance(client, ClusterClient):
            replies = await client.run(commands, _pipelined)
        else:
            replies = await _pipelined(redis, commands)
    _mark_away(replies)
    if is_strict:
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
    return replies


async def _pipelined(redis: Redis, commands: Sequence[Command]) -> list[Any]:
    pipeline = redis.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    return replies


async def lean_round_trip(redis: Redis, commands: Sequence[Command]) -> list[Any]:
    """The same for commands of which only success or refusal matters, at a fraction of redis-py's
    cost for a pipeline: no bookkeeping per command, no time-out (the caller has one), no retry.
    Of a cluster it goes to no other node than it thought right: before anything is added at a new
    one, the caller finds out what got there.

    Raises:
        RedisAwayError: as `round_trip`.
    """
    client: object = redis
    with away_told_apart():
        if isinstance(client, ClusterClient):
            replies = await client.run(commands, _lean, follows_slots=False)
        else:
            replies = await _lean(redis, commands)
    _mark_away(replies)
    return replies


async def _lean(redis: Redis, commands: Sequence[Command]) -> list[Any]:
    pool: Any = redis.connection_pool
    connection: AbstractConnection = await pool.get_connection()
    try:
        await connection.send_packed_command(connection.pack_commands(commands))
        return [await _reply(connection) for _ in commands]
    except BaseException:
        # There may be replies on the way that nobody will read.
        await connection.disconnect(nowait=True)
        raise
    finally:
        await asyncio.shield(pool.release(connection))


def _mark_away(replies: list[Any]) -> None:
    for index, reply in enumerate(replies):
        if isinstance(reply, Exception) and is_away(reply):
            replies[index] = RedisAwayError(f"{type(reply).__name__}: {reply}")
            replies[index].__cause__ = reply


async def _reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response(timeout=math.inf)
    except ResponseError as error:
        return error


async def ask(redis: Redis, *command: str | bytes | int) -> Any:
    """One command's reply.

    Raises:
        RedisAwayError: Redis cannot serve now.
    """
    (reply,) = await round_trip(redis, [command], is_strict=True)
    return reply


@dataclass(slots=True)
class StoredLog:
    """A log read from Redis, and how far.

    Attributes:
        position: id of the last stream entry in it.
    """

    log: ResponseLog
    position: bytes

    @property
    def epoch(self) -> int:
        return parse_id(self.position)[0]

    def add(self, found: Sequence[StreamEntry]) -> None:
        """Take in what follows in the stream.

        Raises:
            BrokenLogError: it cannot be replayed.
        """
        try:
            for entry_id, fields in found:
                self._add(fields)
                self.position = entry_id
        finally:
            self.log.publish(len(self.log.entries))

    def _add(self, fields: dict[bytes, bytes]) -> None:
        entry = _entry(fields)
        if entry is not None:
            if entry.number != self.log.next_number:
                raise BrokenLogError(f"entry {entry.number}, not {self.log.next_number}")
            self.log.entries.append(entry)


async def load(redis: Redis, key: str, *, storage: Storage = IN_MEMORY) -> StoredLog | None:
    """Read a whole stream; None if there is none.

    Raises:
        BrokenLogError: it cannot be replayed.
        RedisAwayError: Redis cannot serve now.
    """
    page = await _page(redis, key, "-")
    if not page:
        return None
    (entry_id, fields), *rest = page
    stored = StoredLog(ResponseLog(header_of(fields), storage=storage), entry_id)
    while True:
        stored.add(rest)
        if len(page) < _PAGE_ENTRIES:
            return stored
        rest = page = await _page(redis, key, f"({stored.position.decode()}")


async def _page(redis: Redis, key: str, start: str) -> list[StreamEntry]:
    found: list[StreamEntry] = await ask(redis, "XRANGE", key, start, "+", "COUNT", _PAGE_ENTRIES)
    return found


def header_of(fields: dict[bytes, bytes]) -> ResponseHeader:
    """Of a stream's first entry.

    Raises:
        BrokenLogError: it is none.
    """
    try:
        return decode_header(fields[HEADER])
    except (KeyError, UnreadableEntryError) as error:
        raise BrokenLogError(f"no header: {error}") from error


def is_begun_by(first: Sequence[StreamEntry], header: ResponseHeader) -> bool:
    """Whether a stream's first entry, if it has one, is this header and not another's."""
    try:
        return bool(first) and header_of(first[0][1]).item_id == header.item_id
    except BrokenLogError:
        return False


def is_refused_id(error: object) -> bool:
    """Whether Redis had an entry of that id, or of a higher one."""
    return isinstance(error, ResponseError) and "equal or smaller" in str(error)


def ends(fields: dict[bytes, bytes]) -> bool:
    """Whether nothing follows this entry, the response's end or a mark that it is broken."""
    return END in fields or BROKEN in fields


def _entry(fields: dict[bytes, bytes]) -> DeltaEntry | EndEntry | None:
    """What an entry behind the header holds; None of a fence."""
    ((kind, body),) = fields.items()
    try:
        if kind == DELTA:
            return decode_delta(body)
        if kind == END:
            return decode_end(body)
    except UnreadableEntryError as error:
        raise BrokenLogError(str(error)) from error
    if kind != FENCE:
        raise BrokenLogError(f"a {kind.decode(errors='replace')!r} entry")
    return None


async def in_time(
    work: Coroutine[Any, Any, _Result], timeout_s: float, *, num_ticks: int
) -> _Result:
    """What `work` returns, or raises.

    The time is counted in turns of the loop, `num_ticks` of them at least, so that a process that
    was stopped, or busy, does not take its own absence for Redis'.

    Raises:
        RedisAwayError: the time is over; `work` is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(num_ticks):
            await asyncio.wait({task}, timeout=timeout_s / num_ticks)
            if task.done():
                return task.result()
        raise RedisAwayError(f"no answer within {timeout_s} s")
    finally:
        task.cancel()
