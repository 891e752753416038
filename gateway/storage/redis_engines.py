"""The engines that serve a model, on any machine, in Redis.

penstock:engines:{<model>}              a set: their addresses
penstock:engines:{<model>}:<address>    msgpack of an `EngineRecord`, with the lease as its TTL
penstock:engines:{<model>}:version      counts joins and leaves: gateways read the rest when it
                                        has changed, and every `FULL_READ_S`

An engine renews its record once a second. One that ends removes it; that of one that has died ends
with the lease.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection
from typing import cast

import msgspec

from penstock.gateway.storage.redis_link import RedisLink

LEASE_S = 3.0
FULL_READ_S = 5.0  # engines whose lease ended change no version
_MAX_ENGINES = 100_000  # more are no pool of ours


class EngineRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself.

    Attributes:
        address: HOST:PORT, for gateways.
        cache_root: what its KV depends on, hashed.
        num_requests: running and waiting.
        adapters: names of those of its command line.
    """

    address: str
    model: str
    cache_root: bytes
    block_size: int
    num_requests: int = 0
    num_tokens_waiting: int = 0
    adapters: tuple[str, ...] = ()


_decode = msgspec.msgpack.Decoder(EngineRecord).decode


class RedisEngines:
    """
    Args:
        model: the first of its names in the API.
    """

    def __init__(
        self, link: RedisLink, model: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._link = link
        digest = hashlib.sha256(model.encode()).hexdigest()[:32]
        self._key = f"penstock:engines:{{{digest}}}"
        self._clock = clock
        self._version: object = None
        self._read_s = 0.0
        self._addresses: Collection[str] = ()

    async def register(self, record: EngineRecord) -> None:
        """Write or renew an engine's record.

        Raises:
            StoreUnavailableError: Redis does not answer.
        """
        with self._link.answering(self._key):
            client, lease_ms = self._link.client, round(LEASE_S * 1000)
            encoded = msgspec.msgpack.encode(record)
            await client.set(f"{self._key}:{record.address}", encoded, px=lease_ms)
            if await client.sadd(self._key, record.address):  # it is new
                await client.incr(f"{self._key}:version")

    async def withdraw(self, address: str) -> None:
        """Remove an engine's record. Raises as `register`."""
        with self._link.answering(self._key):
            client = self._link.client
            await client.delete(f"{self._key}:{address}")
            await client.srem(self._key, address)
            await client.incr(f"{self._key}:version")

    async def addresses(self) -> Collection[str]:
        """Those of the engines whose lease lasts. Raises as `register`."""
        with self._link.answering(self._key):
            version = await self._link.client.get(f"{self._key}:version")
        now_s = self._clock()
        if version != self._version or now_s - self._read_s >= FULL_READ_S:
            self._addresses = {record.address for record in await self.records()}
            self._version, self._read_s = version, now_s
        return self._addresses

    async def records(self) -> list[EngineRecord]:
        """Those of the engines whose lease lasts. Raises as `register`."""
        with self._link.answering(self._key):
            client = self._link.client
            named = cast("set[bytes]", await client.smembers(self._key))
            members = sorted(each.decode(errors="replace") for each in named)[:_MAX_ENGINES]
            if not members:
                return []
            keys = [f"{self._key}:{address}" for address in members]
            found = cast("list[bytes | None]", await client.mget(keys))
            dead = [address for address, value in zip(members, found, strict=True) if value is None]
            if dead:  # one that lives adds itself again
                await client.srem(self._key, *dead)
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
