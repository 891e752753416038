"""This gateway among the others: its heartbeats, what they tell each other, and the responses that
it takes over (`leases` decides, `redis_steps` knows how).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio import Redis

from penstock.gateway.storage.redis.errors import (
    SLOW,
    STATES,
    RedisAwayError,
    detail_of,
    is_foreign,
)
from penstock.gateway.storage.redis.health import FOREIGN_EVERY_S, RedisHealth
from penstock.gateway.storage.redis.trips import Command, ask, drive, drive_all, round_trip
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.response_log.redis_steps import (
    GATEWAYS,
    Takeovers,
    beat,
    control_key,
    lease_key,
    others,
    owned_key,
    scan,
    texts,
)
from penstock.gateway.storage.response_log.redis_stream import cancel_key, steer_key

_LOG = logging.getLogger(__name__)
_NUM_AT_ONCE = 16  # responses taken over
_MAX_CONTROL_ENTRIES = 1000
_CANCEL_S = 60
_SLOW_EVERY_S = 600.0  # between two warnings


class Gateways:
    """All gateways, as this one meets them.

    Args:
        takeovers: this gateway's.
        health: notes the round trips of heartbeats, and why they failed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        redis: Redis,
        settings: RedisLogSettings,
        takeovers: Takeovers,
        *,
        health: RedisHealth,
        clock: Callable[[], float],
    ) -> None:
        self._redis = redis
        self._settings = settings
        self._takeovers = takeovers
        self._me = takeovers.gateway_id
        self._leases = takeovers.leases
        self._health = health
        self._clock = clock

    # -- heartbeats ---------------------------------------------------------------------------

    @property
    def patience_s(self) -> float:
        """The first heartbeat may connect to a distant Redis. Later ones must leave time to renew
        the lease."""
        lease_s = self._settings.lease_s
        if not self._health.round_trip_s:
            return lease_s
        return min(self._health.patience_s(lease_s / 2, num_round_trips=6), lease_s)

    async def beat(self) -> Exception | None:
        """Renew the lease. Returns and raises as `redis_steps.beat`."""
        begun_s = self._clock()
        steps = beat(self._takeovers, lease_s=self._settings.lease_s, ttl_s=self._settings.ttl_s)
        failure = await drive(self._redis, steps)
        self._health.note_round_trip(self._clock() - begun_s)
        if self._health.is_slow and self._health.may_complain(SLOW, every_s=_SLOW_EVERY_S):
            text = "%s: a round trip takes %.2f s, and tokens of stored responses wait for it"
            _LOG.warning(text, STATES[SLOW], self._health.round_trip_s)
        return failure

    # -- the others ---------------------------------------------------------------------------

    async def cancel(self, response_id: str) -> None:
        """Tell the gateway that runs a response, or takes it over, to stop it.

        Raises:
            RedisAwayError: Redis is unavailable.
        """
        _, gateways = await round_trip(
            self._redis,
            [("SET", cancel_key(response_id), b"1", "EX", _CANCEL_S), ("SMEMBERS", GATEWAYS)],
            is_strict=True,
        )
        await self._tell(texts(gateways), b"cancel", response_id)

    async def steer(self, response_id: str, steer_id: str, text: str) -> None:
        """Tell the gateway that runs a response of a steer. One that takes it over later must be
        told again.

        Raises:
            RedisAwayError: Redis is unavailable.
        """
        key = steer_key(response_id, steer_id)
        commands: list[Command] = [("SET", key, text, "EX", _CANCEL_S), ("SMEMBERS", GATEWAYS)]
        _, gateways = await round_trip(self._redis, commands, is_strict=True)
        await self._tell(texts(gateways), b"steer", f"{response_id} {steer_id}")

    async def leave(self) -> None:
        """Give up the lease and tell the other gateways, which take over this one's responses.

        Raises:
            RedisAwayError: Redis is unavailable.
        """
        names = await drive(self._redis, others(self._me))
        commands: list[Command] = [("DEL", lease_key(self._me))]
        if not await ask(self._redis, "EXISTS", owned_key(self._me)):
            commands.append(("SREM", GATEWAYS, self._me))
            commands.append(("DEL", control_key(self._me)))
        await round_trip(self._redis, commands)
        await self._tell(names, b"look", "")

    async def are_there(self) -> bool:
        """Whether another gateway lives.

        Raises:
            RedisAwayError: Redis is unavailable.
        """
        names = await drive(self._redis, others(self._me))
        return 1 in await round_trip(self._redis, [("EXISTS", lease_key(name)) for name in names])

    async def _tell(self, names: Sequence[str], what: bytes, value: str) -> None:
        await round_trip(
            self._redis,
            [
                ("XADD", key, "MAXLEN", "~", _MAX_CONTROL_ENTRIES, "*", what, value)
                for key in map(control_key, names)
            ],
        )

    # -- takeovers ----------------------------------------------------------------------------

    async def take_over_all(self, can_run: Callable[[], bool]) -> None:
        """Take over the responses of gateways that are gone. What fails, is tried again by the next
        call."""
        finish = self._takeovers.finish
        for claim in list(self._leases.claims.values()):
            self._excuse(await drive_all(self._redis, [finish(claim)]))
        try:
            found = await drive(self._redis, scan(self._takeovers, self._clock, can_run))
        except Exception as error:
            self._excuse([error], level=logging.WARNING)
            return
        for name, notes in found:
            _LOG.warning("gateway %s is gone; it ran %d responses", name, len(notes))
            random.shuffle(notes)  # several gateways take over at the same time
            for begin in range(0, len(notes), _NUM_AT_ONCE):
                some = notes[begin : begin + _NUM_AT_ONCE]
                steps = [self._takeovers.take_over(name, each) for each in some]
                self._excuse(await drive_all(self._redis, steps))

    def _excuse(self, results: Sequence[Any], *, level: int = logging.DEBUG) -> None:
        """Log errors, which must not prevent the takeover of other responses."""
        for error in results:
            if isinstance(error, RedisAwayError):
                if level == logging.DEBUG or self._health.may_complain("takeovers"):
                    _LOG.log(level, "cannot take over responses now: %s", error)
            elif isinstance(error, Exception):
                log_failure("taking over responses failed", error, self._health)


def log_failure(what: str, error: Exception, health: RedisHealth) -> None:
    """Log an error that is not an absence of Redis. Foreign content is no bug, and stays."""
    if not is_foreign(error):
        _LOG.error(what, exc_info=error)
    elif health.may_complain(what, every_s=FOREIGN_EVERY_S):
        _LOG.warning("%s: Redis holds what this server did not write (%s)", what, detail_of(error))
