"""What Redis holds of responses and of the gateways that run them. Gateways of different versions
share it, so it is as fixed as any interface.

    penstock:log:{tree}:<response>  a stream: <epoch>-<number>, and as the only field
                                    h header | d delta | e end | f fence | x broken
    penstock:gateways               ids of all gateways
    penstock:lease:<gateway>        exists while it lives
    penstock:owned:<gateway>        "<epoch> <response>" of what it runs
    penstock:control:<gateway>      a stream of commands to it
"""

from __future__ import annotations

from collections.abc import Mapping

import redis

from penstock.gateway.storage.conversations.ids import tree_of
from penstock.gateway.storage.response_log.redis_store import RedisLogStore

from .records import until

_LONG_MS = 3_600_000


def log_key(response_id: str) -> str:
    return f"penstock:log:{{{tree_of(response_id)}}}:{response_id}"


def lease_key(store: RedisLogStore) -> str:
    return f"penstock:lease:{store.gateway_id}"


def owned_key(store: RedisLogStore) -> str:
    return f"penstock:owned:{store.gateway_id}"


def owned(client: redis.Redis, store: RedisLogStore) -> Mapping[str, int]:
    """The epochs of the responses that a gateway has noted as its own."""
    notes = [note.decode().split(" ") for note in client.smembers(owned_key(store))]
    return {response_id: int(epoch) for epoch, response_id in notes}


def entries(client: redis.Redis, response_id: str) -> list[tuple[int, int, str]]:
    """Epoch, number and kind of what is in a response's stream."""
    found = []
    for entry_id, fields in client.xrange(log_key(response_id)):
        epoch, number = map(int, entry_id.split(b"-"))
        kind, *_ = fields
        found.append((epoch, number, kind.decode()))
    return found


def num_deltas(client: redis.Redis, response_id: str, epoch: int) -> int:
    """Written under an epoch."""
    found = entries(client, response_id)
    return sum(kind == "d" and written == epoch for written, _, kind in found)


def is_broken(client: redis.Redis, response_id: str) -> bool:
    """Whether Redis knows that the rest is missing."""
    return entries(client, response_id)[-1][2] == "x"


def add_fence(client: redis.Redis, response_id: str, epoch: int, gateway_id: str) -> None:
    """As a gateway does that takes a response over."""
    client.xadd(log_key(response_id), {"f": gateway_id}, id=f"{epoch}-0", nomkstream=True)


async def lapse(client: redis.Redis, store: RedisLogStore) -> None:
    """The lease of a gateway that cannot renew it ends now."""
    await until(lambda: not client.delete(lease_key(store)))  # the last renewal may be on its way


async def beats(client: redis.Redis, store: RedisLogStore, num: int = 3) -> None:
    """Wait for so many heartbeats that begin from now on: each renews the lease."""
    for _ in range(num):
        await until(lambda: client.pexpire(lease_key(store), _LONG_MS))
        await until(lambda: client.pttl(lease_key(store)) < _LONG_MS - _LONG_MS // 10)
