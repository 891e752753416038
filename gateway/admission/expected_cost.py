"""What a request will probably take: uncached prompt tokens, and as much output as is usual here.

Learned per tenant from requests that ended; at first every prompt counts whole, and output as far
as it may go, up to a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_OUTPUT = 256.0  # tokens
_WEIGHT = 0.1  # of the newest request in the means


@dataclass(slots=True)
class _Habit:
    cached_share: float = 0.0
    output_tokens: float = _FIRST_OUTPUT


class ExpectedCost:
    """Means by tenant."""

    def __init__(self) -> None:
        self._habits: dict[str, _Habit] = {}

    def prompt_tokens(self, tenant: str, num_prompt: int) -> float:
        """Those that will have to be computed."""
        habit = self._habits.get(tenant)
        return num_prompt * (1.0 - (0.0 if habit is None else habit.cached_share))

    def output_tokens(self, tenant: str, most: int) -> float:
        """Of one output that may have so many."""
        habit = self._habits.get(tenant)
        return min(most, _FIRST_OUTPUT if habit is None else habit.output_tokens)

    def learn(self, tenant: str, *, num_prompt: int, num_cached: int, output_tokens: float) -> None:
        """What a request of it took, its output as a mean over its branches."""
        habit = self._habits.setdefault(tenant, _Habit())
        habit.cached_share += _WEIGHT * (num_cached / max(num_prompt, 1) - habit.cached_share)
        habit.output_tokens += _WEIGHT * (output_tokens - habit.output_tokens)
