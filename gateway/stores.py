"""What outlives a request: conversations and response logs, in memory or in Redis.

The Redis client is imported only where there is a `--redis-url`: a gateway without one stays small.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from penstock.gateway.config import GatewayConfig
from penstock.gateway.conversations.memory_store import MemoryConversationStore
from penstock.gateway.conversations.store import ConversationStore
from penstock.gateway.responses.log_store import LogStore, MemoryLogStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """Both of them.

    Attributes:
        start: what is to be done when the gateway starts; may take a while.
        close: lets go of connections.
        is_up: whether Redis answers; None: there is none.
    """

    conversations: ConversationStore
    logs: LogStore
    start: Callable[[], Coroutine[None, None, None]]
    close: Callable[[], Coroutine[None, None, None]]
    is_up: Callable[[], Coroutine[None, None, bool]] | None = None


def make_stores(config: GatewayConfig) -> Stores:
    """The stores that the settings ask for.

    Raises:
        ConfigError: `--redis-url` makes no sense.
    """
    if config.redis_url is not None:
        return _redis_stores(config, config.redis_url)
    logs = MemoryLogStore(config.response_log_bytes, ttl_s=config.response_log_ttl_s)
    conversations = MemoryConversationStore(config.session_store_bytes, ttl_s=config.session_ttl_s)
    return Stores(conversations=conversations, logs=logs, start=_nothing, close=logs.close)


def _redis_stores(config: GatewayConfig, url: str) -> Stores:
    from penstock.gateway.conversations.redis_store import RedisConversationStore
    from penstock.gateway.redis_link import RedisLink
    from penstock.gateway.redis_url import RedisAddress
    from penstock.gateway.responses.redis_log_store import RedisLogSettings, RedisLogStore

    address = RedisAddress.parse(url)
    # Apart, so that what blocks or is slow on one side never stands before the other.
    link, log_link = RedisLink(address), RedisLink(address)
    settings = RedisLogSettings(
        ttl_s=config.response_log_ttl_s, ack_timeout_s=config.redis_patience_ms / 1e3
    )
    logs = RedisLogStore(log_link.client, settings)

    async def close() -> None:
        await logs.close()
        await log_link.aclose()
        await link.aclose()

    return Stores(
        conversations=RedisConversationStore(link, ttl_s=config.session_ttl_s),
        logs=logs,
        start=link.warn_unless_durable,
        close=close,
        is_up=link.is_up,
    )


async def _nothing() -> None:
    """Memory is there at once."""
