"""The one place that makes clients of Redis.

A link turns what Redis' absence raises into `StoreUnavailableError`, runs Lua scripts wherever they
are not loaded (any more), and warns of a Redis that may forget. No password gets into a message.
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

from penstock.gateway.storage.conversations.store import StoreUnavailableError
from penstock.gateway.storage.redis_cluster import ClusterClient, node_name
from penstock.gateway.storage.redis_errors import is_away
from penstock.gateway.storage.redis_url import RedisAddress

_LOG = logging.getLogger(__name__)
_NUM_AT_ONCE = 16  # scripts at one node; more only keep the event loop from their answers
_MAX_CONNECTIONS = 32  # of a link to one node; whoever finds none free waits
_POOL_WAIT_S = 1.0
_IDLE_CHECK_S = 15  # a connection idle for longer is tried before it is used
_COMPLAINT_EVERY_S = 10.0


class RedisLink:
    """A client, and how it is used.

    Args:
        timeout_s: for a connection, and for a reply. None waits for replies without end (blocking
            reads); connecting then takes at most a second.
    """

    def __init__(self, address: RedisAddress, *, timeout_s: float | None = 1.0) -> None:
        self.address = address
        options = _options(address, timeout_s)
        self._sentinels = _sentinels(address, options)
        self.client = _connect(address, options, self._sentinels)
        # By node: one that is away keeps nobody from the others.
        self._places = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(_NUM_AT_ONCE))
        self._last_away_s = defaultdict[str, float](float)
        self._next_complaint_s = 0.0

    @contextlib.contextmanager
    def answering(self, key: str) -> Iterator[None]:
        """What is done within needs the node of Redis that serves a key.

        Raises:
            StoreUnavailableError: 503 `session_store_unavailable`: it does not answer, or not as
                one that can be written to.
        """
        try:
            yield
        except Exception as error:
            if not is_away(error):
                raise
            self._last_away_s[node_name(self.client, key)] = time.monotonic()
            self._complain(error)
            raise _unavailable() from error

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Run a script; a server that does not know it (it was restarted) is given it. Of a crowd
        some wait for their turn, which is not Redis' time; what it does not give one, it would not
        have given those who waited for that one.

        Raises:
            StoreUnavailableError: as `answering`.
        """
        begun_s, node = time.monotonic(), node_name(self.client, keys[0] if keys else "")
        async with self._places[node]:
            if self._last_away_s[node] > begun_s:
                raise _unavailable()
            return await self._run(script, keys, args)

    async def _run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        with self.answering(keys[0] if keys else ""):
            try:
                return await self.client.evalsha(script.sha, len(keys), *keys, *args)
            except exceptions.NoScriptError:
                return await self.client.eval(script.source, len(keys), *keys, *args)

    async def is_up(self) -> bool:
        """Whether Redis answers now."""
        try:
            return bool(await self.client.ping())
        except Exception as error:
            if not is_away(error):
                raise
            return False

    async def warn_unless_durable(self) -> None:
        """Say in the log, once at start-up, what this Redis may lose. One that does not answer, or
        does not tell, is no reason not to start."""
        try:
            found = {
                **await self.client.config_get("maxmemory-policy"),
                **await self.client.config_get("appendonly"),
            }
        except Exception as error:
            # Some that others operate let nobody ask.
            if not is_away(error) and not isinstance(error, exceptions.ResponseError):
                raise
            _LOG.warning("Redis at %s does not say how it is set up: %s", self.address, error)
            return
        settings = {_text(name): _text(value) for name, value in found.items()}
        if (policy := settings.get("maxmemory-policy")) != "noeviction":
            _LOG.warning(
                "Redis at %s may drop conversations when it is full: maxmemory-policy is %s, and "
                "should be noeviction",
                self.address,
                policy,
            )
        if settings.get("appendonly") != "yes":
            _LOG.warning(
                "Redis at %s forgets conversations when it is restarted: appendonly is off",
                self.address,
            )

    async def aclose(self) -> None:
        await self.client.aclose()
        if self._sentinels is not None:
            await self._sentinels.aclose()

    def _complain(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._next_complaint_s:
            self._next_complaint_s = now + _COMPLAINT_EVERY_S
            _LOG.warning("Redis at %s: %s: %s", self.address, type(error).__name__, error)


class Script:
    """A Lua script."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


def _unavailable() -> StoreUnavailableError:
    return StoreUnavailableError(
        "the store of conversations does not answer; try again later",
        code="session_store_unavailable",
        status=503,
    )


def _options(address: RedisAddress, timeout_s: float | None) -> dict[str, Any]:
    """redis-py's, of every connection."""
    return {
        "socket_connect_timeout": 1.0 if timeout_s is None else timeout_s,
        "socket_timeout": timeout_s,
        "health_check_interval": _IDLE_CHECK_S,
        "protocol": 2,
        # A command whose connection broke is sent once more, so it must bear repetition; one that
        # was not answered in time is not, since the caller waits.
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
        # Nothing waits for a connection here: what is in flight is bounded by admission.
        assert address.service is not None
        managed = SentinelManagedSSLConnection if address.is_tls else SentinelManagedConnection
        client: Redis = sentinels.master_for(
            address.service, connection_class=_telling_of_closing(managed), **options
        )
        return client
    if address.is_cluster:
        timeout_s = options["socket_connect_timeout"]
        if options["socket_timeout"] is None:  # no read blocks there
            options["socket_timeout"] = timeout_s
        cluster = ClusterClient(
            address.hosts,
            lambda host, port: _pooled(address, {**options, "host": host, "port": port}),
            timeout_s=timeout_s,
        )
        return cast("Redis", cluster)  # the same commands
    if address.hosts:
        options["host"], options["port"] = address.hosts[0]
    return _pooled(address, options)


def _pooled(address: RedisAddress, options: dict[str, Any]) -> Redis:
    """Of one server."""
    kind = options.get("connection_class", SSLConnection if address.is_tls else Connection)
    options["connection_class"] = _telling_of_closing(kind)
    options.setdefault("max_connections", _MAX_CONNECTIONS)
    pool: ConnectionPool = _Pool(timeout=_POOL_WAIT_S, **options)
    return Redis.from_pool(pool)


class _Pool(BlockingConnectionPool):
    """Opens nothing more once it is closed. redis-py sends a command that was under way then once
    more, on a connection which nobody closes."""

    async def aclose(self) -> None:
        self.connection_class.is_over = True  # type: ignore[attr-defined]  # a class of its own
        await super().aclose()


def _telling_of_closing(base: type[AbstractConnection]) -> type[AbstractConnection]:
    """`base`, for uvloop: there, writing to a connection that has just closed is a RuntimeError,
    and redis-py takes that for a bug, not for an absence. And for `_Pool`."""

    async def connect(self: AbstractConnection, **options: Any) -> None:
        if self.is_over:  # type: ignore[attr-defined]
            raise exceptions.ConnectionError("the client is closed")
        await base.connect_check_health(self, **options)

    async def send(self: AbstractConnection, *args: Any, **options: Any) -> None:
        try:
            await base.send_packed_command(self, *args, **options)
        except RuntimeError as error:
            raise exceptions.ConnectionError(str(error)) from error

    methods = {"send_packed_command": send, "connect_check_health": connect}
    return type(base.__name__, (base,), {**methods, "is_over": False})


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
