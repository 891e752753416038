"""The composition root: makes every part once and passes it to the parts that need it.

State that gateways share is in memory or in Redis (`make_stores`, `make_gate`). The Redis client is
imported only with `--redis-url`, so a gateway without Redis stays small.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from penstock.engine.process.logs import LogWriter
from penstock.engine.protocol.tls import CurrentContext, gateway_context
from penstock.gateway.admission.admission import Admission
from penstock.gateway.admission.engine_queue import EngineQueue, QueueBounds
from penstock.gateway.admission.quotas import LocalQuotas, Quotas
from penstock.gateway.api.adapters.routes import Adapters
from penstock.gateway.api.anthropic.routes import Messages
from penstock.gateway.api.chat.routes import ChatCompletions
from penstock.gateway.api.classify.routes import Classify
from penstock.gateway.api.completions.routes import Completions
from penstock.gateway.api.conversations.routes import ConversationItems, Conversations
from penstock.gateway.api.embeddings.prompts import PooledPrompts
from penstock.gateway.api.embeddings.routes import Embeddings
from penstock.gateway.api.infill.routes import Infill
from penstock.gateway.api.models import Models
from penstock.gateway.api.rerank.routes import Rerank
from penstock.gateway.api.responses.response_task import ResponseTaskSettings
from penstock.gateway.api.responses.routes import Responses
from penstock.gateway.api.responses.service import ResponseService, ResponseServiceSettings
from penstock.gateway.api.responses.websocket import ResponsesSocket
from penstock.gateway.api.shared.idempotency import IdempotentAnswers
from penstock.gateway.api.shared.json_api import UpgradeRequired
from penstock.gateway.api.shared.operations import operations_of, routes_of
from penstock.gateway.api.status.routes import Description, Status
from penstock.gateway.api.status.stats_socket import StatsSocket
from penstock.gateway.api.tickets import TicketDesk
from penstock.gateway.api.tokens.routes import Tokens
from penstock.gateway.api.wrong_paths import NoSuchSocket, handle_wrong_path, refusing_others
from penstock.gateway.auth.callers import Caller
from penstock.gateway.auth.guard import Guard
from penstock.gateway.auth.keys import KeyRing
from penstock.gateway.auth.tickets import MemoryTickets, Tickets
from penstock.gateway.config import ANY_NAME, GatewayConfig
from penstock.gateway.engines.discovery import Discovery, Find, resolve
from penstock.gateway.engines.engine_client import EngineClient
from penstock.gateway.engines.engine_link import Tls
from penstock.gateway.errors import EXCEPTION_HANDLERS
from penstock.gateway.generation.adapters import AdapterChanges, AdapterRegistry, MemoryChanges
from penstock.gateway.generation.generator import Generator
from penstock.gateway.generation.grammar_check import GrammarCheck
from penstock.gateway.generation.images.fetch import ImageFetcher
from penstock.gateway.generation.images.loader import ImageLoader
from penstock.gateway.generation.images.local import LocalImages
from penstock.gateway.generation.pooled import Embedder
from penstock.gateway.generation.served_model import ServedModel, load_model
from penstock.gateway.generation.template_process import TemplateProcess
from penstock.gateway.http.http_protocol import StallTimer
from penstock.gateway.http.page import ChatPage
from penstock.gateway.http.root_path import RootPath
from penstock.gateway.storage.conversations.memory_store import MemoryConversationStore
from penstock.gateway.storage.conversations.store import ConversationStore
from penstock.gateway.storage.response_log.log_store import LogStore, MemoryLogStore
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.tenant_shares import QuotaOf, StoreQuota, TenantShares, no_quotas
from penstock.gateway.telemetry.access_log import ANY_PATH, RequestLog, route_templates
from penstock.gateway.telemetry.metrics import Metrics
from penstock.gateway.telemetry.request_record import REQUEST_ID_HEADER
from penstock.gateway.telemetry.worker_metrics import Workers

if TYPE_CHECKING:
    from penstock.gateway.storage.redis_health import RedisHealth
    from penstock.gateway.telemetry.tracing import Tracing

# Response headers that a page of another origin may read.
_EXPOSED_HEADERS = (
    REQUEST_ID_HEADER,
    "Retry-After",
    "retry-after-ms",
    "x-should-retry",
    "RateLimit",
    "RateLimit-Policy",
    *(
        f"x-ratelimit-{part}-{what}"
        for part in ("limit", "remaining", "reset")
        for what in ("requests", "tokens")
    ),
)
_ADMISSION_TIMEOUT_S = 0.25  # after which a request is admitted without Redis


def create_app(
    config: GatewayConfig,
    model: ServedModel | None = None,
    *,
    log: LogWriter | None = None,
    log_settings: RedisLogSettings | None = None,
) -> Starlette:
    """The gateway as an ASGI application. `app.state.engine` is its link to the engine, which
    opens and closes with the application's lifespan; `app.state.log_store` hands unfinished
    responses over to other gateways.

    Args:
        log: this process's log writer; its dropped lines are a metric.
        log_settings: of response logs in Redis; None: the usual ones, with those of `config`.
        model: the result of `load_model`; None: it is called here.

    Raises:
        ModelLoadError: the model's tokenizer or settings cannot be read.
    """
    model = model or load_model(config)
    engine = _engine_client(config)
    metrics = Metrics(engine, model.name, _workers(config))
    health = _redis_health(config)
    gate = make_gate(config, engine, health)
    adapters = AdapterRegistry(
        engine, model, _adapter_changes(config, health), is_on=config.enable_lora
    )
    generator = Generator(
        engine,
        model,
        metrics=metrics,
        admission=gate.admission,
        adapters=adapters,
        images=ImageLoader(
            model.images,
            ImageFetcher(
                config.allowed_media_domains,
                max_bytes=config.max_image_bytes,
                timeout_s=config.media_timeout_s,
            ),
            LocalImages(config.allowed_local_media_path, max_bytes=config.max_image_bytes),
            max_images=config.max_images,
            max_bytes=config.max_image_bytes,
        ),
        templates=TemplateProcess() if config.trust_request_chat_template else None,
        max_prompt_bytes=config.max_prompt_bytes,
        max_logprobs=config.max_logprobs,
    )

    discovery, close_discovery = _discovery(config, engine, model.name, health)
    stores = make_stores(config, health, log_settings, quota_of=_store_quotas(config, gate.keys))
    service = ResponseService(
        generator,
        engine=engine,
        conversations=stores.conversations,
        logs=stores.logs,
        settings=_service_settings(config),
        metrics=metrics,
    )
    _watch(metrics, gate=gate, service=service, grammars=generator.grammars, log=log)
    if health is not None and stores.is_up is not None:
        _watch_redis(metrics, health, stores.is_up)
    tracing = _tracing(config)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        discovery.start()
        adapters.start()
        await metrics.start()
        await service.start()
        starting = asyncio.create_task(stores.start())
        try:
            yield
        finally:
            starting.cancel()
            await discovery.close()
            await engine.close()
            await close_discovery()
            await adapters.close()
            await gate.aclose()
            await service.close()
            await generator.close()
            await stores.close()
            await metrics.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    embedder = Embedder(
        engine,
        model,
        adapters=adapters,
        metrics=metrics,
        admission=gate.admission,
        long_work=generator.long_work,
        max_prompt_bytes=config.max_prompt_bytes,
    )
    apis = _apis(
        config,
        generator,
        embedder=embedder,
        service=service,
        engine=engine,
        stores=stores,
        admission=gate.admission,
    )

    def names(caller: Caller) -> tuple[str, ...]:
        any_name = (ANY_NAME,) if model.takes_any_name else ()
        return (*model.names, *any_name, *adapters.of(caller))

    status = Status(engine, metrics, redis=None if health is None else health.trouble)
    apis += [TicketDesk(gate.tickets), status, Description(names, config.root_path or "")]
    below_v1, others = routes_of(apis, mount="/v1")
    sockets = [
        WebSocketRoute("/v1/responses", ResponsesSocket(service).serve),
        WebSocketRoute("/v1/stats", StatsSocket(engine, metrics).serve),
    ]
    below_v1 += [
        Route(each.path.removeprefix("/v1"), UpgradeRequired(), methods=["GET"]) for each in sockets
    ]
    routes = [
        *sockets,
        WebSocketRoute(ANY_PATH, NoSuchSocket([each.path for each in sockets])),
        Mount("/v1", routes=refusing_others(below_v1)),
        *refusing_others(others),
        Mount("/", app=ChatPage()),
    ]
    request_log = Middleware(
        RequestLog,
        metrics,
        routes=route_templates(routes),
        on_end=None if tracing is None else tracing.record,
    )
    app = Starlette(
        routes=routes,
        middleware=_middleware(config, gate, routes, request_log=request_log),
        exception_handlers={**EXCEPTION_HANDLERS, HTTPException: handle_wrong_path},
        lifespan=lifespan,
    )
    app.state.engine = engine
    app.state.log_store = stores.logs
    return app


def _apis(
    config: GatewayConfig,
    generator: Generator,
    *,
    embedder: Embedder,
    service: ResponseService,
    engine: EngineClient,
    stores: Stores,
    admission: Admission,
) -> list[object]:
    """The objects whose methods serve the operations that take a body, and the models."""
    max_bytes, ping_s = config.max_body_bytes, config.ping_interval_s
    answers = IdempotentAnswers(service)
    prompts = PooledPrompts(embedder, generator)
    of_adapters: list[object] = []
    if config.enable_lora:
        of_adapters = [
            Adapters(
                generator.adapters,
                engine,
                generator.model,
                max_rank=config.max_lora_rank,
                max_body_bytes=max_bytes,
            )
        ]
    return [
        ChatCompletions(generator, answers, max_body_bytes=max_bytes, ping_s=ping_s),
        Messages(
            generator,
            engine,
            answers,
            drops_billing_line=config.drop_billing_line,
            max_body_bytes=max_bytes,
            ping_s=ping_s,
        ),
        Completions(generator, answers, max_body_bytes=max_bytes, ping_s=ping_s),
        Infill(generator, max_body_bytes=max_bytes, ping_s=ping_s),
        Responses(service, answers, max_body_bytes=max_bytes, ping_s=ping_s),
        Embeddings(embedder, prompts, max_body_bytes=max_bytes),
        Classify(embedder, prompts, max_body_bytes=max_bytes),
        Rerank(embedder, max_body_bytes=max_bytes),
        Models(engine, generator.model, generator.adapters),
        Conversations(stores.conversations, admission, service, max_body_bytes=max_bytes),
        ConversationItems(stores.conversations, admission, max_body_bytes=max_bytes),
        Tokens(generator, engine, max_body_bytes=max_bytes),
        *of_adapters,
    ]


def _service_settings(config: GatewayConfig) -> ResponseServiceSettings:
    return ResponseServiceSettings(
        task=ResponseTaskSettings(
            grace_s=config.disconnect_grace_s,
            interval_s=config.stream_interval_ms / 1e3,
            store_patience_s=config.redis_patience_ms / 1e3,
        ),
        retention_s=config.session_retention_s,
        needs_storage=config.session_storage == "required",
    )


def _workers(config: GatewayConfig) -> Workers | None:
    if config.num_workers == 1:
        return None
    return Workers(config.engine_address, index=config.worker_index, num=config.num_workers)


def _tracing(config: GatewayConfig) -> Tracing | None:
    """Loads OpenTelemetry only if it is configured."""
    if config.otlp_endpoint is None:
        return None
    from penstock.gateway.telemetry.tracing import Tracing

    return Tracing(config.otlp_endpoint)


def _watch(
    metrics: Metrics,
    *,
    gate: Gate,
    service: ResponseService,
    grammars: GrammarCheck,
    log: LogWriter | None,
) -> None:
    """Registers numbers that are read from their owners when metrics are collected."""
    metrics.gauge(
        "admission_queue_requests",
        "Requests in the engine's queue, as this gateway's admission control counts them.",
        lambda: gate.admission.num_waiting,
    )
    metrics.gauge("response_logs_live", "Responses that are running.", lambda: service.num_running)
    metrics.gauge("grammars_cached", "Grammars whose verdict is kept.", lambda: len(grammars))
    metrics.counter(
        "slow_readers_closed",
        "Connections closed because the client read too slowly.",
        lambda: StallTimer.num_stalled,
    )
    metrics.counter(
        "log_lines_dropped",
        "Lines of this gateway's log dropped because it was not read or could not be written.",
        lambda: 0 if log is None else log.num_dropped,
    )


def _watch_redis(
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


def _middleware(
    config: GatewayConfig, gate: Gate, routes: Sequence[BaseRoute], *, request_log: Middleware
) -> list[Middleware]:
    """The middlewares, outermost first."""
    keyed = {f"/{each.path.split('/')[1]}" for each in operations_of(routes) if each.needs_key}
    guard = Middleware(
        Guard,
        config=config,
        keyed_paths=sorted(keyed),
        keys=gate.keys,
        tickets=gate.tickets,
        limit_headers=gate.admission.headers,
    )
    first = [request_log]
    if config.root_path:
        first = [Middleware(RootPath, root_path=config.root_path), request_log]
    if not config.allowed_origins:
        return [*first, guard]
    # Before the guard, so that a page of an allowed origin can also read why it was refused.
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED_HEADERS,
    )
    return [*first, cors, guard]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores:
    """Stores that outlive a request: conversations and response logs, in memory or in Redis.

    Attributes:
        start: runs when the gateway starts; may take a while.
        close: closes connections.
        is_up: whether Redis answers and does what it is told; None: there is no Redis.
    """

    conversations: ConversationStore
    logs: LogStore
    start: Callable[[], Coroutine[None, None, None]]
    close: Callable[[], Coroutine[None, None, None]]
    is_up: Callable[[], Coroutine[None, None, bool]] | None = None


def _redis_health(config: GatewayConfig) -> RedisHealth | None:
    if config.redis_url is None:
        return None
    from penstock.gateway.storage.redis_health import RedisHealth

    return RedisHealth()


def _store_quotas(config: GatewayConfig, keys: KeyRing) -> QuotaOf:
    """What a tenant may store: by the key file, and otherwise by the flags."""

    def quota_of(tenant: str) -> StoreQuota:
        own = keys.store_quota(tenant)
        return StoreQuota(
            num_bytes=own.num_bytes or config.tenant_store_bytes,
            num_objects=own.num_objects or config.tenant_store_objects,
        )

    return quota_of


def make_stores(
    config: GatewayConfig,
    health: RedisHealth | None,
    log_settings: RedisLogSettings | None = None,
    *,
    quota_of: QuotaOf = no_quotas,
) -> Stores:
    """The stores by the settings.

    Args:
        health: of their Redis.
        log_settings: as in `create_app`.
        quota_of: what a tenant may keep in them.

    Raises:
        ConfigError: `--redis-url` is invalid.
    """
    if config.redis_url is not None and health is not None:
        return _redis_stores(config, config.redis_url, health, log_settings, quota_of)
    shares = TenantShares(quota_of)
    logs = MemoryLogStore(config.response_log_bytes, ttl_s=config.response_log_ttl_s, shares=shares)
    conversations = MemoryConversationStore(
        config.session_store_bytes, ttl_s=config.session_ttl_s, shares=shares
    )
    return Stores(conversations=conversations, logs=logs, start=_nothing, close=logs.close)


def _redis_stores(
    config: GatewayConfig,
    url: str,
    health: RedisHealth,
    log_settings: RedisLogSettings | None,
    quota_of: QuotaOf,
) -> Stores:
    from penstock.gateway.storage.conversations.redis_store import RedisConversationStore
    from penstock.gateway.storage.redis_link import RedisLink
    from penstock.gateway.storage.redis_shares import RedisShares
    from penstock.gateway.storage.redis_url import RedisAddress
    from penstock.gateway.storage.response_log.redis_store import RedisLogStore

    address = RedisAddress.parse(url)
    # Separate links, so that a slow or blocking command on one never delays the other.
    link, log_link = RedisLink(address, health=health), RedisLink(address, health=health)
    log_settings = log_settings or RedisLogSettings(
        ttl_s=config.response_log_ttl_s, ack_timeout_s=config.redis_patience_ms / 1e3
    )
    shares = RedisShares(link, quota_of)
    logs = RedisLogStore(log_link.client, log_settings, health, shares=shares)

    async def close() -> None:
        await logs.close()
        await shares.aclose()
        await log_link.aclose()
        await link.aclose()

    return Stores(
        conversations=RedisConversationStore(link, ttl_s=config.session_ttl_s, shares=shares),
        logs=logs,
        start=link.warn_unless_durable,
        close=close,
        is_up=link.is_up,
    )


def _engine_client(config: GatewayConfig) -> EngineClient:
    addresses, files = config.engine_addresses, config.tls_files
    tls = None
    if files is not None:
        context = CurrentContext(partial(gateway_context, files), files)
        tls = Tls(context, config.tls_server_name)
    return EngineClient(
        *((config.engine_address,) if addresses is None else addresses),
        engine_wait_s=config.engine_wait_s,
        routing=config.routing,
        kv_transfer=config.kv_transfer,
        tls=tls,
    )


def _discovery(
    config: GatewayConfig, engine: EngineClient, model_name: str, health: RedisHealth | None
) -> tuple[Discovery, Callable[[], Coroutine[None, None, None]]]:
    """Where engines on other machines are found, and what closes its connections."""
    finds: list[Find] = [partial(resolve, endpoint) for endpoint in config.remote_engines]
    if config.redis_url is None or not config.discover:
        return Discovery(engine, finds), _nothing
    from penstock.gateway.storage.redis_engines import RedisEngines
    from penstock.gateway.storage.redis_link import RedisLink
    from penstock.gateway.storage.redis_url import RedisAddress

    link = RedisLink(RedisAddress.parse(config.redis_url), health=health)
    registered = RedisEngines(link, model_name)
    return Discovery(engine, [*finds, registered.addresses]), registered.close


def _adapter_changes(config: GatewayConfig, health: RedisHealth | None) -> AdapterChanges:
    if config.redis_url is None or not config.enable_lora:
        return MemoryChanges()
    from penstock.gateway.storage.redis_adapters import RedisAdapterChanges
    from penstock.gateway.storage.redis_link import RedisLink
    from penstock.gateway.storage.redis_url import RedisAddress

    link = RedisLink(RedisAddress.parse(config.redis_url), health=health)
    # Gateways that discover the same engines have the same adapters.
    server = f"engines of {config.model_names[0]}" if config.discover else config.engine_address
    return RedisAdapterChanges(link, server=server)


async def _nothing() -> None:
    """Stores in memory need no start and no close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Everything that decides whether a request is let in."""

    keys: KeyRing
    tickets: Tickets
    admission: Admission
    aclose: Callable[[], Awaitable[None]]


def make_gate(config: GatewayConfig, engine: EngineClient, health: RedisHealth | None) -> Gate:
    """
    Args:
        health: of the Redis with `--redis-url`.

    Raises:
        ConfigError: the key file or `--redis-url` is invalid.
    """
    quotas, tickets, aclose = _shared(config, health)
    bounds = QueueBounds(
        max_requests=config.max_queue_requests,
        max_tokens=config.max_queue_tokens,
        deadline_s=_seconds(config.request_deadline_ms),
    )
    queue = EngineQueue(bounds, engine=engine, clock=time.monotonic)
    file = config.api_keys_file
    return Gate(
        keys=KeyRing(config.api_keys, None if file is None else Path(file)),
        tickets=tickets,
        admission=Admission(quotas, queue),
        aclose=aclose,
    )


_Shared = tuple[Quotas, Tickets, Callable[[], Awaitable[None]]]


def _shared(config: GatewayConfig, health: RedisHealth | None) -> _Shared:
    """Quotas and tickets; with Redis all gateways share them."""
    if config.redis_url is None:
        return LocalQuotas(time.monotonic), MemoryTickets(), _nothing
    from penstock.gateway.admission.redis_quotas import RedisQuotas
    from penstock.gateway.auth.redis_tickets import RedisTickets
    from penstock.gateway.storage.redis_link import RedisLink
    from penstock.gateway.storage.redis_url import RedisAddress

    address = RedisAddress.parse(config.redis_url)
    link = RedisLink(address, timeout_s=_ADMISSION_TIMEOUT_S, health=health)
    fallback = LocalQuotas(time.monotonic, share=1.0 / config.num_workers)
    quotas = RedisQuotas(link, fallback)

    async def aclose() -> None:
        await quotas.aclose()
        await link.aclose()

    return quotas, RedisTickets(link), aclose


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
