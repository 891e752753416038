"""Which errors of a call to Redis mean that Redis cannot serve now. All others are our own.

Away: 503 `session_store_unavailable`; logs of running responses go on and are not resumable any
more. Our own: 500, and a traceback in the log; never counted as an absence of Redis. Every `except`
around a call to Redis decides by `is_away`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from redis import exceptions


class RedisAwayError(Exception):
    """Redis, or the node of a cluster that was needed, cannot serve now."""


_AWAY = (
    RedisAwayError,
    OSError,  # a TimeoutError is one
    # It is not reached, does not answer, loads its data, has no place for another connection, or
    # does not let us in.
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.InvalidResponse,  # no Redis is speaking there
    exceptions.AuthenticationWrongNumberOfArgsError,  # it knows no user names
    exceptions.NoPermissionError,
    # It may not write, or has no memory for it.
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    # A cluster without a node for the slot, or with one that is on its way to another node for
    # longer than we follow.
    exceptions.ClusterError,
    exceptions.SlotNotCoveredError,
    exceptions.TryAgainError,
    exceptions.AskError,
)
# The first words of replies that have no class of their own.
_AWAY_CODES = ("MISCONF", "NOREPLICAS", "BUSY", "UNBLOCKED")
_TOO_MANY_CLIENTS = "max number of clients"  # redis-py knows it of a server, not of a cluster


def is_away(error: BaseException) -> bool:
    """Whether it says that Redis cannot serve now, and not that it was asked something wrong."""
    if isinstance(error, _AWAY):
        return True
    text = str(error)
    return isinstance(error, exceptions.ResponseError) and (
        text.partition(" ")[0] in _AWAY_CODES or text.startswith(_TOO_MANY_CLIENTS)
    )


@contextlib.contextmanager
def away_told_apart() -> Iterator[None]:
    """What is done within talks to Redis.

    Raises:
        RedisAwayError: Redis cannot serve now. Any other error is raised as it is.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, RedisAwayError) or not is_away(error):
            raise
        raise RedisAwayError(f"{type(error).__name__}: {error}") from error
