"""Tickets in Redis, so that any gateway accepts a ticket that another has issued.

    penstock:ticket:<digest>    the id of the key that requested it; deleted by its first use

While Redis is unavailable a gateway accepts only tickets that it issues itself in that time.
"""

from __future__ import annotations

import hashlib

from penstock.gateway.auth.tickets import TICKET_TTL_S, MemoryTickets, new_ticket
from penstock.gateway.storage.conversations.store import StoreUnavailableError, UnreadableDataError
from penstock.gateway.storage.redis.link import RedisLink


class RedisTickets:
    """`Tickets` shared by all gateways of one Redis."""

    def __init__(self, link: RedisLink) -> None:
        self._link = link
        self._own = MemoryTickets()

    async def issue(self, key_id: str) -> str:
        ticket = new_ticket()
        key = _key(ticket)
        try:
            with self._link.answering(key):
                await self._link.client.set(key, key_id, ex=TICKET_TTL_S)
        except StoreUnavailableError:
            return await self._own.issue(key_id)
        return ticket

    async def redeem(self, ticket: str) -> str | None:
        key_id = await self._own.redeem(ticket)
        if key_id is not None:
            return key_id
        key = _key(ticket)
        try:
            with self._link.answering(key):
                found = await self._link.client.getdel(key)
        except (StoreUnavailableError, UnreadableDataError):
            return None
        return found.decode() if isinstance(found, bytes) else found


def _key(ticket: str) -> str:
    return f"penstock:ticket:{hashlib.sha256(ticket.encode()).hexdigest()}"
