"""Changes of the adapters that a server has, in Redis: its gateways share them.

penstock:adapters:<server>    a hash: name → msgpack of the adapter, nil if it was unloaded
"""

from __future__ import annotations

import hashlib
from typing import cast

import msgspec

from penstock.engine.request import Adapter
from penstock.gateway.storage.redis.link import RedisLink

_TTL_S = 7 * 86400  # renewed by every gateway that reads
_decode = msgspec.msgpack.Decoder(Adapter | None).decode


class RedisAdapterChanges:
    """
    Args:
        server: what all gateways of one server have in common, and no other server: the address
            of their engine.
    """

    is_shared = True

    def __init__(self, link: RedisLink, *, server: str) -> None:
        self._link = link
        self._key = f"penstock:adapters:{hashlib.sha256(server.encode()).hexdigest()[:32]}"

    async def read(self) -> dict[str, Adapter | None]:
        with self._link.answering(self._key):
            found = await self._link.client.hgetall(self._key)
            if found:
                await self._link.client.expire(self._key, _TTL_S)
        try:
            return {
                name.decode(): _decode(value)
                for name, value in cast("dict[bytes, bytes]", found).items()
            }
        except ValueError as error:
            raise self._link.unreadable(self._key, error) from error

    async def write(self, name: str, adapter: Adapter | None) -> None:
        with self._link.answering(self._key):
            await self._link.client.hset(self._key, name, msgspec.msgpack.encode(adapter))
            await self._link.client.expire(self._key, _TTL_S)
