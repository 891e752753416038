"""What outlives a request or is shared by gateways: in this process's memory, on disk, or in Redis.

A kind of storage is a function here that makes one `SharedState`; nothing else asks which kind it
is. It stands above `storage` because it also makes what quotas, tickets and adapters are kept in.
Redis' client and SQLite are imported only where they are used, so a gateway without them is small.

    memory    gone with the process
    disk      of one gateway; outlives it and the machine's power
    redis     shared by all gateways; outlives them
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.engine.errors import ConfigError
from penstock.gateway.admission.quotas import LocalQuotas, Quotas
from penstock.gateway.auth.tickets import MemoryTickets, Tickets
from penstock.gateway.config import GatewayConfig
from penstock.gateway.engines.discovery import Find
from penstock.gateway.generation.adapters import AdapterChanges, MemoryChanges
from penstock.gateway.storage.conversations.memory_store import MemoryConversationStore
from penstock.gateway.storage.conversations.store import ConversationStore
from penstock.gateway.storage.idempotency.claims import ClaimStore, MemoryClaims
from penstock.gateway.storage.response_log.log_store import LogStore, MemoryLogStore
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.tenant_shares import QuotaOf, TenantShares, no_quotas
from penstock.gateway.storage.usage.ledger import Ledger, MemoryLedger, StoredLedger
from penstock.gateway.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from penstock.gateway.storage.data_dir import DataDir
    from penstock.gateway.storage.redis.health import RedisHealth

_MEMORY_BYTES, _DISK_BYTES = 256 << 20, 4 << 30  # for conversations
_ADMISSION_TIMEOUT_S = 0.25  # after which a request is admitted without Redis
_Step = Callable[[], Coroutine[None, None, None]]
Trouble = tuple[str, str]  # a state, as `out_of_memory`, and a message


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedState:
    """
    Attributes:
        conversations, logs: what outlives a request.
        claims: which responses idempotency keys stand for.
        quotas: what tenants have left of their limits.
        ledger: what requests have used.
        engines: finds the engines that have registered; None: they register nowhere.
        place: where chats are kept, for the ready message.
        start: runs on the event loop before anything is served.
        close: stores what waits, and closes connections.
        trouble: what is wrong with it; None: it is well.
        watch: registers its metrics.
    """

    conversations: ConversationStore
    logs: LogStore
    claims: ClaimStore
    quotas: Quotas
    tickets: Tickets
    adapters: AdapterChanges
    ledger: Ledger
    engines: Find | None = None
    place: str
    start: _Step = _nothing
    close: _Step
    trouble: Callable[[], Trouble | None] = lambda: None
    watch: Callable[[Metrics], None] = lambda _: None


def shared_state(
    config: GatewayConfig,
    *,
    quota_of: QuotaOf = no_quotas,
    log_settings: RedisLogSettings | None = None,
) -> SharedState:
    """The state by the settings.

    Args:
        quota_of: what a tenant may store.
        log_settings: of response logs in Redis; None: the usual ones, with those of `config`.

    Raises:
        ConfigError: `--redis-url` is invalid, or `--data-dir` names a folder that cannot be used.
            Without that setting, a folder that cannot be used leaves the state in memory.
    """
    if config.redis_url is not None:
        return redis(config, config.redis_url, quota_of=quota_of, log_settings=log_settings)
    from penstock.gateway.storage import data_dir

    if config.data_dir == data_dir.NOWHERE or config.num_workers > 1:
        return memory(config, quota_of=quota_of)
    from penstock.gateway.storage.disk import DiskError, NewerSchemaError

    try:
        return disk(config, data_dir.claim(config.data_dir), quota_of=quota_of)
    except (data_dir.DataDirError, DiskError, NewerSchemaError) as error:
        if config.data_dir is not None:
            raise ConfigError(f"--data-dir: {error}") from error
        place = f"in memory, until the server stops, because {error}"
        return memory(config, quota_of=quota_of, place=place)


def memory(
    config: GatewayConfig,
    *,
    quota_of: QuotaOf = no_quotas,
    place: str = "in memory, until the server stops",
) -> SharedState:
    shares = TenantShares(quota_of)
    logs = MemoryLogStore(config.response_log_bytes, ttl_s=config.response_log_ttl_s, shares=shares)
    return SharedState(
        conversations=MemoryConversationStore(
            config.session_store_bytes or _MEMORY_BYTES,
            ttl_s=config.session_ttl_s,
            running=logs.running,
            shares=shares,
        ),
        logs=logs,
        claims=MemoryClaims(ttl_s=config.response_log_ttl_s),
        quotas=LocalQuotas(time.monotonic),
        tickets=MemoryTickets(),
        adapters=MemoryChanges(),
        ledger=MemoryLedger(num_days=config.usage_days),
        place=place,
        close=logs.close,
    )


def disk(config: GatewayConfig, folder: DataDir, *, quota_of: QuotaOf = no_quotas) -> SharedState:
    """Of the only gateway of a server: what only gateways share with each other is in memory.

    Raises:
        DiskError, NewerSchemaError: the database in the folder cannot be used; it is free again.
    """
    from penstock.gateway.storage.conversations.disk_store import DiskConversationStore
    from penstock.gateway.storage.disk import Disk
    from penstock.gateway.storage.idempotency.disk_claims import DiskClaims
    from penstock.gateway.storage.response_log.disk_store import DiskLogStore
    from penstock.gateway.storage.usage.disk_usage import DiskUsage

    def emptied() -> None:
        conversations.forget_all()
        logs.emptied()

    database = Disk(folder.path, migrations(), on_emptied=emptied)
    try:
        database.open()
    except BaseException:
        folder.release()
        raise
    shares = TenantShares(quota_of)
    logs = DiskLogStore(
        database, config.response_log_bytes, ttl_s=config.response_log_ttl_s, shares=shares
    )
    num_bytes = config.session_store_bytes or _DISK_BYTES
    conversations = DiskConversationStore(database, num_bytes, running=logs.running, shares=shares)
    ledger = StoredLedger(DiskUsage(database, num_days=config.usage_days))

    async def start() -> None:
        database.start()
        await conversations.start()

    async def close() -> None:
        await logs.close()
        await conversations.close()
        await ledger.close()
        await database.close()
        folder.release()

    return SharedState(
        conversations=conversations,
        logs=logs,
        claims=DiskClaims(database, ttl_s=config.response_log_ttl_s),
        quotas=LocalQuotas(time.monotonic),
        tickets=MemoryTickets(),
        adapters=MemoryChanges(),
        ledger=ledger,
        place=f"in {folder.path}",
        trouble=lambda: database.trouble,
        start=start,
        close=close,
    )


def migrations() -> tuple[str, ...]:
    """The schema of the database on disk. Further versions are further statements at the end."""
    from penstock.gateway.storage.conversations import disk_rows
    from penstock.gateway.storage.idempotency import disk_claims
    from penstock.gateway.storage.response_log import disk_journal
    from penstock.gateway.storage.usage import disk_usage

    journal = (disk_journal.SCHEMA, disk_journal.JOURNAL_FILES)
    return (disk_rows.SCHEMA, *journal, disk_claims.SCHEMA, disk_usage.SCHEMA)


def redis(
    config: GatewayConfig,
    url: str,
    *,
    quota_of: QuotaOf = no_quotas,
    log_settings: RedisLogSettings | None = None,
) -> SharedState:
    """Raises: ConfigError: the URL is invalid."""
    from penstock.gateway.admission.redis_quotas import RedisQuotas
    from penstock.gateway.auth.redis_tickets import RedisTickets
    from penstock.gateway.storage.conversations.redis_store import RedisConversationStore
    from penstock.gateway.storage.idempotency.redis_claims import RedisClaims
    from penstock.gateway.storage.redis.adapters import RedisAdapterChanges
    from penstock.gateway.storage.redis.engines import RedisEngines
    from penstock.gateway.storage.redis.health import RedisHealth
    from penstock.gateway.storage.redis.link import RedisLink
    from penstock.gateway.storage.redis.shares import RedisShares
    from penstock.gateway.storage.redis.url import RedisAddress
    from penstock.gateway.storage.response_log.redis_store import RedisLogStore
    from penstock.gateway.storage.usage.redis_usage import RedisUsage

    address, health = RedisAddress.parse(url), RedisHealth()
    # Separate links, so that a slow or blocking command on one never delays the others.
    link, log_link = RedisLink(address, health=health), RedisLink(address, health=health)
    admission_link = RedisLink(address, timeout_s=_ADMISSION_TIMEOUT_S, health=health)
    shares = RedisShares(link, quota_of)
    log_settings = log_settings or RedisLogSettings(
        ttl_s=config.response_log_ttl_s, ack_timeout_s=config.redis_patience_ms / 1e3
    )
    logs = RedisLogStore(log_link.client, log_settings, health, shares=shares)
    quotas = RedisQuotas(
        admission_link, LocalQuotas(time.monotonic, share=1.0 / config.num_workers)
    )
    ledger = StoredLedger(RedisUsage(link, num_days=config.usage_days))
    model = config.model_names[0]
    # Gateways that discover the same engines have the same adapters.
    server = f"engines of {model}" if config.discover else config.engine_address
    background: list[asyncio.Task[None]] = []

    async def start() -> None:
        background.append(asyncio.create_task(link.warn_unless_durable()))

    async def close() -> None:
        for task in background:
            task.cancel()
        await quotas.aclose()
        await logs.close()
        await ledger.close()
        await shares.aclose()
        for each in (admission_link, log_link, link):
            await each.aclose()

    def watch(metrics: Metrics) -> None:
        watch_redis(metrics, health, link.is_up)

    return SharedState(
        conversations=RedisConversationStore(
            link, ttl_s=config.session_ttl_s, running=logs.running, shares=shares
        ),
        logs=logs,
        claims=RedisClaims(link, ttl_s=config.response_log_ttl_s),
        quotas=quotas,
        tickets=RedisTickets(admission_link),
        adapters=RedisAdapterChanges(link, server=server),
        ledger=ledger,
        engines=RedisEngines(link, model).addresses,
        place=f"in Redis at {address}",
        start=start,
        close=close,
        trouble=health.trouble,
        watch=watch,
    )


def watch_redis(
    metrics: Metrics, health: RedisHealth, is_up: Callable[[], Coroutine[None, None, bool]]
) -> None:
    metrics.probe("redis_up", "1 while Redis answers and executes commands, otherwise 0.", is_up)
    metrics.gauge(
        "redis_round_trip_seconds",
        "The shortest of the latest round trips of heartbeats to Redis.",
        lambda: health.round_trip_s,
    )
    metrics.states(
        "redis_state", "1 for the state that Redis is in.", health.states, lambda: health.state
    )
