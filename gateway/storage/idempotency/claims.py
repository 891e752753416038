"""The contract of a store of claims, and its implementation in this process's memory.

A claim says which response a key stands for. It is stored before the response begins, so that of
several requests with one key, at any gateways, one begins it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

_MAX_CLAIMS = 100_000  # in memory; some 50 MB


class Claim(msgspec.Struct, frozen=True):
    """What a key stands for.

    Attributes:
        digest: of the request's body.
        response_id: differs for any two claims.
        created_at: seconds since the epoch.
    """

    digest: str
    response_id: str
    created_at: int


encode_claim = msgspec.msgpack.Encoder().encode
decode_claim = msgspec.msgpack.Decoder(Claim).decode


class ClaimStore(Protocol):
    """Claims by key: an id that tells tenant, endpoint and key apart. They are kept as long as an
    ended response can be resumed."""

    async def claim(self, key: str, claim: Claim) -> Claim:
        """Store a claim, unless the key has one already; returns the one that it has now.

        Raises:
            StoreUnavailableError: it cannot be stored now.
        """
        ...

    async def find(self, key: str) -> Claim | None:
        """A key's claim. Raises as `claim`."""
        ...

    async def give_back(self, key: str) -> None:
        """Delete a claim whose response has not begun. Raises as `claim`."""
        ...


class MemoryClaims:
    """Claims of this process; the oldest go when there are too many.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._claims: OrderedDict[str, tuple[float, Claim]] = OrderedDict()

    async def claim(self, key: str, claim: Claim) -> Claim:
        self._drop_old()
        return self._claims.setdefault(key, (self._clock(), claim))[1]

    async def find(self, key: str) -> Claim | None:
        self._drop_old()
        found = self._claims.get(key)
        return None if found is None else found[1]

    async def give_back(self, key: str) -> None:
        self._claims.pop(key, None)

    def _drop_old(self) -> None:
        horizon_s = self._clock() - self._ttl_s
        while self._claims:
            stored_s, _ = next(iter(self._claims.values()))
            if stored_s > horizon_s and len(self._claims) < _MAX_CLAIMS:
                return
            self._claims.popitem(last=False)
