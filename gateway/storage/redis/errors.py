"""Decides which errors of a call to Redis mean that Redis is unavailable, and names them.

Unavailable ("away"): 503 `session_store_unavailable`; running responses continue, but their logs
are no longer resumable. A key with foreign content (`is_foreign`): somebody else wrote it, and only
what belongs to the key fails. All others are bugs: 500 and a traceback in the log. Every `except`
around a call to Redis decides by `is_away`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from redis import exceptions

_MAX_DETAIL_CHARS = 300
SLOW = "slow"


class RedisAwayError(Exception):
    """Redis, or the cluster's node that was needed, is unavailable.

    Attributes:
        state: why, as a key of `STATES`.
    """

    def __init__(self, text: str = "", *, state: str = "unreachable") -> None:
        super().__init__(text or STATES[state])
        self.state = state


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
# By how a reply begins. redis-py has a class for the first, but not with clusters; the second is
# the reply to a long command without a login.
_STATE_OF_BEGINNING = {
    "max number of clients": "too_many_clients",
    "Protocol error: unauthenticated": "unauthenticated",
}


def is_away(error: BaseException) -> bool:
    """Whether the error means that Redis is unavailable, rather than that the call was wrong."""
    if isinstance(error, _AWAY):
        return True
    text = str(error)
    return isinstance(error, exceptions.ResponseError) and (
        _code_of(text) in _AWAY_CODES or text.startswith(tuple(_STATE_OF_BEGINNING))
    )


def _code_of(text: str) -> str:
    """The first word of a reply, which names the error."""
    return text.partition(" ")[0]


# What the metric and `/health` call a state of Redis, and what messages call it.
STATES = {
    "ok": "Redis is well",
    SLOW: "Redis is slow",
    "timeout": "Redis does not answer",
    "unreachable": "Redis cannot be reached",
    "out_of_memory": "Redis is out of memory",
    "read_only": "Redis is a read-only replica",
    "loading": "Redis is loading its data",
    "disk_error": "Redis cannot write to its disk",
    "unauthenticated": "Redis refuses the login",
    "no_permission": "Redis does not permit its user this command or key",
    "cluster_down": "the Redis cluster is down",
    "master_down": "Redis is a replica that has lost its master",
    "busy": "Redis is busy with a script",
    "no_replicas": "Redis has too few replicas to accept writes",
    "too_many_clients": "Redis accepts no more connections",
    "moving": "the Redis cluster is moving a slot",
    "not_redis": "the server at the address of Redis is not a Redis",
}
# The first matching row counts, so a subclass must come before its base.
_STATE_OF_CLASS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
    (exceptions.OutOfMemoryError, "out_of_memory"),
    (exceptions.ReadOnlyError, "read_only"),
    (exceptions.BusyLoadingError, "loading"),
    (exceptions.NoPermissionError, "no_permission"),
    (
        (
            exceptions.AuthenticationError,
            exceptions.AuthorizationError,
            exceptions.AuthenticationWrongNumberOfArgsError,
            exceptions.ExternalAuthProviderError,
        ),
        "unauthenticated",
    ),
    (exceptions.MasterDownError, "master_down"),
    ((exceptions.TryAgainError, exceptions.AskError), "moving"),
    ((exceptions.ClusterError, exceptions.SlotNotCoveredError), "cluster_down"),
    (exceptions.MaxConnectionsError, "too_many_clients"),
    (exceptions.InvalidResponse, "not_redis"),
    ((exceptions.TimeoutError, TimeoutError), "timeout"),
)
_STATE_OF_CODE = {
    "OOM": "out_of_memory",
    "READONLY": "read_only",
    "LOADING": "loading",
    "MISCONF": "disk_error",
    "NOAUTH": "unauthenticated",
    "WRONGPASS": "unauthenticated",
    "NOPERM": "no_permission",
    "CLUSTERDOWN": "cluster_down",
    "MASTERDOWN": "master_down",
    "BUSY": "busy",
    "NOREPLICAS": "no_replicas",
    "TRYAGAIN": "moving",
    "UNBLOCKED": "read_only",  # it was the master
}
_FOREIGN = re.compile(
    r"WRONGTYPE |(hash )?value is not an? (integer|(valid )?float)"
    r"|user_script:\d+: "
)


def state_of(error: BaseException) -> str:
    """Why Redis is unavailable, as a key of `STATES`."""
    if isinstance(error, RedisAwayError):
        return error.state
    text = str(error)
    for beginning, state in _STATE_OF_BEGINNING.items():
        if text.startswith(beginning):
            return state
    if isinstance(error, exceptions.RedisError) and (code := _code_of(text)) in _STATE_OF_CODE:
        return _STATE_OF_CODE[code]
    found = (state for kinds, state in _STATE_OF_CLASS if isinstance(error, kinds))
    return next(found, "unreachable")


def detail_of(error: BaseException) -> str:
    """What to log of an error: one line of limited length."""
    if isinstance(error, RedisAwayError) and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MAX_DETAIL_CHARS else f"{text[:_MAX_DETAIL_CHARS]}…"


def is_foreign(error: BaseException) -> bool:
    """Whether a key holds what we did not write: another type, or values that a command or a script
    of ours cannot work with."""
    return isinstance(error, exceptions.ResponseError) and _FOREIGN.match(str(error)) is not None


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
        raise away_error(error) from error


def away_error(error: Exception) -> RedisAwayError:
    """The error that says why Redis is unavailable; the caller sets its cause."""
    state = state_of(error)
    return RedisAwayError(f"{STATES[state]} ({detail_of(error)})", state=state)
