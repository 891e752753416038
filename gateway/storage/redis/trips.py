"""Round trips to Redis, for which a gateway's event loop waits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Generator, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

from penstock.gateway.storage.redis.cluster import ClusterClient
from penstock.gateway.storage.redis.errors import (
    RedisAwayError,
    away_error,
    away_told_apart,
    is_away,
)

_Result = TypeVar("_Result")
Command = tuple[str | bytes | int, ...]
# What goes to Redis and back, without the going: each yield is the commands of a round trip, and
# gets their replies in order, in which an exception is the reply of a command that failed.
Steps = Generator[Sequence[Command], list[Any], _Result]


async def round_trip(
    redis: Redis, commands: Sequence[Command], *, is_strict: bool = False
) -> list[Any]:
    """Send commands in one pipeline (with a cluster, one per node); replies in their order.

    Args:
        is_strict: raise a command's error; otherwise the error is returned as its reply. It is a
            `RedisAwayError` if the command's node is unavailable.

    Raises:
        RedisAwayError: Redis is unavailable; with a cluster, no node has ever answered.
    """
    client: object = redis  # by its type, it is never a `ClusterClient`
    if not commands:
        return []
    with away_told_apart():
        if isinstance(client, ClusterClient):
            replies = await client.run(commands, _pipelined)
        else:
            replies = await _pipelined(redis, commands)
    _mark_away(replies)
    if is_strict:
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
    return replies


async def _pipelined(redis: Redis, commands: Sequence[Command]) -> list[Any]:
    pipeline = redis.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = await pipeline.execute(raise_on_error=False)
    return replies


async def lean_round_trip(redis: Redis, commands: Sequence[Command]) -> list[Any]:
    """A round trip of commands whose reply does not matter beyond success or refusal. It costs
    a fraction of redis-py's pipeline: no bookkeeping per command, no time-out (the caller has one),
    no retry. With a cluster it does not follow slots to another node: before anything is added
    there, the caller must find out what that node has.

    Raises:
        RedisAwayError: as `round_trip`.
    """
    client: object = redis
    with away_told_apart():
        if isinstance(client, ClusterClient):
            replies = await client.run(commands, _lean, follows_slots=False)
        else:
            replies = await _lean(redis, commands)
    _mark_away(replies)
    return replies


async def _lean(redis: Redis, commands: Sequence[Command]) -> list[Any]:
    pool: Any = redis.connection_pool
    connection: AbstractConnection = await pool.get_connection()
    try:
        await connection.send_packed_command(connection.pack_commands(commands))
        return [await _reply(connection) for _ in commands]
    except BaseException:
        # There may be unread replies on the connection.
        await connection.disconnect(nowait=True)
        raise
    finally:
        await asyncio.shield(pool.release(connection))


def _mark_away(replies: list[Any]) -> None:
    for index, reply in enumerate(replies):
        if isinstance(reply, Exception) and is_away(reply):
            replies[index] = away_error(reply)
            replies[index].__cause__ = reply


async def _reply(connection: AbstractConnection) -> Any:
    try:
        return await connection.read_response(timeout=math.inf)
    except ResponseError as error:
        return error


async def ask(redis: Redis, *command: str | bytes | int) -> Any:
    """One command's reply.

    Raises:
        RedisAwayError: Redis is unavailable.
    """
    (reply,) = await round_trip(redis, [command], is_strict=True)
    return reply


async def drive(redis: Redis, steps: Steps[_Result]) -> _Result:
    """Carry out the round trips of some steps; returns what they return.

    Raises:
        Exception: what the steps raise.
    """
    (result,) = await drive_all(redis, [steps])
    if isinstance(result, Exception):
        raise result
    return result


async def drive_all(redis: Redis, all_steps: Sequence[Steps[_Result]]) -> list[_Result | Exception]:
    """Carry out the steps of many at the same time: the first round trips of all in one, and so on.

    Returns: what each returned or raised.
    """
    results: list[Any] = [None] * len(all_steps)
    waiting = list[tuple[int, Steps[_Result], Sequence[Command]]]()

    def go_on(index: int, steps: Steps[_Result], replies: Any) -> None:
        try:
            if isinstance(replies, Exception):
                commands = steps.throw(replies)
            else:
                commands = steps.send(replies)
        except StopIteration as stop:
            results[index] = stop.value
        except Exception as error:
            results[index] = error
        else:
            waiting.append((index, steps, commands))

    for index, steps in enumerate(all_steps):
        go_on(index, steps, None)
    while waiting:
        asking, waiting = waiting, []
        try:
            replies: Any = await round_trip(redis, [each for _, _, some in asking for each in some])
        except Exception as error:
            for index, steps, _ in asking:
                go_on(index, steps, error)
            continue
        begin = 0
        for index, steps, commands in asking:
            go_on(index, steps, replies[begin : begin + len(commands)])
            begin += len(commands)
    return results


async def in_time(
    work: Coroutine[Any, Any, _Result], timeout_s: float, *, num_ticks: int
) -> _Result:
    """The result of `work`.

    The time is counted in at least `num_ticks` iterations of the event loop, so that a process that
    was stopped or busy does not mistake its own pause for one of Redis.

    Raises:
        RedisAwayError: the time is up; `work` is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(num_ticks):
            await asyncio.wait({task}, timeout=timeout_s / num_ticks)
            if task.done():
                return task.result()
        raise RedisAwayError(f"no answer within {timeout_s:.3g} s", state="timeout")
    finally:
        task.cancel()
