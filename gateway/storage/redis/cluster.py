"""A client of a Redis Cluster in which each node fails separately.

In redis-py's own cluster client, a node that does not answer fails the whole pipeline, drops the
connections to all other nodes, and blocks every command until the slots are read again. Here each
node has a plain client of redis-py. A node that failed gets only pings until it answers. Meanwhile
the other nodes serve their slots, and are asked whether another node has taken over the failed
node's.

A command's key is its second word. All keys of a script are in one slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis import exceptions
from redis.asyncio import Redis
from redis.commands import AsyncCoreCommands
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from penstock.gateway.storage.redis.errors import is_away

_LOG = logging.getLogger(__name__)
_HEAL_EVERY_S = 0.1
_MAX_REDIRECTIONS = 4
_TRY_AGAIN_S = 0.05  # while a slot moves between two nodes
_NUM_ASKED = 3  # nodes that are asked for the slots at the same time
_KEYLESS = ("PING", "CONFIG GET")
_SCRIPTS = ("EVAL", "EVALSHA")

Words = tuple[Any, ...]
Send = Callable[[Redis, list[Words]], Awaitable[list[Any]]]


@dataclass(slots=True, eq=False)
class _Node:
    host: str
    port: int
    client: Redis
    is_doubted: bool = False  # it failed and has to answer a ping first
    is_away: bool = False

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"


class ClusterClient(AsyncCoreCommands):
    """redis-py's commands, each sent to the node that serves its key.

    Args:
        seeds: (host, port) of some of its nodes.
        connect: makes the client of one node.
        timeout_s: after which a node that does not answer a ping counts as away.
    """

    _event_dispatcher: Any = None  # of connections: each node's client has its own

    def __init__(
        self,
        seeds: Sequence[tuple[str, int]],
        connect: Callable[[str, int], Redis],
        *,
        timeout_s: float,
    ) -> None:
        self._seeds = seeds
        self._connect = connect
        self._timeout_s = timeout_s
        self._nodes: dict[str, _Node] = {}
        self._slots: list[_Node | None] = []  # empty before the first answer
        self._is_stale = False  # a node reported another owner of a slot, or none
        self._first: asyncio.Task[None] | None = None
        self._healing: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def node_name(self, key: str | bytes) -> str:
        """The name of the node that serves a key; empty while that is unknown."""
        node = self._node_of(key)
        return "" if node is None else node.name

    async def execute_command(self, *words: Any, **options: Any) -> Any:
        """redis-py's commands call this method."""

        async def send(client: Redis, commands: list[Words]) -> list[Any]:
            command: Any = client.execute_command  # it has no types
            return [await command(*commands[0], **options)]

        (reply,) = await self.run([words], send)
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def run(
        self, commands: Sequence[Words], send: Send, *, follows_slots: bool = True
    ) -> list[Any]:
        """Send commands to their nodes, to all nodes in parallel.

        Args:
            send: sends its commands to one node.
            follows_slots: whether to resend a command to the slot's new owner.

        Returns:
            replies in the commands' order; for a command that failed, its error.

        Raises:
            redis.exceptions.ConnectionError: no node has ever answered where the slots are.
        """
        await self._know_slots()
        replies: list[Any] = [None] * len(commands)
        todo = list(range(len(commands)))
        for _ in range(_MAX_REDIRECTIONS):
            parts: dict[_Node | None, list[int]] = {}
            for index in todo:
                parts.setdefault(self._node_for(commands[index]), []).append(index)
            found = await asyncio.gather(
                *(
                    self._ask(node, [commands[index] for index in part], send)
                    for node, part in parts.items()
                )
            )
            for part, answers in zip(parts.values(), found, strict=True):
                for index, answer in zip(part, answers, strict=True):
                    replies[index] = answer
            for index in todo:
                if type(replies[index]) is exceptions.AskError:
                    replies[index] = await self._ask_importer(commands[index], replies[index])
            if not follows_slots:
                break
            elsewhere = (exceptions.MovedError, exceptions.TryAgainError)
            todo = [index for index in todo if isinstance(replies[index], elsewhere)]
            if not todo:
                break
            if any(isinstance(replies[index], exceptions.TryAgainError) for index in todo):
                await asyncio.sleep(_TRY_AGAIN_S)
        return replies

    async def aclose(self) -> None:
        tasks = {task for task in (self._first, self._healing) if task is not None}
        while tasks:  # redis-py may swallow a cancellation
            for task in tasks:
                task.cancel()
            _, tasks = await asyncio.wait(tasks, timeout=0.1)
        await asyncio.gather(*self._closing)
        for node in self._nodes.values():
            await node.client.aclose()

    # -- one node -----------------------------------------------------------------------------

    async def _ask(self, node: _Node | None, commands: list[Words], send: Send) -> list[Any]:
        if node is None:
            self._is_stale = True
            self._heal_soon()
            return [exceptions.ClusterDownError("no node serves the slot")] * len(commands)
        if node.is_away:
            return [exceptions.ConnectionError(f"{node.name} is away")] * len(commands)
        try:
            replies = await send(node.client, commands)
        except asyncio.CancelledError:  # perhaps because it took too long
            self._doubt(node)
            raise
        except Exception as error:
            is_reply = isinstance(error, exceptions.ResponseError)
            if not is_reply and not is_away(error):
                raise
            if not is_reply:
                self._doubt(node)
            replies = [error] * len(commands)
        for reply in replies:
            if isinstance(reply, exceptions.MovedError):
                self._slots[reply.slot_id] = self._node_at(reply.host or node.host, reply.port)
            if isinstance(reply, exceptions.MovedError | exceptions.ClusterDownError):
                self._is_stale = True
                self._heal_soon()
            elif isinstance(reply, exceptions.ConnectionError | exceptions.TimeoutError):
                self._doubt(node)
        return replies

    async def _ask_importer(self, command: Words, redirection: exceptions.AskError) -> Any:
        """Send a command to the node that is importing its slot."""

        async def send(client: Redis, commands: list[Words]) -> list[Any]:
            pipeline = client.pipeline(transaction=False)
            pipeline.execute_command("ASKING")
            pipeline.execute_command(*commands[0])
            return (await pipeline.execute(raise_on_error=False))[1:]

        asked = self._node_for(command)
        host = redirection.host or (asked.host if asked is not None else "")
        (reply,) = await self._ask(self._node_at(host, redirection.port), [command], send)
        return reply

    def _node_for(self, command: Words) -> _Node | None:
        """The node of a command's key; without a key, any node that answers."""
        key = _key_of(command)
        if key is not None:
            return self._node_of(key)
        nodes = list(self._nodes.values())
        return next((node for node in nodes if not node.is_away), nodes[0])

    def _node_of(self, key: str | bytes) -> _Node | None:
        encoded = key.encode() if isinstance(key, str) else key
        return self._slots[key_slot(encoded)] if self._slots else None

    def _node_at(self, host: str, port: int) -> _Node:
        name = f"{host}:{port}"
        if name not in self._nodes:
            self._nodes[name] = _Node(host, port, self._connect(host, port))
        return self._nodes[name]

    # -- slots and health ---------------------------------------------------------------------

    async def _know_slots(self) -> None:
        if self._slots:
            return
        if self._first is None or self._first.done():
            self._first = asyncio.create_task(self._ask_for_slots())
        await asyncio.shield(self._first)

    def _doubt(self, node: _Node) -> None:
        node.is_doubted = True
        self._heal_soon()

    def _heal_soon(self) -> None:
        if self._healing is None or self._healing.done():
            self._healing = asyncio.create_task(self._heal())

    async def _heal(self) -> None:
        """Ping nodes and read slots until every node that serves slots answers."""
        while True:
            doubted = [node for node in self._nodes.values() if node.is_doubted]
            await asyncio.gather(self._learn_slots(), *map(self._ping, doubted))
            if not self._is_stale and not any(node.is_doubted for node in self._nodes.values()):
                return
            await asyncio.sleep(_HEAL_EVERY_S)

    async def _ping(self, node: _Node) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await node.client.ping()
        except Exception as error:
            if not node.is_away:
                _LOG.warning("Redis at %s: %s: %s", node.name, type(error).__name__, error)
            node.is_away = True
        else:
            if node.is_away:
                _LOG.warning("Redis at %s is back", node.name)
            node.is_doubted = node.is_away = False

    async def _learn_slots(self) -> None:
        self._is_stale = False
        try:
            await self._ask_for_slots()
        except Exception as error:
            self._is_stale = True
            _LOG.debug("cannot read the cluster's slots: %s", error)

    async def _ask_for_slots(self) -> None:
        """Read the slots from the first node that answers. Redirections correct an outdated answer.

        Raises:
            redis.exceptions.ConnectionError: no node answers.
        """
        well = [node for node in self._nodes.values() if not node.is_doubted]
        asked = random.sample(well, min(_NUM_ASKED, len(well)))
        strangers = []
        if not asked:
            asked = list(self._nodes.values())
            strangers = [
                _Node(host, port, self._connect(host, port))
                for host, port in self._seeds
                if f"{host}:{port}" not in self._nodes
            ]
        tasks = [asyncio.create_task(self._slots_by(node)) for node in (*asked, *strangers)]
        why: Exception | None = None
        try:
            for answer in asyncio.as_completed(tasks):
                try:
                    self._assign_slots(await answer)
                except Exception as error:
                    why = error
                else:
                    return
            raise exceptions.ConnectionError(f"no node of the cluster answers: {why}") from why
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for node in strangers:
                await node.client.aclose()

    async def _slots_by(self, node: _Node) -> list[tuple[int, int, str, int]]:
        """A node's slot ranges: first and last slot, and the host and port that serve them."""
        async with asyncio.timeout(self._timeout_s):
            command: Any = node.client.execute_command  # it has no types
            found = await command("CLUSTER", "SLOTS")
        if not found:
            raise exceptions.ClusterDownError(f"according to {node.name}, no node serves slots")
        return [
            (first, last, (host or b"").decode() or node.host, port)
            for first, last, (host, port, *_), *_ in found
        ]

    def _assign_slots(self, ranges: list[tuple[int, int, str, int]]) -> None:
        slots: list[_Node | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, host, port in ranges:
            slots[first : last + 1] = [self._node_at(host, port)] * (last + 1 - first)
        self._slots = slots
        serving = set(slots)
        for node in list(self._nodes.values()):
            if node not in serving:
                del self._nodes[node.name]
                task = asyncio.create_task(self._close(node))
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def _close(self, node: _Node) -> None:
        with contextlib.suppress(Exception):  # the node is no longer used
            await node.client.aclose()


def node_name(redis: Redis, key: str | bytes) -> str:
    """The name of the node that serves a key; empty if there is only one server. Commands for
    different nodes need not wait for each other."""
    client: object = redis  # by its type, it is never a `ClusterClient`
    # Called for every log in every iteration: isinstance is slow with redis-py's protocols.
    return client.node_name(key) if type(client) is ClusterClient else ""


def _key_of(command: Words) -> str | bytes | None:
    if command[0] in _SCRIPTS:
        return command[3] if int(command[2]) else None
    return None if command[0] in _KEYLESS else command[1]
