"""When to try again, and how long to wait before: pure policy, with the dice handed in."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .errors import ConnectionLostError, PenstockError, RefusedError, UnreachableError

_REFUSED_FOR_NOW = (408, 425, 429, 503)  # nothing was begun
_UNCLEAR = (500, 502, 504)  # something may have been


def _say_nothing(_: PenstockError, __: float) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How patient a client is.

    Attributes:
        max_retries: of a request that was refused for now, or did not get through.
        max_resumes: attempts in a row to go on with a stream that brought nothing new; with the
            default waits the last is some 40 s after the first.
        max_retry_after_s: a server that wants more patience than this gets none.
        on_wait: is told of every failure that is made up for, and the seconds until then.
        first_wait_s: doubled with each attempt, up to `max_wait_s`.
    """

    max_retries: int = 2
    max_resumes: int = 9
    max_retry_after_s: float = 60.0
    on_wait: Callable[[PenstockError, float], None] = _say_nothing
    first_wait_s: float = 0.25
    max_wait_s: float = 8.0
    draw: Callable[[], float] = random.random

    def wait_s(
        self, error: PenstockError, attempt: int, *, is_repeatable: bool, is_resuming: bool = False
    ) -> float | None:
        """Seconds to wait before trying again; None: give up.

        Args:
            attempt: how many there were since the last one that brought something, from 1.
            is_repeatable: whether it may be sent again though it may have arrived.
            is_resuming: it goes on with a stream that had begun.
        """
        if attempt > (self.max_resumes if is_resuming else self.max_retries):
            return None
        if not self._is_worth_it(error, is_repeatable=is_repeatable or is_resuming):
            return None
        if isinstance(error, RefusedError) and (told_s := error.retry_after_s) is not None:
            return told_s if told_s <= self.max_retry_after_s else None
        if is_resuming and attempt == 1:
            return 0.0  # most connections that break can be made again at once
        wait_s = min(self.first_wait_s * 2.0 ** (attempt - 1), self.max_wait_s)
        return float(wait_s * (0.5 + 0.5 * self.draw()))

    def _is_worth_it(self, error: PenstockError, *, is_repeatable: bool) -> bool:
        if isinstance(error, UnreachableError):
            return True
        if isinstance(error, ConnectionLostError):
            return is_repeatable
        if not isinstance(error, RefusedError):
            return False
        told = error.headers.get("x-should-retry", "").lower()
        if told in ("true", "false"):
            return told == "true"
        return error.status in _REFUSED_FOR_NOW or (error.status in _UNCLEAR and is_repeatable)
