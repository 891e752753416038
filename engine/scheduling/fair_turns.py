"""Whose turn it is: deficit round robin over tenants, by tokens, with weights.

In every round a tenant is served until its credit of `weight × quantum` tokens is used up. What it
takes beyond that (a request is served whole, and its output is charged when it ends) is a debt
that it sits out: it is next served in the first round whose credit is positive again. Instead of
walking through rounds that serve nobody, each tenant carries the number of the round it is in, and
the lowest is served.

A tenant that comes back from having nothing to do joins the present round: idleness earns no
credit, and cancels no debt.

Source: Shreedhar and Varghese, Efficient Fair Queuing Using Deficit Round Robin, SIGCOMM 1995; the
debt is surplus round robin's. Pure; not known here: requests, priorities.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

QUANTUM_TOKENS = 16.0  # as fine as it may be, since empty rounds cost nothing
_MAX_IDLE = 64  # accounts kept at least, before old ones are closed
Turn = tuple[int, int]  # round, place in it; a tenant's only grows


@dataclass(slots=True)
class _Account:
    turn: Turn
    credit: float  # tokens, more than 0


class FairTurns:
    """The accounts of tenants. Operations take constant time (closing accounts: amortised).

    Args:
        quantum_tokens: credit per round of a tenant of weight 1.
    """

    def __init__(self, quantum_tokens: float = QUANTUM_TOKENS) -> None:
        self._quantum = quantum_tokens
        self._accounts: dict[str, _Account] = {}
        self._round = 0  # of the tenant served last: no waiting one is behind it
        self._num_turns = 0
        self._max_accounts = _MAX_IDLE

    def join(self, tenant: str, weight: float) -> Turn:
        """A tenant has something to be served; its turn. Lower turns come first."""
        return self._account(tenant, weight).turn

    def turn(self, tenant: str) -> Turn:
        """Of a tenant that has joined and still waits."""
        return self._accounts[tenant].turn

    def serve(self, tenant: str) -> None:
        """A tenant that waits is being served: this is its round."""
        self._round = max(self._round, self._accounts[tenant].turn[0])

    def charge(self, tenant: str, weight: float, num_tokens: float) -> None:
        """A tenant has taken tokens, whether it waits or not."""
        account = self._account(tenant, weight)
        account.credit -= num_tokens
        if account.credit <= 0.0:
            each = self._quantum * weight
            num_rounds = math.floor(-account.credit / each) + 1
            account.credit += num_rounds * each
            account.turn = self._next_turn(account.turn[0] + num_rounds)

    def copy(self) -> FairTurns:
        """One to play through what is to come."""
        return copy.deepcopy(self)

    def _account(self, tenant: str, weight: float) -> _Account:
        """Brought into the present round, if its own is over."""
        account = self._accounts.get(tenant)
        if account is None or account.turn[0] < self._round:
            self._close_old()
            account = _Account(self._next_turn(self._round), self._quantum * weight)
            self._accounts[tenant] = account
        return account

    def _close_old(self) -> None:
        # An account whose round is over is as good as none.
        if len(self._accounts) >= self._max_accounts:
            self._accounts = {
                tenant: account
                for tenant, account in self._accounts.items()
                if account.turn[0] >= self._round
            }
            self._max_accounts = 2 * len(self._accounts) + _MAX_IDLE

    def _next_turn(self, number: int) -> Turn:
        self._num_turns += 1
        return number, self._num_turns
