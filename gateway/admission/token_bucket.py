"""A bucket that refills steadily: limits per minute, with bursts of a minute's worth.

Pure; the time is an argument.
"""

from __future__ import annotations

_EPSILON = 1e-6  # of rounding, when exactly as long was waited as was told


class TokenBucket:
    """Starts full. What is taken may exceed what was asked for, so its level may be a debt.

    Args:
        per_minute: its capacity, and what flows in in a minute.
    """

    def __init__(self, per_minute: float, now_s: float) -> None:
        self.capacity = per_minute
        self._level = per_minute
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        self._level += max(0.0, now_s - self._at_s) * self.capacity / 60.0
        self._level = min(self._level, self.capacity)
        self._at_s = max(now_s, self._at_s)
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Until so much is there, 0 if it is; of what is more than a full bucket, until full."""
        missing = min(amount, self.capacity) - self.level(now_s)
        return missing * 60.0 / self.capacity if missing > _EPSILON else 0.0

    def take(self, amount: float, now_s: float) -> None:
        """Take out, or with a negative amount give back."""
        self._level = min(self.level(now_s) - amount, self.capacity)

    def resize(self, per_minute: float, now_s: float) -> None:
        """A new limit; what was used stays used."""
        used = self.capacity - self.level(now_s)
        self.capacity = per_minute
        self._level = per_minute - used
