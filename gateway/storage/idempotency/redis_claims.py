"""Claims in Redis, shared by all gateways.

penstock:claim:<key>    msgpack of the claim
"""

from __future__ import annotations

from typing import cast

from penstock.gateway.storage.idempotency.claims import Claim, decode_claim, encode_claim
from penstock.gateway.storage.redis.link import RedisLink


class RedisClaims:
    def __init__(self, link: RedisLink, *, ttl_s: float) -> None:
        self._link = link
        self._ttl_ms = int(ttl_s * 1000)

    async def claim(self, key: str, claim: Claim) -> Claim:
        name = _name(key)
        while True:
            with self._link.answering(name):
                # A repetition after a lost reply finds its own claim.
                data = encode_claim(claim)
                if await self._link.client.set(name, data, nx=True, px=self._ttl_ms):
                    return claim
            if (found := await self.find(key)) is not None:
                return found

    async def find(self, key: str) -> Claim | None:
        name = _name(key)
        with self._link.answering(name):
            found = cast("bytes | None", await self._link.client.get(name))
        try:
            return None if found is None else decode_claim(found)
        except ValueError as error:
            raise self._link.unreadable(name, error) from error

    async def give_back(self, key: str) -> None:
        name = _name(key)
        with self._link.answering(name):
            await self._link.client.delete(name)


def _name(key: str) -> str:
    return f"penstock:claim:{key}"
