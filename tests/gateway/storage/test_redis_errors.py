"""Every error of redis-py is an absence of Redis or a mistake of ours."""

from __future__ import annotations

import inspect
import ssl

import pytest
from redis import exceptions
from redis.asyncio.sentinel import MasterNotFoundError

from penstock.gateway.storage.redis_errors import RedisAwayError, away_told_apart, is_away

AWAY = {
    exceptions.AskError,
    exceptions.AuthenticationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
    exceptions.AuthorizationError,
    exceptions.BusyLoadingError,
    exceptions.ClusterDownError,
    exceptions.ClusterError,
    exceptions.ConnectionError,
    exceptions.ExternalAuthProviderError,
    exceptions.InvalidResponse,
    exceptions.MasterDownError,
    exceptions.MaxConnectionsError,
    exceptions.MovedError,
    exceptions.NoPermissionError,
    exceptions.OutOfMemoryError,
    exceptions.ReadOnlyError,
    exceptions.SlotNotCoveredError,
    exceptions.TimeoutError,
    exceptions.TryAgainError,
}
OURS = {
    exceptions.ChildDeadlockedError,
    exceptions.ClusterCrossSlotError,
    exceptions.CrossSlotTransactionError,
    exceptions.DataError,
    exceptions.ExecAbortError,
    exceptions.IncorrectPolicyType,
    exceptions.InvalidPipelineStack,
    exceptions.LockError,
    exceptions.LockNotOwnedError,
    exceptions.ModuleError,
    exceptions.NoScriptError,
    exceptions.NoSuchFieldsetError,
    exceptions.PubSubError,
    exceptions.RedisClusterException,  # a command without a key, or with keys of several slots
    exceptions.RedisError,
    exceptions.ResponseError,
    exceptions.WatchError,
}


def _all() -> set[type[Exception]]:
    found = vars(exceptions).values()
    return {each for each in found if inspect.isclass(each) and issubclass(each, Exception)}


def test_no_class_of_redis_py_is_left_out() -> None:
    assert _all() == AWAY | OURS
    assert not AWAY & OURS


@pytest.mark.parametrize("kind", sorted(_all(), key=lambda kind: kind.__name__))
def test_each_class_is_the_one_or_the_other(kind: type[Exception]) -> None:
    takes_address = issubclass(kind, exceptions.AskError)
    assert is_away(kind("1234 127.0.0.1:6379" if takes_address else "why")) is (kind in AWAY)


@pytest.mark.parametrize(
    ("text", "away"),
    [
        ("MISCONF Redis is configured to save RDB snapshots", True),
        ("NOREPLICAS Not enough good replicas to write.", True),
        ("BUSY Redis is busy running a script.", True),
        ("UNBLOCKED force unblock from blocking operation", True),
        ("max number of clients + cluster connections reached", True),
        ("BUSYGROUP Consumer Group name already exists", False),
        ("BUSYKEY Target key name already exists.", False),
        ("UNKILLABLE Sorry the script already executed write commands", False),
        ("NOTBUSY No scripts in execution right now.", False),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", False),
        ("syntax error", False),
        ("unknown command 'NONSENSE'", False),
    ],
)
def test_replies_without_a_class_are_told_by_their_first_word(text: str, away: bool) -> None:
    assert is_away(exceptions.ResponseError(text)) is away


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (MasterNotFoundError("no sentinel knows it"), True),
        (ConnectionResetError("reset"), True),
        (TimeoutError("late"), True),
        (ssl.SSLError("handshake"), True),
        (RuntimeError("unable to perform operation"), False),
        (ValueError("MISCONF"), False),
        (KeyError("key"), False),
    ],
)
def test_errors_that_are_not_of_redis_py(error: Exception, away: bool) -> None:
    assert is_away(error) is away
    with pytest.raises(RedisAwayError if away else type(error)) as caught, away_told_apart():
        raise error
    assert caught.value is error or caught.value.__cause__ is error
