"""How responses begin, continue and end in Redis, in round trips: the protocol without I/O.

    penstock:gateways          ids of all gateways
    penstock:lease:<gateway>   exists while the gateway lives: renewed regularly, expires soon after
    penstock:owned:<gateway>   "<epoch> <response id>" of the responses that it runs
    penstock:control:<gateway> a stream of commands to it: stop a response, look for dead gateways

A gateway notes a response as its own before it stores the header. Another that takes it over notes
it under the next epoch, then writes the fence (`redis_stream`), which only one gateway can write. A
gateway that crashes in between leaves a note that does not match the stream's epoch; the next
gateway that finds such a note removes it.

Every step can be repeated from its beginning after any failure.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from penstock.gateway.storage.redis.errors import RedisAwayError, detail_of, is_foreign
from penstock.gateway.storage.redis.trips import Command, Steps
from penstock.gateway.storage.response_log import replica as do
from penstock.gateway.storage.response_log.leases import Claim, Leases
from penstock.gateway.storage.response_log.log import Storage
from penstock.gateway.storage.response_log.log_store import LogExistsError
from penstock.gateway.storage.response_log.redis_stream import (
    BROKEN,
    FENCE,
    PAGE_ENTRIES,
    RedisLog,
    StreamEntry,
    add_broken,
    add_entry,
    add_fence,
    add_header,
    cancel_key,
    ends,
    header_of,
    is_refused_id,
    is_same_gateway,
    log_key,
    opener_of,
    parse_id,
    read_first,
    read_last,
    read_page,
    unless_foreign,
)
from penstock.gateway.storage.response_log.replica import BrokenLogError, Commands, Role
from penstock.gateway.wake_ups import WRITES

_LOG = logging.getLogger(__name__)
GATEWAYS = "penstock:gateways"


def lease_key(gateway_id: str) -> str:
    return f"penstock:lease:{gateway_id}"


def owned_key(gateway_id: str) -> str:
    return f"penstock:owned:{gateway_id}"


def control_key(gateway_id: str) -> str:
    return f"penstock:control:{gateway_id}"


def note(gateway_id: str, response_id: str, epoch: int) -> Command:
    """Says that a gateway runs a response."""
    return "SADD", owned_key(gateway_id), f"{epoch} {response_id}"


def forget(gateway_id: str, response_id: str, epoch: int) -> Command:
    return "SREM", owned_key(gateway_id), f"{epoch} {response_id}"


def keep_for(key: str, ttl_s: float) -> Command:
    return "PEXPIRE", key, int(ttl_s * 1000)


# -- its beginning ----------------------------------------------------------------------------


def open_log(log: RedisLog, gateway_id: str, *, ttl_s: float) -> Steps[None]:
    """Store a log's header, and a note that this gateway runs the response.

    Raises:
        RedisAwayError: Redis may have the header or not.
        LogExistsError: another log has this id.
        ResponseError: Redis has something else in place of the notes.
    """
    header = add_header(log.key, log.header, log.opener)
    *_, body, _, opener = header
    log.num_bytes = len(body) + len(opener)
    noted = note(gateway_id, log.response_id, 1)
    # First the note: a log without one would never be taken over.
    _checked(*(yield [noted]))
    # Again with the header: if this gateway was frozen in between, another may have found a note
    # without a log and removed it.
    added, *_ = yield [header, keep_for(log.key, ttl_s), noted]
    if not isinstance(added, Exception):
        return
    if not (is_refused_id(added) or is_foreign(added)):
        raise added
    # Redis already has the header, and the reply was lost, or another response's, or something else
    (first,) = yield [read_first(log.key)]
    found = opener_of(unless_foreign(first))
    if found != log.opener:
        if not is_same_gateway(log.opener, found):  # whose note it is, too
            yield [forget(gateway_id, log.response_id, 1)]
        raise LogExistsError(log.response_id)


def read_log(key: str, storage: Storage) -> Steps[RedisLog | None]:
    """A log as it is stored; None if there is none.

    Raises:
        BrokenLogError: it cannot be replayed.
        RedisAwayError: Redis is unavailable.
    """
    (page,) = yield [read_page(key)]
    found = unless_foreign(page)
    if found is None:
        raise BrokenLogError(f"{key} is no stream ({detail_of(page)})")
    if not found:
        return None
    (_, fields), *rest = found
    log = RedisLog(header_of(fields), key=key, storage=storage, role=Role.FOLLOWED)
    log.num_bytes = sum(map(len, fields.values()))
    log.receive(log.replica.position, rest)
    if len(found) == PAGE_ENTRIES:
        yield from read_rest(log)
    return log


def read_rest(log: RedisLog) -> Steps[None]:
    """Read a followed log to its present end. Raises as `read_log`."""
    while True:
        position = log.replica.position
        (page,) = yield [read_page(log.key, after=position)]
        found = unless_foreign(page)
        if found is None:
            raise BrokenLogError(f"{log.key} is no stream ({detail_of(page)})")
        log.receive(position, found)
        if len(found) < PAGE_ENTRIES or log.replica.role is not Role.FOLLOWED:
            return


def running(response_ids: Collection[str], gateway_id: str) -> Steps[set[str]]:
    """Those of some responses whose log has not ended, so that a gateway runs them or takes them
    over. A log that is marked as broken goes on as long as a gateway with a lease has noted it."""
    keys = {each: key for each in response_ids if (key := log_key(each)) is not None}
    found = set[str]()
    lasts = yield [read_last(key) for key in keys.values()]
    for response_id, reply in zip(keys, lasts, strict=True):
        last = unless_foreign(reply)
        if last and BROKEN in last[0][1]:
            noted = f"{parse_id(last[0][0])[0]} {response_id}"
            if (yield from _is_noted(noted, gateway_id)):
                found.add(response_id)
        elif last and not ends(last[0][1]):
            found.add(response_id)
    return found


def _is_noted(noted: str, gateway_id: str) -> Steps[bool]:
    """Whether another gateway with a lease has noted this."""
    names = yield from others(gateway_id)
    leases = yield [("EXISTS", lease_key(name)) for name in names]
    notes = yield [("SISMEMBER", owned_key(name), noted) for name in names]
    return any(lease == has == 1 for lease, has in zip(leases, notes, strict=True))


# -- while it runs ----------------------------------------------------------------------------


def verify(batch: Collection[RedisLog]) -> Steps[None]:
    """Find out what Redis has of logs that are VERIFYING."""
    suspects = [log for log in batch if log.replica.role is Role.VERIFYING]
    if suspects:
        epochs = [log.replica.epoch for log in suspects]
        lasts = yield [read_last(log.key) for log in suspects]
        for log, epoch, last in zip(suspects, epochs, lasts, strict=True):
            log.do(_last_answered(log, epoch, last))


def write(
    batch: Collection[RedisLog], *, max_bytes: int, chores: Sequence[Command] = ()
) -> Steps[Sequence[Any]]:
    """Store what Redis lacks of logs, in one round trip.

    Args:
        max_bytes: of a log that is stored.
        chores: further commands.

    Returns: the replies to `chores`; empty if nothing was sent.
    """
    commands: list[Command] = []
    parts: list[tuple[RedisLog, int, int, int]] = []
    for log in batch:
        replica = log.replica
        if replica.role is Role.OWNED and replica.num_stored < len(replica.entries):
            commands += _missing_entries(log)
            parts.append((log, replica.epoch, len(commands), len(replica.entries)))
    if not commands:
        return ()
    replies = yield [*commands, *chores] if chores else commands
    begin = 0
    with WRITES:  # readers get what is confirmed
        for log, epoch, end, num_entries in parts:
            some = replies[begin:end]
            log.do(_answered(log, epoch, num_entries, some, max_bytes=max_bytes))
            begin = end
    return replies[begin:]


def _missing_entries(log: RedisLog) -> list[Command]:
    """The commands that store what Redis lacks."""
    replica = log.replica
    epoch, key = replica.epoch, log.key
    commands = [add_entry(key, epoch, entry) for entry in replica.entries[replica.num_stored :]]
    log.num_bytes += sum([len(command[-1]) for command in commands])
    return commands  # type: ignore[return-value]  # a list of longer tuples


def _answered(
    log: RedisLog, epoch: int, num_entries: int, replies: Sequence[Any], *, max_bytes: int
) -> Commands:
    """What the replies to `_missing_entries` mean, if Redis has `num_entries` after them."""
    replica = log.replica
    failures = [reply for reply in replies if isinstance(reply, Exception)]
    mistake = next(filter(_is_mistake, failures), None)
    if mistake is not None:
        return give_up_for(log, epoch, mistake)
    if None in replies or log.num_bytes > max_bytes:
        return replica.give_up(epoch)  # the stream no longer exists, or is too long
    if not failures:
        return replica.acknowledged(epoch, num_entries)
    # A refused id means that Redis already has the entry, whose reply was lost, or has another
    # gateway's fence. Other failures mean that it cannot be written now.
    if not isinstance(replies[-1], Exception) and not all(map(is_refused_id, failures)):
        return replica.give_up(epoch)  # an entry is missing, but later ones were stored
    return replica.unsure(epoch)


def _last_answered(log: RedisLog, epoch: int, reply: Any) -> Commands:
    """What the reply to `read_last` means."""
    if isinstance(reply, RedisAwayError):
        return do.NOTHING
    if isinstance(reply, Exception):
        return give_up_for(log, epoch, reply)
    return log.replica.last_read(epoch, _position_of(reply))


def _is_mistake(failure: Exception) -> bool:
    """Whether a failure means that the command was wrong, and not that Redis is unavailable or
    already has the entry or a fence."""
    return not isinstance(failure, RedisAwayError) and not is_refused_id(failure)


def give_up_for(log: RedisLog, epoch: int, mistake: Exception) -> Commands:
    """Continue a log without Redis, whose refusal is no absence."""
    if is_foreign(mistake):
        detail = detail_of(mistake)
        _LOG.warning("cannot store %s: its key is no stream (%s)", log.response_id, detail)
    else:
        _LOG.error("cannot store %s", log.response_id, exc_info=mistake)
    return log.replica.give_up(epoch)


def mark_broken(log: RedisLog) -> Steps[Commands]:
    """Mark a log that continues, or has ended, without Redis. What its machine says then; nothing
    if Redis is unavailable."""
    replica = log.replica
    epoch = replica.epoch
    if not replica.is_begun:
        (first,) = yield [read_first(log.key)]
        if isinstance(first, RedisAwayError):
            return do.NOTHING
        is_ours = not isinstance(first, Exception) and opener_of(first) == log.opener
        commands = replica.first_read(is_ours=is_ours)
        if commands != do.MEND:
            return commands
    (marked,) = yield [add_broken(log.key, epoch)]
    if isinstance(marked, RedisAwayError):
        return do.NOTHING
    (last,) = yield [read_last(log.key)]
    if isinstance(last, RedisAwayError):
        return do.NOTHING
    return replica.marked(epoch, None if isinstance(last, Exception) else _position_of(last))


# -- heartbeats -------------------------------------------------------------------------------


def beat(by: Takeovers, *, lease_s: float, ttl_s: float) -> Steps[Exception | None]:
    """Renew this gateway's lease.

    Returns: what else failed, so that gateways do not know of each other.

    Raises:
        Exception: the lease was not renewed.
    """
    me = by.gateway_id
    replies = yield [
        ("SET", lease_key(me), b"1", "PX", int(lease_s * 1000), "GET"),
        ("SADD", GATEWAYS, me),
        keep_for(GATEWAYS, ttl_s),
        keep_for(owned_key(me), ttl_s),
        keep_for(control_key(me), ttl_s),
    ]
    _checked(replies[0])
    by.leases.beaten(had_lease=replies[0] is not None)
    return next((reply for reply in replies if isinstance(reply, Exception)), None)


def verify_all(logs: Sequence[RedisLog], by: Takeovers) -> Steps[None]:
    """This gateway's lease had expired: others may have its responses, or removed its notes."""
    for log in logs:
        log.do(log.replica.unsure(log.replica.epoch))
    notes = [note(by.gateway_id, log.response_id, log.replica.epoch) for log in logs]
    if notes:
        _checked(*(yield notes))
    by.leases.has_lapsed = False


def others(me: str) -> Steps[list[str]]:
    """The other gateways."""
    (members,) = yield [("SMEMBERS", GATEWAYS)]
    _checked(members)
    return [name for name in texts(members) if name != me]


def scan(
    by: Takeovers, clock: Callable[[], float], can_run: Callable[[], bool]
) -> Steps[list[tuple[str, list[str]]]]:
    """The gateways that are gone and what they have noted, for `take_over`."""
    names = yield from others(by.gateway_id)
    if not names:
        return []
    leases = yield [("EXISTS", lease_key(name)) for name in names]
    found = {
        name: None if isinstance(has_lease, Exception) else has_lease == 1
        for name, has_lease in zip(names, leases, strict=True)
    }
    due = by.leases.scanned(clock(), found, can_run=can_run())
    if not due:
        return []
    noted = yield [("SMEMBERS", owned_key(name)) for name in due]
    left: list[tuple[str, list[str]]] = []
    empty: list[Command] = []
    for name, members in zip(due, noted, strict=True):
        if isinstance(members, Exception):
            continue
        if notes := texts(members):
            left.append((name, notes))
        else:
            by.leases.emptied(name)
            empty += [("SREM", GATEWAYS, name), ("DEL", control_key(name))]
    if empty:
        yield empty
    return left


# -- takeovers --------------------------------------------------------------------------------


class KnownLogs(Protocol):
    """The logs of this gateway."""

    def known(self, response_id: str) -> RedisLog | None:
        """A log that is followed or run here, or has ended."""
        ...

    def begin_following(self, log: RedisLog) -> None:
        """From now on it is known."""
        ...

    def taken_over(self, log: RedisLog) -> None:
        """This gateway runs it from now on."""
        ...


class Takeovers:
    """Takeovers by one gateway.

    Args:
        leases: has the claims that are not finished.
        logs: from which a followed log becomes one that runs here.
        storage: of logs that are read.
    """

    def __init__(self, gateway_id: str, leases: Leases, logs: KnownLogs, storage: Storage) -> None:
        self.gateway_id = gateway_id
        self.leases = leases
        self._logs = logs
        self._storage = storage

    def take_over(self, dead: str, noted: str) -> Steps[None]:
        """Take over a response that was noted for a gateway that is gone, unless another gateway is
        faster."""
        claim = yield from _claim_on(noted)
        if claim is not None:
            self.leases.claims[claim.response_id] = claim
            yield from self.finish(claim)
        _checked(*(yield [("SREM", owned_key(dead), noted)]))

    def finish(self, claim: Claim) -> Steps[None]:
        """Fence a response off from its gateway and run it, unless another gateway was faster."""
        response_id, epoch = claim.response_id, claim.epoch
        key = log_key(response_id)
        assert key is not None
        _checked(*(yield [note(self.gateway_id, response_id, epoch)]))
        (fenced,) = yield [add_fence(key, epoch, self.gateway_id)]
        if isinstance(fenced, Exception):  # refused, or stored although the reply was lost
            fence_id = f"{epoch}-0"
            (reply,) = yield [("XRANGE", key, fence_id, fence_id)]
            fenced = _is_fence_of(unless_foreign(reply), self.gateway_id)
        has_it = bool(fenced) and (yield from self._run(claim, key))
        if not (has_it or self.leases.is_leaving):  # otherwise the next gateway finds the note
            _checked(*(yield [forget(self.gateway_id, response_id, epoch)]))
        self.leases.claims.pop(response_id, None)

    def _known(self, claim: Claim) -> RedisLog | None:
        log = self._logs.known(claim.response_id)
        return None if log is None or log.replica.role in (Role.ENDED, Role.LOST) else log

    def _run(self, claim: Claim, key: str) -> Steps[bool]:
        """Read the log up to this gateway's fence, then run the response; False if it cannot be."""
        log = self._known(claim)
        try:
            if log is None:
                log = yield from read_log(key, self._storage)
                if log is None:
                    return False
                log = self._known(claim) or log  # a reader may have had it read meanwhile
                self._logs.begin_following(log)
            if log.replica.epoch < claim.epoch:
                log.do(log.replica.fenced(log.replica.epoch))  # unnoticed by this gateway
                yield from read_rest(log)
        except BrokenLogError as error:
            _LOG.warning("cannot take over %s: %s", claim.response_id, error)
            return False
        (is_cancelled,) = yield [("EXISTS", cancel_key(claim.response_id))]
        _checked(is_cancelled)
        if self.leases.is_leaving:
            return False
        if claimed := log.replica.claimed(claim.epoch):
            log.do(claimed)
            self._logs.taken_over(log)
            if is_cancelled == 1:
                log.cancel()
        return log.replica.runs and log.replica.epoch == claim.epoch


def _claim_on(noted: str) -> Steps[Claim | None]:
    """The claim on a noted response; None if it has ended, the note has another epoch, or note or
    stream are not ours."""
    epoch_text, _, response_id = noted.partition(" ")
    key = log_key(response_id)
    if key is None or not (epoch_text.isascii() and epoch_text.isdigit()):
        return None
    (reply,) = yield [read_last(key)]
    last = unless_foreign(reply)
    epoch = int(epoch_text)
    if not last or parse_id(last[0][0])[0] != epoch or ends(last[0][1]):
        return None
    return Claim(response_id=response_id, epoch=epoch + 1)


def _is_fence_of(found: Sequence[StreamEntry] | None, gateway_id: str) -> bool:
    return bool(found and found[0][1].get(FENCE) == gateway_id.encode())


def texts(members: Iterable[bytes]) -> list[str]:
    """The members of a set of ours; foreign bytes are left out."""
    found = []
    for member in members:
        with contextlib.suppress(UnicodeDecodeError):
            found.append(member.decode())
    return found


def _checked(*replies: Any) -> None:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply


def _position_of(last: Sequence[StreamEntry]) -> tuple[int, int] | None:
    return parse_id(last[0][0]) if last else None
