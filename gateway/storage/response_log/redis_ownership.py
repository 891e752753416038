"""Which gateway owns which response, and takeovers when a gateway dies.

    penstock:gateways          ids of all gateways
    penstock:lease:<gateway>   exists while the gateway lives: renewed regularly, expires soon after
    penstock:owned:<gateway>   "<epoch> <response id>" of the responses that it runs
    penstock:control:<gateway> a stream of commands to it: stop a response, look for dead gateways

Every gateway looks for others without a lease and takes over their responses one by one: it notes
the response as its own under the next epoch, then writes the fence (`redis_stream`), which only one
gateway can write. A gateway that crashes in between leaves a note that does not match the stream's
epoch; the next gateway that finds such a note removes it.

A gateway that could not reach Redis, or that was stopped, takes nothing over for a while: the
others' leases may have expired together with its own, and they need a moment to renew them. A
gateway that could not run a response now, because its engine is down, leaves responses to the
others, unless none takes them for some time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from redis.asyncio import Redis

from penstock.gateway.storage.redis.errors import (
    SLOW,
    STATES,
    RedisAwayError,
    detail_of,
    is_foreign,
)
from penstock.gateway.storage.redis.health import FOREIGN_EVERY_S, RedisHealth
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.response_log.redis_stream import (
    FENCE,
    Command,
    add_fence,
    ask,
    cancel_key,
    ends,
    log_key,
    parse_id,
    read_last,
    round_trip,
    unless_foreign,
)

_LOG = logging.getLogger(__name__)
_GATEWAYS = "penstock:gateways"
_NUM_AT_ONCE = 16  # responses taken over
_MAX_CONTROL_ENTRIES = 1000
_CANCEL_S = 60
_SLOW_EVERY_S = 600.0  # between two warnings


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A response that this gateway owns from now on."""

    response_id: str
    key: str
    epoch: int


class Ownership:
    """This gateway's lease and its responses among all gateways.

    Args:
        adopt: continues a response that was taken over.
        on_beat: called at every heartbeat; its argument is whether the lease had expired.
        health: notes the round trips of heartbeats, and why they failed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        redis: Redis,
        settings: RedisLogSettings,
        *,
        adopt: Callable[[Claim], Awaitable[None]],
        on_beat: Callable[[bool], Awaitable[None]],
        health: RedisHealth,
        clock: Callable[[], float],
    ) -> None:
        self.gateway_id = f"{{{secrets.token_hex(8)}}}"  # its keys share a slot of a cluster
        self.is_leaving = False
        self.can_run: Callable[[], bool] = lambda: True  # whether a response could run here now
        self._redis = redis
        self._settings = settings
        self._adopt = adopt
        self._on_beat = on_beat
        self._health = health
        self._clock = clock
        self._hurry = asyncio.Event()
        self._was_away = False
        self._has_lost_lease = False
        self._last_beat_s = math.inf  # there was none
        self._may_adopt_s = 0.0
        self._may_adopt_from_s: dict[str, float] = {}  # gateways whose lease could not be read
        self._orphaned_at_s: dict[str, float] = {}  # gateways whose responses others should take
        self._adopting: asyncio.Task[None] | None = None
        self._claims: dict[str, Claim] = {}  # being enforced, or to be tried again

    @property
    def control_key(self) -> str:
        return _control_key(self.gateway_id)

    def note(self, response_id: str, epoch: int) -> Command:
        """The command to send before a response's stream is created."""
        return "SADD", _owned_key(self.gateway_id), f"{epoch} {response_id}"

    def forget(self, response_id: str, epoch: int) -> Command:
        return "SREM", _owned_key(self.gateway_id), f"{epoch} {response_id}"

    def hurry(self) -> None:
        """Look for responses of dead gateways now."""
        self._hurry.set()

    async def appear(self) -> None:
        """The first heartbeat. It must come before the first response, so that others notice when
        this gateway dies."""
        await self._turn()

    async def run(self) -> None:
        """Send heartbeats and look for dead gateways, until cancelled."""
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.beat_s):
                        await self._hurry.wait()
                self._hurry.clear()
                await self._turn()
        finally:
            if self._adopting is not None:
                self._adopting.cancel()

    async def cancel(self, response_id: str) -> None:
        """Tell a response's owner, or the gateway that takes it over, to stop it.

        Raises:
            RedisAwayError: Redis is unavailable.
        """
        _, gateways = await round_trip(
            self._redis,
            [("SET", cancel_key(response_id), b"1", "EX", _CANCEL_S), ("SMEMBERS", _GATEWAYS)],
            is_strict=True,
        )
        await self._tell(_texts(gateways), b"cancel", response_id)

    async def leave(self) -> None:
        """Give up the lease and tell the other gateways, which take over this one's responses.

        Raises:
            RedisAwayError: Redis is unavailable.
        """
        self.is_leaving = True
        if self._adopting is not None:  # it may add to this gateway's responses
            self._adopting.cancel()
            await asyncio.wait({self._adopting})
        others = await self._others()
        commands: list[Command] = [("DEL", f"penstock:lease:{self.gateway_id}")]
        if not await ask(self._redis, "EXISTS", _owned_key(self.gateway_id)):
            commands.append(("SREM", _GATEWAYS, self.gateway_id))
            commands.append(("DEL", self.control_key))
        await round_trip(self._redis, commands)
        await self._tell(others, b"look", "")

    async def has_others(self) -> bool:
        """Whether another gateway lives.

        Raises:
            RedisAwayError: Redis is unavailable.
        """
        others = await self._others()
        leases = [("EXISTS", f"penstock:lease:{other}") for other in others]
        return 1 in await round_trip(self._redis, leases)

    # -- heartbeats ---------------------------------------------------------------------------

    async def _turn(self) -> None:
        try:
            async with asyncio.timeout(self._turn_timeout_s()):
                if self.is_leaving:  # without a lease
                    await self._on_beat(False)
                    return
                await self._beat()
            now_s, lease_s = self._clock(), self._settings.lease_s
            if self._was_away or now_s - self._last_beat_s > lease_s * 2 / 3:
                self._may_adopt_s = now_s + lease_s / 2
            self._was_away, self._last_beat_s = False, now_s
            if self._adopting is not None and not self._adopting.done():
                # A gateway may have left since the running task looked.
                self._adopting.add_done_callback(lambda _: self.hurry())
            elif now_s >= self._may_adopt_s:
                self._adopting = asyncio.create_task(self._adopt_orphans())
        except (RedisAwayError, TimeoutError) as error:
            why = self._health.describe(error)
            if not self._was_away and self._health.may_complain(why):
                _LOG.warning("%s (%s)", why, detail_of(error))
            self._was_away = True
        except Exception as error:  # foreign content or a bug; the lease must still be renewed
            _log_failure("maintaining the response logs failed", error, self._health)

    def _turn_timeout_s(self) -> float:
        """The first turn may connect to a distant Redis. Later ones must leave time to renew the
        lease."""
        lease_s = self._settings.lease_s
        if not self._health.round_trip_s:
            return lease_s
        return min(self._health.patience_s(lease_s / 2, num_round_trips=6), lease_s)

    async def _beat(self) -> None:
        lease_ms, ttl_ms = int(self._settings.lease_s * 1000), int(self._settings.ttl_s * 1000)
        begun_s = self._clock()
        replies = await round_trip(
            self._redis,
            [
                ("SET", f"penstock:lease:{self.gateway_id}", b"1", "PX", lease_ms, "GET"),
                ("SADD", _GATEWAYS, self.gateway_id),
                ("PEXPIRE", _GATEWAYS, ttl_ms),
                ("PEXPIRE", _owned_key(self.gateway_id), ttl_ms),
                ("PEXPIRE", self.control_key, ttl_ms),
            ],
        )
        self._health.note_round_trip(self._clock() - begun_s)
        if self._health.is_slow and self._health.may_complain(SLOW, every_s=_SLOW_EVERY_S):
            text = "%s: a round trip takes %.2f s, and tokens of stored responses wait for it"
            _LOG.warning(text, STATES[SLOW], self._health.round_trip_s)
        failures = [reply for reply in replies if isinstance(reply, Exception)]
        if isinstance(replies[0], Exception):
            raise replies[0]
        self._has_lost_lease |= replies[0] is None
        await self._on_beat(self._has_lost_lease)
        self._has_lost_lease = False
        if failures:
            raise failures[0]

    async def _others(self) -> list[str]:
        gateways = await ask(self._redis, "SMEMBERS", _GATEWAYS)
        return [name for name in _texts(gateways) if name != self.gateway_id]

    async def _tell(self, gateways: list[str], what: bytes, value: str) -> None:
        await round_trip(
            self._redis,
            [
                ("XADD", key, "MAXLEN", "~", _MAX_CONTROL_ENTRIES, "*", what, value)
                for key in map(_control_key, gateways)
            ],
        )

    # -- takeovers ----------------------------------------------------------------------------

    async def _adopt_orphans(self) -> None:
        with self._excused(level=logging.WARNING):
            for claim in list(self._claims.values()):
                with self._excused():
                    await self._enforce(claim)
            others = await self._others()
            leases = await round_trip(
                self._redis, [("EXISTS", f"penstock:lease:{other}") for other in others]
            )
            now_s, before = self._clock(), self._may_adopt_from_s
            self._may_adopt_from_s = {other: before[other] for other in others if other in before}
            for other, has_lease in zip(others, leases, strict=True):
                if isinstance(has_lease, Exception):  # its gateway cannot renew it either
                    self._may_adopt_from_s[other] = now_s + self._settings.lease_s
                elif has_lease:
                    self._orphaned_at_s.pop(other, None)
                elif now_s >= self._may_adopt_from_s.get(other, 0.0) and self._is_due(other):
                    with self._excused():
                        await self._adopt_all_of(other)

    def _is_due(self, gateway: str) -> bool:
        """Whether to take over the responses of a gateway that is gone."""
        orphaned_at_s = self._orphaned_at_s.setdefault(gateway, self._clock())
        waited_s = self._clock() - orphaned_at_s
        return self.can_run() or waited_s >= self._settings.without_engine_s

    async def _adopt_all_of(self, gateway: str) -> None:
        notes = _texts(await ask(self._redis, "SMEMBERS", _owned_key(gateway)))
        if not notes:
            self._orphaned_at_s.pop(gateway, None)
            gone: list[Command] = [("SREM", _GATEWAYS, gateway), ("DEL", _control_key(gateway))]
            await round_trip(self._redis, gone)
            return
        _LOG.warning("gateway %s is gone; it ran %d responses", gateway, len(notes))
        random.shuffle(notes)  # several gateways take over at the same time
        for begin in range(0, len(notes), _NUM_AT_ONCE):
            some = notes[begin : begin + _NUM_AT_ONCE]
            await asyncio.gather(*(self._adopt_one(gateway, note) for note in some))

    async def _adopt_one(self, gateway: str, note: str) -> None:
        with self._excused():
            claim = await self._claim_on(note)
            if claim is not None:
                self._claims[claim.response_id] = claim
                await self._enforce(claim)
            await ask(self._redis, "SREM", _owned_key(gateway), note)

    async def _claim_on(self, note: str) -> Claim | None:
        """The claim on a noted response; None if it has ended, the note has another epoch, or note
        or stream are not ours."""
        epoch_text, _, response_id = note.partition(" ")
        key = log_key(response_id)
        if key is None or not (epoch_text.isascii() and epoch_text.isdigit()):
            return None
        (found,) = await round_trip(self._redis, [read_last(key)])
        last = unless_foreign(found)
        if not last:
            return None
        ((entry_id, fields),) = last
        epoch = int(epoch_text)
        if parse_id(entry_id)[0] != epoch or ends(fields):
            return None
        return Claim(response_id=response_id, key=key, epoch=epoch + 1)

    async def _enforce(self, claim: Claim) -> None:
        """Fence a response off from its owner and continue it, unless another gateway was faster.
        May be repeated after any failure."""
        note = self.note(claim.response_id, claim.epoch)
        await ask(self._redis, *note)
        fence = add_fence(claim.key, claim.epoch, self.gateway_id)
        (fenced,) = await round_trip(self._redis, [fence])
        if isinstance(fenced, Exception):  # refused, or stored although the reply was lost
            fence_id = f"{claim.epoch}-0"
            (reply,) = await round_trip(self._redis, [("XRANGE", claim.key, fence_id, fence_id)])
            found = unless_foreign(reply)
            fenced = found and found[0][1].get(FENCE) == self.gateway_id.encode()
        if fenced:
            await self._adopt(claim)
        else:
            await ask(self._redis, *self.forget(claim.response_id, claim.epoch))
        del self._claims[claim.response_id]

    @contextlib.contextmanager
    def _excused(self, *, level: int = logging.DEBUG) -> Iterator[None]:
        """Logs errors, so that one response does not prevent the takeover of others. A later look
        tries it again."""
        try:
            yield
        except RedisAwayError as error:
            if level == logging.DEBUG or self._health.may_complain("takeovers"):
                _LOG.log(level, "cannot take over responses now: %s", error)
        except Exception as error:
            _log_failure("taking over responses failed", error, self._health)


def _log_failure(what: str, error: Exception, health: RedisHealth) -> None:
    """Log an error that is not an absence of Redis. Foreign content is no bug, and stays."""
    if not is_foreign(error):
        _LOG.error(what, exc_info=error)
    elif health.may_complain(what, every_s=FOREIGN_EVERY_S):
        _LOG.warning("%s: Redis holds what this server did not write (%s)", what, detail_of(error))


def _texts(members: Iterable[bytes]) -> list[str]:
    """The members of a set of ours; foreign bytes are left out."""
    texts = []
    for member in members:
        with contextlib.suppress(UnicodeDecodeError):
            texts.append(member.decode())
    return texts


def _owned_key(gateway_id: str) -> str:
    return f"penstock:owned:{gateway_id}"


def _control_key(gateway_id: str) -> str:
    return f"penstock:control:{gateway_id}"
