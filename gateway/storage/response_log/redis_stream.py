"""The format of a response in Redis: one stream with its entries in order.

    <epoch>-<last sequence number>   h header, o opener | d delta or steer | e end
    <epoch>-0                        f fence: the id of the gateway that owns it from here on
    <epoch>-<2^64-1>                 x broken: the owner continued without Redis; no replay

The protocol relies on Redis accepting ids only in rising order. The epoch is 1 for the gateway that
creates the stream, and increases with each takeover. A new owner's fence makes Redis refuse
everything that the previous owner still sends, and of two gateways that write the same fence one is
refused. Which of two gateways created a stream is told by the opener, which no other attempt has.
After a broken mark nothing can follow under its epoch. Every entry after the header is added with
NOMKSTREAM, so that an expired or lost stream is not created again without its beginning. A reader
accepts an entry only if its number is the next one.

A stream is never trimmed, because that would leave a gap: the writer bounds its size, and the key's
time to live its age. The keys of a response contain {tree}, its conversation's part of its id, so
they are in one slot of a cluster.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from penstock.gateway.storage.conversations.ids import tree_of
from penstock.gateway.storage.redis.errors import is_foreign
from penstock.gateway.storage.redis.trips import Command
from penstock.gateway.storage.response_log.codec import (
    UnreadableEntryError,
    decode_delta,
    decode_end,
    decode_header,
    encode_delta,
    encode_end,
    encode_header,
)
from penstock.gateway.storage.response_log.log import ResponseLog, Storage
from penstock.gateway.storage.response_log.record import EndEntry, Entry, LogHeader
from penstock.gateway.storage.response_log.replica import BrokenLogError, Role

HEADER, OPENER, DELTA, END, FENCE, BROKEN = b"h", b"o", b"d", b"e", b"f", b"x"
LAST_NUMBER = (1 << 64) - 1
PAGE_ENTRIES = 512  # per XRANGE

StreamEntry = tuple[bytes, dict[bytes, bytes]]  # id, fields
Position = tuple[int, int]  # epoch, number


def log_key(response_id: str) -> str | None:
    """The key of a response's stream; None if the id is malformed."""
    tree = tree_of(response_id)
    return None if tree is None else f"penstock:log:{{{tree}}}:{response_id}"


def cancel_key(response_id: str) -> str:
    """Set for a while after a cancel, for a gateway that takes the response over."""
    return f"penstock:cancel:{{{tree_of(response_id)}}}:{response_id}"


def steer_key(response_id: str, steer_id: str) -> str:
    """Has the input of a steer for a while, for the gateway that runs the response."""
    return f"penstock:steer:{{{tree_of(response_id)}}}:{response_id}:{steer_id}"


def read_key(response_id: str) -> str:
    """Renewed by gateways that follow the response for a reader, so that its owner knows that it is
    read."""
    return f"penstock:read:{{{tree_of(response_id)}}}:{response_id}"


def add_header(
    key: str, header: LogHeader, opener: bytes
) -> tuple[str, str, str, bytes, bytes, bytes, bytes]:
    entry_id = f"1-{header.num_opening_events - 1}"
    return "XADD", key, entry_id, HEADER, encode_header(header), OPENER, opener


def add_entry(key: str, epoch: int, entry: Entry) -> tuple[str, str, str, str, bytes, bytes]:
    kind, body = (
        (END, encode_end(entry)) if isinstance(entry, EndEntry) else (DELTA, encode_delta(entry))
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


def read_page(key: str, after: Position | None = None) -> Command:
    """The next entries; the first ones for None."""
    start = "-" if after is None else f"({after[0]}-{after[1]}"
    return "XRANGE", key, start, "+", "COUNT", PAGE_ENTRIES


def parse_id(entry_id: bytes) -> tuple[int, int]:
    """(epoch, number)"""
    epoch, _, number = entry_id.partition(b"-")
    return int(epoch), int(number)


class RedisLog(ResponseLog):
    """A log in Redis.

    Attributes:
        key: of its stream.
        num_bytes: of header and entries that were sent or read.
        node: the cluster's node that confirmed the entries; "" while it is unknown.
        opener: of this attempt to create the stream; empty if it was read.
    """

    __slots__ = ("key", "node", "num_bytes", "opener")

    def __init__(
        self,
        header: LogHeader,
        *,
        key: str,
        storage: Storage,
        role: Role = Role.OPENING,
        opener: bytes = b"",
    ) -> None:
        super().__init__(header, storage=storage, role=role)
        self.key = key
        self.opener = opener
        self.num_bytes = 0
        self.node = ""

    def receive(self, after: Position, found: Sequence[StreamEntry]) -> None:
        """Add the stream's entries after a position, if they are new.

        Raises:
            BrokenLogError: the log cannot be replayed.
        """
        try:
            for entry_id, fields in found:
                at = parse_id(entry_id)
                if not self.replica.received(after, at, _entry(fields)):
                    return
                after = at
                self.num_bytes += sum(map(len, fields.values()))
        finally:
            self.wake()


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


def new_opener(gateway_id: str) -> bytes:
    return f"{gateway_id} {secrets.token_hex(8)}".encode()


def opener_of(first: Sequence[StreamEntry] | None) -> bytes | None:
    """What created the stream that has this first entry; None: nothing, or an older gateway."""
    return first[0][1].get(OPENER) if first else None


def is_same_gateway(opener: bytes, other: bytes | None) -> bool:
    return other is not None and opener.partition(b" ")[0] == other.partition(b" ")[0]


def is_refused_id(error: object) -> bool:
    """Whether Redis refused an id because it has an equal or higher one."""
    return isinstance(error, ResponseError) and "equal or smaller" in str(error)


def ends(fields: dict[bytes, bytes]) -> bool:
    """Whether this is the last entry: the response's end or a broken mark."""
    return END in fields or BROKEN in fields


def _entry(fields: dict[bytes, bytes]) -> Entry | None:
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
    if kind == BROKEN:
        raise BrokenLogError("its gateway went on without storing it")
    if kind != FENCE:
        raise BrokenLogError(f"unknown entry {kind[:40].decode(errors='replace')!r}")
    return None
