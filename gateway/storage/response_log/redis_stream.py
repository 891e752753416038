"""The format of a response in Redis: one stream with its entries in order.

    <epoch>-<last sequence number>   h header | d delta | e end
    <epoch>-0                        f fence: the id of the gateway that owns it from here on
    <epoch>-<2^64-1>                 x broken: the owner continued without Redis; no replay

The protocol relies on Redis accepting ids only in rising order. The epoch is 1 for the gateway that
creates the stream, and increases with each takeover. A new owner's fence makes Redis refuse
everything that the previous owner still sends, and of two gateways that write the same fence one is
refused. After a broken mark nothing can follow under its epoch. Every entry after the header is
added with NOMKSTREAM, so that an expired or lost stream is not created again without its beginning.
A reader accepts an entry only if its number is the next one.

A stream is never trimmed, because that would leave a gap: the writer bounds its size, and the key's
time to live its age. The keys of a response contain {tree}, its conversation's part of its id, so
they are in one slot of a cluster.
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
from penstock.gateway.storage.redis.cluster import ClusterClient
from penstock.gateway.storage.redis.errors import (
    RedisAwayError,
    away_error,
    away_told_apart,
    detail_of,
    is_away,
    is_foreign,
)
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
from penstock.gateway.storage.response_log.record import DeltaEntry, EndEntry, Entry, LogHeader

HEADER, DELTA, END, FENCE, BROKEN = b"h", b"d", b"e", b"f", b"x"
LAST_NUMBER = (1 << 64) - 1
_PAGE_ENTRIES = 512  # per XRANGE

Command = tuple[str | bytes | int, ...]
StreamEntry = tuple[bytes, dict[bytes, bytes]]  # id, fields
_Result = TypeVar("_Result")


class BrokenLogError(Exception):
    """The stream is marked broken, has a gap, or cannot be decoded: it cannot be replayed."""


def log_key(response_id: str) -> str | None:
    """The key of a response's stream; None if the id is malformed."""
    tree = tree_of(response_id)
    return None if tree is None else f"penstock:log:{{{tree}}}:{response_id}"


def cancel_key(response_id: str) -> str:
    """Set for a while after a cancel, for a gateway that takes the response over."""
    return f"penstock:cancel:{{{tree_of(response_id)}}}:{response_id}"


def read_key(response_id: str) -> str:
    """Renewed by gateways that follow the response for a reader, so that its owner knows that it is
    read."""
    return f"penstock:read:{{{tree_of(response_id)}}}:{response_id}"


def add_header(key: str, header: LogHeader) -> tuple[str, str, str, bytes, bytes]:
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


def num_bytes_of(log: ResponseLog) -> int:
    """What a log's header and entries have in Redis."""
    entries = sum(len(add_entry("", 0, entry)[-1]) for entry in log.entries)
    return len(encode_header(log.header)) + entries


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
    """Send commands in one pipeline (with a cluster, one per node); replies in their order.

    Args:
        is_strict: raise a command's error; otherwise the error is returned as its reply. It is a
            `RedisAwayError` if the command's node is unavailable.

    Raises:
        RedisAwayError: Redis is unavailable; with a cluster, no node has ever answered.
    """
    client: object = redis  # by its type, it is never a `ClusterClient`
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
    """A round trip of commands whose reply does not matter beyond success or refusal. It costs
    a fraction of redis-py's pipeline: no bookkeeping per command, no time-out (the caller has one),
    no retry. With a cluster it does not follow slots to another node: before anything is added
    there, the caller must find out what that node has.

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
        # There may be unread replies on the connection.
        await connection.disconnect(nowait=True)
        raise
    finally:
        await asyncio.shield(pool.release(connection))


def _mark_away(replies: list[Any]) -> None:
    for index, reply in enumerate(replies):
        if isinstance(reply, Exception) and is_away(reply):
            replies[index] = away_error(reply)
            replies[index].__cause__ = reply


async def _reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response(timeout=math.inf)
    except ResponseError as error:
        return error


async def ask(redis: Redis, *command: str | bytes | int) -> Any:
    """One command's reply.

    Raises:
        RedisAwayError: Redis is unavailable.
    """
    (reply,) = await round_trip(redis, [command], is_strict=True)
    return reply


@dataclass(slots=True)
class StoredLog:
    """A log read from Redis up to a position.

    Attributes:
        position: id of the last stream entry that was read.
    """

    log: ResponseLog
    position: bytes

    @property
    def epoch(self) -> int:
        return parse_id(self.position)[0]

    def add(self, found: Sequence[StreamEntry]) -> None:
        """Add the stream's next entries.

        Raises:
            BrokenLogError: the log cannot be replayed.
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
                raise BrokenLogError(f"entry {entry.number} instead of {self.log.next_number}")
            self.log.entries.append(entry)


async def load(redis: Redis, key: str, *, storage: Storage = IN_MEMORY) -> StoredLog | None:
    """Read a whole stream; None if there is none.

    Raises:
        BrokenLogError: it cannot be replayed.
        RedisAwayError: Redis is unavailable.
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
    (found,) = await round_trip(redis, [("XRANGE", key, start, "+", "COUNT", _PAGE_ENTRIES)])
    entries = unless_foreign(found)
    if entries is None:
        raise BrokenLogError(f"{key} is no stream ({detail_of(found)})")
    return entries


def unless_foreign(reply: Any) -> list[StreamEntry] | None:
    """The entries of a reply of `round_trip`; None if the key is no stream.

    Raises:
        Exception: the reply is another error.
    """
    if not isinstance(reply, Exception):
        entries: list[StreamEntry] = reply
        return entries
    if is_foreign(reply):
        return None
    raise reply


def header_of(fields: dict[bytes, bytes]) -> LogHeader:
    """The header in a stream's first entry.

    Raises:
        BrokenLogError: the entry is not a header.
    """
    try:
        return decode_header(fields[HEADER])
    except (KeyError, UnreadableEntryError) as error:
        raise BrokenLogError(f"no header: {error}") from error


def is_begun_by(first: Sequence[StreamEntry], header: LogHeader) -> bool:
    """Whether a stream's first entry is this header."""
    try:
        return bool(first) and header_of(first[0][1]).nonce == header.nonce
    except BrokenLogError:
        return False


def is_refused_id(error: object) -> bool:
    """Whether Redis refused an id because it has an equal or higher one."""
    return isinstance(error, ResponseError) and "equal or smaller" in str(error)


def ends(fields: dict[bytes, bytes]) -> bool:
    """Whether this is the last entry: the response's end or a broken mark."""
    return END in fields or BROKEN in fields


def _entry(fields: dict[bytes, bytes]) -> DeltaEntry | EndEntry | None:
    """Decode an entry after the header; None for a fence."""
    if len(fields) != 1:
        raise BrokenLogError(f"an entry of {len(fields)} fields")
    ((kind, body),) = fields.items()
    try:
        if kind == DELTA:
            return decode_delta(body)
        if kind == END:
            return decode_end(body)
    except UnreadableEntryError as error:
        raise BrokenLogError(str(error)) from error
    if kind != FENCE:
        raise BrokenLogError(f"unknown entry {kind[:40].decode(errors='replace')!r}")
    return None


async def in_time(
    work: Coroutine[Any, Any, _Result], timeout_s: float, *, num_ticks: int
) -> _Result:
    """The result of `work`.

    The time is counted in at least `num_ticks` iterations of the event loop, so that a process that
    was stopped or busy does not mistake its own pause for one of Redis.

    Raises:
        RedisAwayError: the time is up; `work` is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(num_ticks):
            await asyncio.wait({task}, timeout=timeout_s / num_ticks)
            if task.done():
                return task.result()
        raise RedisAwayError(f"no answer within {timeout_s:.3g} s", state="timeout")
    finally:
        task.cancel()
