"""Tickets: each opens one WebSocket once, for clients that cannot send a header and must not put
their key into a URL.

A ticket stands for the key that requested it, and is only valid while that key is. This module
keeps tickets in memory; `auth.redis_tickets` keeps them for all gateways.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

TICKET_TTL_S = 30
_MAX_TICKETS_OF_KEY = 1000  # beyond it the key's oldest is dropped: tickets last only seconds


class Tickets(Protocol):
    async def issue(self, key_id: str) -> str:
        """A new ticket; valid for `TICKET_TTL_S`."""
        ...

    async def redeem(self, ticket: str) -> str | None:
        """Use up a ticket: the id of the key that requested it; None if it is not valid."""
        ...


def new_ticket() -> str:
    return f"tkt_{secrets.token_urlsafe(32)}"


class MemoryTickets:
    """Tickets of this process.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tickets: OrderedDict[str, tuple[float, str]] = OrderedDict()  # until when, key id
        self._of_key: dict[str, dict[str, None]] = {}  # a key's tickets, oldest first

    async def issue(self, key_id: str) -> str:
        self._drop_old()
        of_key = self._of_key.setdefault(key_id, {})
        if len(of_key) >= _MAX_TICKETS_OF_KEY:
            self._pop(next(iter(of_key)))
        ticket = new_ticket()
        self._tickets[ticket] = (self._clock() + TICKET_TTL_S, key_id)
        self._of_key.setdefault(key_id, {})[ticket] = None
        return ticket

    async def redeem(self, ticket: str) -> str | None:
        self._drop_old()
        return self._pop(ticket)

    def _pop(self, ticket: str) -> str | None:
        _, key_id = self._tickets.pop(ticket, (0.0, None))
        if key_id is not None:
            del self._of_key[key_id][ticket]
            if not self._of_key[key_id]:
                del self._of_key[key_id]
        return key_id

    def _drop_old(self) -> None:
        now_s = self._clock()
        while self._tickets:
            ticket, (until_s, _) = next(iter(self._tickets.items()))
            if until_s > now_s:
                return
            self._pop(ticket)
