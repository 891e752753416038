"""Makes all clients of Redis.

A link turns the errors of an unavailable Redis into `StoreUnavailableError`, those of keys with
foreign content into `UnreadableDataError`, runs Lua scripts even where they are not loaded, and
warns about a Redis that may lose data. No message contains a password.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, cast

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import ExponentialWithJitterBackoff

from penstock.gateway.storage.conversations.store import UnreadableDataError, store_unavailable
from penstock.gateway.storage.redis.cluster import ClusterClient, node_name
from penstock.gateway.storage.redis.errors import STATES, detail_of, is_away, is_foreign
from penstock.gateway.storage.redis.health import FOREIGN_EVERY_S, RedisHealth
from penstock.gateway.storage.redis.url import RedisAddress

_LOG = logging.getLogger(__name__)
_NUM_AT_ONCE = 16  # scripts at one node; more only keep the event loop from reading answers
_MAX_CONNECTIONS = 32  # of a link to one node; further callers wait for a free one
_POOL_WAIT_S = 1.0
_IDLE_CHECK_S = 15  # a connection that was idle for longer is checked before use
# What a caller is told that a key belongs to, by the key's last part.
_WHAT = {
    "conversation": "this conversation",
    "token_ids": "this conversation",
    "conversations": "the list of conversations",
}


class RedisLink:
    """A client of Redis and its use.

    Args:
        timeout_s: for connecting, and for a reply. None waits for replies without limit (blocking
            reads); connecting then has a limit of one second.
        health: notes its errors.
    """

    def __init__(
        self,
        address: RedisAddress,
        *,
        timeout_s: float | None = 1.0,
        health: RedisHealth | None = None,
    ) -> None:
        self.address = address
        self.health = health or RedisHealth()
        options = _options(address, timeout_s)
        self._sentinels = _sentinels(address, options)
        self.client = _connect(address, options, self._sentinels)
        # By node, so that one that is away does not block the others.
        self._semaphores = defaultdict[str, asyncio.Semaphore](
            lambda: asyncio.Semaphore(_NUM_AT_ONCE)
        )
        self._last_away_s = defaultdict[str, float](float)

    @contextlib.contextmanager
    def answering(self, key: str) -> Iterator[None]:
        """A context for calls that need the node that serves a key.

        Raises:
            StoreUnavailableError: 503 `session_store_unavailable`: the node does not answer or
                cannot be written to.
            UnreadableDataError: 409 `stored_data_unreadable`: the keys hold foreign content.
        """
        try:
            yield
        except Exception as error:
            if is_foreign(error):
                raise self.unreadable(key, error) from error
            if not is_away(error):
                raise
            self._last_away_s[node_name(self.client, key)] = time.monotonic()
            why = self.health.describe(error)
            if self.health.may_complain(why):
                _LOG.warning("%s, at %s (%s)", why, self.address, detail_of(error))
            raise store_unavailable(why) from error

    def unreadable(self, key: str, error: Exception) -> UnreadableDataError:
        """The error of a key, or of one that belongs to it, with foreign content; logs it."""
        if self.health.may_complain(key, every_s=FOREIGN_EVERY_S):
            _LOG.warning(
                "Redis at %s holds at %s or beside it what this server did not write (%s)",
                self.address,
                key,
                detail_of(error),
            )
        return UnreadableDataError(_WHAT.get(key.rpartition(":")[2], "what is stored"))

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script; a server that does not have it (it was restarted) gets its source.

        Only some scripts run at the same time; the time that others wait does not count against
        Redis. If Redis fails meanwhile, the waiting ones fail at once.

        Raises:
            StoreUnavailableError: as `answering`.
        """
        begun_s, node = time.monotonic(), node_name(self.client, keys[0] if keys else "")
        async with self._semaphores[node]:
            if self._last_away_s[node] > begun_s:
                raise store_unavailable(STATES[self.health.state])
            return await self._run(script, keys, args)

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        with self.answering(keys[0] if keys else ""):
            try:
                return await self.client.evalsha(script.sha, len(keys), *keys, *args)
            except exceptions.NoScriptError:
                return await self.client.eval(script.source, len(keys), *keys, *args)

    async def is_up(self) -> bool:
        """Whether Redis answers now, and lately did what it was told."""
        try:
            return bool(await self.client.ping()) and not self.health.refuses
        except Exception as error:
            if not is_away(error):
                raise
            self.health.note(error)
            return False

    async def warn_unless_durable(self) -> None:
        """Log a warning at start-up if this Redis may lose data. A Redis that does not answer, or
        refuses to report its settings, does not prevent the start."""
        try:
            found = {
                **await self.client.config_get("maxmemory-policy"),
                **await self.client.config_get("appendonly"),
            }
        except Exception as error:
            # Some managed services forbid CONFIG.
            if not is_away(error) and not isinstance(error, exceptions.ResponseError):
                raise
            detail = detail_of(error)
            _LOG.warning("cannot read the settings of Redis at %s: %s", self.address, detail)
            return
        settings = {_text(name): _text(value) for name, value in found.items()}
        if (policy := settings.get("maxmemory-policy")) != "noeviction":
            _LOG.warning(
                "Redis at %s may evict conversations when it is full: maxmemory-policy is %s, but "
                "should be noeviction",
                self.address,
                policy,
            )
        if settings.get("appendonly") != "yes":
            _LOG.warning(
                "Redis at %s loses conversations when it restarts: appendonly is off",
                self.address,
            )

    async def aclose(self) -> None:
        await self.client.aclose()
        if self._sentinels is not None:
            await self._sentinels.aclose()


class Script:
    """A Lua script."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


def _options(address: RedisAddress, timeout_s: float | None) -> dict[str, Any]:
    """redis-py's options for every connection."""
    return {
        "socket_connect_timeout": 1.0 if timeout_s is None else timeout_s,
        "socket_timeout": timeout_s,
        "health_check_interval": _IDLE_CHECK_S,
        "protocol": 2,
        # A command whose connection broke is sent once more, so commands must be idempotent. After
        # a time-out a command is not repeated, because the caller is waiting.
        "retry": Retry(
            ExponentialWithJitterBackoff(base=0.01, cap=0.1),
            1,
            supported_errors=(exceptions.ConnectionError,),
        ),
        **address.options,
    }


def _sentinels(address: RedisAddress, options: dict[str, Any]) -> Sentinel | None:
    if address.service is None:
        return None
    of_both = {
        name: value
        for name, value in options.items()
        if name.startswith(("socket_", "ssl_")) or name in ("protocol", "retry")
    }
    of_sentinels = {**of_both, "ssl": address.is_tls, **address.sentinel_options}
    return Sentinel(  # type: ignore[no-untyped-call]  # redis-py's own gap
        address.hosts, sentinel_kwargs=of_sentinels
    )


def _connect(address: RedisAddress, options: dict[str, Any], sentinels: Sentinel | None) -> Redis:
    if sentinels is not None:
        # No limit of connections here: admission bounds what is in flight.
        assert address.service is not None
        managed = SentinelManagedSSLConnection if address.is_tls else SentinelManagedConnection
        client: Redis = sentinels.master_for(
            address.service, connection_class=_telling_of_closing(managed), **options
        )
        return client
    if address.is_cluster:
        timeout_s = options["socket_connect_timeout"]
        if options["socket_timeout"] is None:  # no blocking reads with a cluster
            options["socket_timeout"] = timeout_s
        cluster = ClusterClient(
            address.hosts,
            lambda host, port: _pooled(address, {**options, "host": host, "port": port}),
            timeout_s=timeout_s,
        )
        return cast("Redis", cluster)  # it has the same commands
    if address.hosts:
        options["host"], options["port"] = address.hosts[0]
    return _pooled(address, options)


def _pooled(address: RedisAddress, options: dict[str, Any]) -> Redis:
    """The client of one server."""
    kind = options.get("connection_class", SSLConnection if address.is_tls else Connection)
    options["connection_class"] = _telling_of_closing(kind)
    options.setdefault("max_connections", _MAX_CONNECTIONS)
    pool: ConnectionPool = _Pool(timeout=_POOL_WAIT_S, **options)
    return Redis.from_pool(pool)


class _Pool(BlockingConnectionPool):
    """Leaves no connection open once it is closed. redis-py would repeat a command that was in
    flight, on a new connection that nobody closes, and go on with one that is being made."""

    async def aclose(self) -> None:
        self.connection_class.is_over = True  # type: ignore[attr-defined]  # this pool's own class
        await super().aclose()


def _telling_of_closing(base: type[AbstractConnection]) -> type[AbstractConnection]:
    """A subclass of `base` for uvloop and for `_Pool`. With uvloop, writing to a connection that
    has just closed is a RuntimeError, which would look like a bug; it becomes a ConnectionError."""

    async def connect(self: AbstractConnection, **options: Any) -> None:
        if not self.is_over:  # type: ignore[attr-defined]
            try:
                await base.connect_check_health(self, **options)
            finally:
                if self.is_over:  # type: ignore[attr-defined]  # meanwhile
                    await self.disconnect(nowait=True)
        if self.is_over:  # type: ignore[attr-defined]
            raise exceptions.ConnectionError("the client is closed")

    async def send(self: AbstractConnection, *args: Any, **options: Any) -> None:
        try:
            await base.send_packed_command(self, *args, **options)
        except RuntimeError as error:
            raise exceptions.ConnectionError(str(error)) from error

    methods = {"send_packed_command": send, "connect_check_health": connect}
    return type(base.__name__, (base,), {**methods, "is_over": False})


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
