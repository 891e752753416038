"""Decides which errors of a call to Redis mean that Redis is unavailable. All others are bugs.

Unavailable ("away"): 503 `session_store_unavailable`; running responses continue, but their logs
are no longer resumable. A bug: 500 and a traceback in the log; it never counts as unavailable.
Every `except` around a call to Redis decides by `is_away`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from redis import exceptions


class RedisAwayError(Exception):
    """Redis, or the cluster's node that was needed, is unavailable."""


_AWAY = (
    RedisAwayError,
    OSError,  # a TimeoutError is one
    # Redis is unreachable, does not answer, is loading its data, accepts no more connections, or
    # refuses the login.
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.InvalidResponse,  # the server is not a Redis
    exceptions.AuthenticationWrongNumberOfArgsError,  # it has no user names
    exceptions.NoPermissionError,
    # Redis is read-only or out of memory.
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    # A cluster has no node for the slot, or the slot's move to another node takes too long.
    exceptions.ClusterError,
    exceptions.SlotNotCoveredError,
    exceptions.TryAgainError,
    exceptions.AskError,
)
# The first words of errors for which redis-py has no class.
_AWAY_CODES = ("MISCONF", "NOREPLICAS", "BUSY", "UNBLOCKED")
_TOO_MANY_CLIENTS = "max number of clients"  # redis-py has a class for it, but not with clusters


def is_away(error: BaseException) -> bool:
    """Whether the error means that Redis is unavailable, rather than that the call was wrong."""
    if isinstance(error, _AWAY):
        return True
    text = str(error)
    return isinstance(error, exceptions.ResponseError) and (
        text.partition(" ")[0] in _AWAY_CODES or text.startswith(_TOO_MANY_CLIENTS)
    )


@contextlib.contextmanager
def away_told_apart() -> Iterator[None]:
    """A context for calls to Redis.

    Raises:
        RedisAwayError: Redis is unavailable. Any other error is raised unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RedisAwayError) or not is_away(error):
            raise
        raise RedisAwayError(f"{type(error).__name__}: {error}") from error
