"""The engines that serve a model, on any machine, in Redis.

penstock:engines:{<model>}              a set: their addresses
penstock:engines:{<model>}:<address>    msgpack of an `EngineRecord`, with the lease as its TTL
penstock:engines:{<model>}:version      counts joins and leaves
penstock:engines:{<model>}:changes      the latest of them by their number: `<number> +<address>`
                                        of one that joined, `-` of one that left

An engine renews its record once a second. One that ends removes it; that of one that has died ends
with the lease.

A gateway asks for the version once a second, and reads the changes since its own. It reads all
records at first, where changes are missing (they were trimmed, Redis has lost them, or an engine of
an earlier version wrote none), and seldom otherwise: an ended lease is noticed by the first gateway
that reads all, which tells the others by a change.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Collection, Sequence
from typing import cast

import msgspec

from penstock.gateway.storage.redis.link import RedisLink, Script

LEASE_S = 3.0
# Between reads of all records: as many seconds as keep a gateway's share of Redis small.
MIN_FULL_READ_S = 5.0
MAX_FULL_READ_S = 60.0
RECORDS_PER_S = 20.0  # that a gateway reads on average, within these bounds
_JITTER = 0.25
_MAX_ENGINES = 100_000  # more are no pool of ours
_MAX_CHANGES = 4096  # kept for gateways that were away
_CHANGES_TTL_S = 600
_MAX_FORGET = 500  # addresses of a script

# Numbers begin with the time in ms, so that none comes again after Redis has lost the last one.
_CHANGE = f"""
local function change(what)
  if redis.call('EXISTS', KEYS[2]) == 0 then
    local now = redis.call('TIME')
    redis.call('SET', KEYS[2], now[1] * 1000 + math.floor(now[2] / 1000))
  end
  local number = redis.call('INCR', KEYS[2])
  redis.call('ZADD', KEYS[3], number, number .. ' ' .. what)
  redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', number - {_MAX_CHANGES})
  redis.call('EXPIRE', KEYS[3], {_CHANGES_TTL_S})
end
"""
# KEYS: set, version, changes, record; ARGV: address, value of the record, lease in ms
_JOIN = Script(
    _CHANGE
    + """
redis.call('SET', KEYS[4], ARGV[2], 'PX', ARGV[3])
if redis.call('SADD', KEYS[1], ARGV[1]) == 1 then change('+' .. ARGV[1]) end
return 0
"""
)
# KEYS: set, version, changes, and records that may be gone; ARGV: their addresses
_FORGET = Script(
    _CHANGE
    + """
for index, address in ipairs(ARGV) do
  if redis.call('EXISTS', KEYS[index + 3]) == 0 and redis.call('SREM', KEYS[1], address) == 1 then
    change('-' .. address)
  end
end
return 0
"""
)


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself.

    Attributes:
        address: HOST:PORT, for gateways.
        cache_root: what its KV depends on, hashed.
        num_requests: running and waiting.
        queue_s: predicted seconds until the waiting tokens have left the queue.
        adapters: names of those of its command line.
    """

    address: str
    model: str
    cache_root: bytes
    block_size: int
    num_requests: int = 0
    num_tokens_waiting: int = 0
    queue_s: float = 0.0
    adapters: tuple[str, ...] = ()


_decode = msgspec.msgpack.Decoder(EngineRecord).decode


def full_read_s(num_engines: int) -> float:
    """Mean seconds between two reads of all records."""
    return min(max(num_engines / RECORDS_PER_S, MIN_FULL_READ_S), MAX_FULL_READ_S)


class RedisEngines:
    """
    Args:
        model: the first of its names in the API.
        rng: spreads the gateways' reads.
    """

    def __init__(
        self,
        link: RedisLink,
        model: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._link = link
        digest = hashlib.sha256(model.encode()).hexdigest()[:32]
        self._key = f"penstock:engines:{{{digest}}}"
        self._shared_keys = (self._key, f"{self._key}:version", f"{self._key}:changes")
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311
        self._version: int | None = None  # of `_addresses`
        self._read_again_s = 0.0
        self._addresses: set[str] = set()

    async def register(self, record: EngineRecord) -> None:
        """Write or renew an engine's record.

        Raises:
            StoreUnavailableError: Redis does not answer.
        """
        keys = (*self._shared_keys, f"{self._key}:{record.address}")
        args = (record.address, msgspec.msgpack.encode(record), round(LEASE_S * 1000))
        await self._link.run(_JOIN, keys, args)

    async def withdraw(self, address: str) -> None:
        """Remove an engine's record. Raises as `register`."""
        with self._link.answering(self._key):
            await self._link.client.delete(f"{self._key}:{address}")
        await self._forget([address])

    async def addresses(self) -> Collection[str]:
        """The addresses of the engines whose lease lasts. Raises as `register`."""
        _, version_key, _ = self._shared_keys
        with self._link.answering(self._key):
            found = cast("bytes | None", await self._link.client.get(version_key))
            try:
                version = int(found or 0)
            except ValueError as error:
                raise self._link.unreadable(version_key, error) from error
            if self._clock() >= self._read_again_s or not await self._follow(version):
                # Changes from here on may be known already; applied again, they do no harm.
                self._addresses = {record.address for record in await self.records()}
                self._version = version
                mean_s = full_read_s(len(self._addresses))
                wait_s = mean_s * self._rng.uniform(1.0 - _JITTER, 1.0 + _JITTER)
                self._read_again_s = self._clock() + wait_s
        return self._addresses.copy()

    async def _follow(self, version: int) -> bool:
        """Apply the changes up to this version; False if there are none of some of them."""
        known = self._version
        if known is None or version < known:
            return False
        if version == known:
            return True
        _, _, changes_key = self._shared_keys
        read = self._link.client.zrangebyscore
        found = cast("list[bytes]", await read(changes_key, known + 1, version))
        if len(found) != version - known:
            return False
        for change in found:
            _, _, text = change.decode(errors="replace").partition(" ")
            address = text[1:]
            if text.startswith("+"):
                self._addresses.add(address)
            else:
                self._addresses.discard(address)
        self._version = version
        return True

    async def _forget(self, addresses: Sequence[str]) -> None:
        """Remove engines without a record, and tell the gateways."""
        for start in range(0, len(addresses), _MAX_FORGET):
            part = addresses[start : start + _MAX_FORGET]
            keys = [*self._shared_keys, *(f"{self._key}:{address}" for address in part)]
            await self._link.run(_FORGET, keys, part)

    async def records(self) -> list[EngineRecord]:
        """The records of the engines whose lease lasts. Raises as `register`."""
        with self._link.answering(self._key):
            client = self._link.client
            named = cast("set[bytes]", await client.smembers(self._key))
            members = sorted(each.decode(errors="replace") for each in named)[:_MAX_ENGINES]
            if not members:
                return []
            keys = [f"{self._key}:{address}" for address in members]
            found = cast("list[bytes | None]", await client.mget(keys))
            dead = [address for address, value in zip(members, found, strict=True) if value is None]
            await self._forget(dead)  # one that lives adds itself again
        records = []
        for address, value in zip(members, found, strict=True):
            try:
                record = None if value is None else _decode(value)
            except msgspec.MsgspecError as error:
                raise self._link.unreadable(f"{self._key}:{address}", error) from error
            # The set's member counts: connections go nowhere that it does not name.
            if record is not None and record.address == address:
                records.append(record)
        return records

    async def close(self) -> None:
        await self._link.aclose()
