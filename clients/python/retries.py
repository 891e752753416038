"""When to retry, and how long to wait before: pure policy; `draw` supplies random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .errors import ConnectionLostError, PenstockError, RefusedError, UnreachableError

_REFUSED_FOR_NOW = (408, 425, 429, 503)  # nothing was started
_UNCLEAR = (500, 502, 504)  # something may have been started


def _say_nothing(_: PenstockError, __: float) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When and how often a client retries.

    Attributes:
        max_retries: of a request that was temporarily refused, or did not get through.
        max_resumes: consecutive attempts to resume a stream without a new event; with the default
            waits, the last is some 40 s after the first.
        max_retry_after_s: a longer wait requested by the server is not accepted: the error is
            raised.
        on_wait: called with every failure that will be retried, and the seconds until then.
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
        """Seconds to wait before a retry; None: give up.

        Args:
            attempt: number of attempts since the last one that made progress, from 1.
            is_repeatable: whether it may be sent again even if it may have arrived.
            is_resuming: it resumes a stream.
        """
        if attempt > (self.max_resumes if is_resuming else self.max_retries):
            return None
        if not self._is_worth_it(error, is_repeatable=is_repeatable or is_resuming):
            return None
        if isinstance(error, RefusedError) and (told_s := error.retry_after_s) is not None:
            return told_s if told_s <= self.max_retry_after_s else None
        if is_resuming and attempt == 1:
            return 0.0  # most lost connections can be reopened at once
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
