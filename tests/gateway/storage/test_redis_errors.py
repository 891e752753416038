"""Every error of redis-py is an absence of Redis or a mistake of ours."""

from __future__ import annotations

import inspect
import ssl

import pytest
from redis import exceptions
from redis._parsers.base import BaseParser
from redis.asyncio.sentinel import MasterNotFoundError

from penstock.gateway.storage.redis.errors import (
    STATES,
    RedisAwayError,
    away_told_apart,
    detail_of,
    is_away,
    is_foreign,
    state_of,
)

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


@pytest.mark.parametrize(
    ("reply", "state"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", "out_of_memory"),
        ("READONLY You can't write against a read only replica.", "read_only"),
        ("LOADING Redis is loading the dataset in memory", "loading"),
        ("MISCONF Redis is configured to save RDB snapshots", "disk_error"),
        ("NOAUTH Authentication required.", "unauthenticated"),
        ("WRONGPASS invalid username-password pair", "unauthenticated"),
        ("NOPERM this user has no permissions to run the 'xadd' command", "no_permission"),
        ("CLUSTERDOWN Hash slot not served", "cluster_down"),
        ("MASTERDOWN Link with MASTER is down", "master_down"),
        ("BUSY Redis is busy running a script.", "busy"),
        ("NOREPLICAS Not enough good replicas to write.", "no_replicas"),
        ("TRYAGAIN Multiple keys request during rehashing of slot", "moving"),
        ("ERR max number of clients reached", "too_many_clients"),
        ("ERR Protocol error: unauthenticated multibulk length", "unauthenticated"),
        ("UNBLOCKED force unblock from blocking operation", "read_only"),
    ],
)
def test_what_redis_replies_has_a_name(reply: str, state: str) -> None:
    error = BaseParser.parse_error(reply)  # as redis-py makes it of the reply
    assert is_away(error)
    assert state_of(error) == state
    with pytest.raises(RedisAwayError) as caught, away_told_apart():
        raise error
    assert state_of(caught.value) == state
    assert str(caught.value).startswith(STATES[state])


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (exceptions.TimeoutError("late"), "timeout"),
        (TimeoutError("late"), "timeout"),
        (exceptions.ConnectionError("Connection reset by peer"), "unreachable"),
        (ConnectionRefusedError("refused"), "unreachable"),
        (exceptions.InvalidResponse("Protocol Error: b'HTTP/1.1 400'"), "not_redis"),
        (MasterNotFoundError("no sentinel knows it"), "unreachable"),
    ],
)
def test_an_error_without_a_reply_has_a_name_too(error: Exception, state: str) -> None:
    assert state_of(error) == state


@pytest.mark.parametrize(
    ("reply", "foreign"),
    [
        ("WRONGTYPE Operation against a key holding the wrong kind of value", True),
        ("ERR hash value is not an integer script: 1, on @user_script:1.", True),
        ("ERR user_script:27: attempt to index a nil value script: 1, on @user_script:27.", True),
        ("ERR Unknown Redis command called from script script: 1, on @user_script:1.", False),
        ("ERR syntax error", False),
    ],
)
def test_foreign_content_is_told_from_mistakes(reply: str, foreign: bool) -> None:
    error = BaseParser.parse_error(reply)
    assert is_foreign(error) is foreign
    assert not is_away(error)


def test_the_detail_of_an_error_is_one_short_line() -> None:
    detail = detail_of(ValueError("a\nb" * 5000))
    assert "\n" not in detail
    assert len(detail) < 400
