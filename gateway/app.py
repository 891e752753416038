"""The composition root: makes every part once and passes it to the parts that need it.

What outlives a request or is shared by gateways is in `shared_state`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
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
from penstock.gateway.api.status.running import RunningRequests
from penstock.gateway.api.status.stats_socket import StatsSocket
from penstock.gateway.api.tickets import TicketRoutes
from penstock.gateway.api.tokens.routes import Tokens
from penstock.gateway.api.usage import Usage
from penstock.gateway.api.wrong_paths import NoSuchSocket, handle_wrong_path, refusing_others
from penstock.gateway.auth.callers import Caller
from penstock.gateway.auth.guard import Guard
from penstock.gateway.auth.keys import KeyRing
from penstock.gateway.auth.tickets import Tickets
from penstock.gateway.config import ANY_NAME, GatewayConfig
from penstock.gateway.engines.discovery import Discovery, Find, resolve
from penstock.gateway.engines.engine_link import Tls
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.errors import EXCEPTION_HANDLERS
from penstock.gateway.generation.adapters import AdapterRegistry
from penstock.gateway.generation.cache_history import CacheHistory
from penstock.gateway.generation.grammar_check import GrammarCheck
from penstock.gateway.generation.images.fetch import ImageFetcher
from penstock.gateway.generation.images.loader import ImageLoader
from penstock.gateway.generation.images.local import LocalImages
from penstock.gateway.generation.pooled import Embedder
from penstock.gateway.generation.request_planner import RequestPlanner
from penstock.gateway.generation.served_model import ServedModel, load_model
from penstock.gateway.generation.template_process import TemplateProcess
from penstock.gateway.http.http_protocol import StallTimer
from penstock.gateway.http.page import ChatPage
from penstock.gateway.http.root_path import RootPath
from penstock.gateway.shared_state import SharedState, shared_state
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings
from penstock.gateway.storage.tenant_shares import QuotaOf, StoreQuota
from penstock.gateway.telemetry.access_log import ANY_PATH, RequestLog, route_templates
from penstock.gateway.telemetry.metrics import Metrics
from penstock.gateway.telemetry.request_record import REQUEST_ID_HEADER
from penstock.gateway.telemetry.worker_metrics import Workers

if TYPE_CHECKING:
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


def create_app(
    config: GatewayConfig,
    model: ServedModel | None = None,
    *,
    log: LogWriter | None = None,
    log_settings: RedisLogSettings | None = None,
) -> Starlette:
    """The gateway as an ASGI application. `app.state.engine` is its link to the engine, which
    opens and closes with the application's lifespan; `app.state.log_store` hands unfinished
    responses over to other gateways; `app.state.place` is where chats are kept.

    Args:
        log: this process's log writer; its dropped lines are a metric.
        log_settings: of response logs in Redis; None: the usual ones, with those of `config`.
        model: the result of `load_model`; None: it is called here.

    Raises:
        ModelLoadError: the model's tokenizer or settings cannot be read.
    """
    model = model or load_model(config)
    engine = _engine_pool(config)
    metrics = Metrics(engine, model.name, _workers(config))
    keys = _key_ring(config)
    state = shared_state(config, quota_of=_store_quotas(config, keys), log_settings=log_settings)
    admission = _admission(config, engine, state)
    adapters = AdapterRegistry(engine, model, state.adapters, is_on=config.enable_lora)
    planner = RequestPlanner(
        engine,
        model,
        metrics=metrics,
        ledger=state.ledger,
        admission=admission,
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
        history=CacheHistory() if config.explain_cache else None,
        max_prompt_bytes=config.max_prompt_bytes,
        max_logprobs=config.max_logprobs,
    )

    discovery = _discovery(config, engine, state)
    service = ResponseService(
        planner,
        engine=engine,
        conversations=state.conversations,
        logs=state.logs,
        ledger=state.ledger,
        settings=_service_settings(config),
        metrics=metrics,
        caller_of_tenant=keys.of_tenant,
    )
    _watch(metrics, admission=admission, service=service, grammars=planner.grammars, log=log)
    state.watch(metrics)
    tracing = _tracing(config)
    stats = StatsSocket(engine, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await state.start()
        engine.start()
        discovery.start()
        adapters.start()
        await metrics.start()
        stats.start()
        await service.start()
        try:
            yield
        finally:
            await stats.close()
            await discovery.close()
            await engine.close()
            await adapters.close()
            await service.close()
            await planner.close()
            await state.close()
            await metrics.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    embedder = Embedder(
        engine,
        model,
        adapters=adapters,
        metrics=metrics,
        ledger=state.ledger,
        admission=admission,
        long_work=planner.long_work,
        max_prompt_bytes=config.max_prompt_bytes,
    )
    apis = _apis(
        config,
        planner,
        embedder=embedder,
        service=service,
        engine=engine,
        state=state,
        admission=admission,
    )

    def names(caller: Caller) -> tuple[str, ...]:
        any_name = (ANY_NAME,) if model.takes_any_name else ()
        return (*model.names, *any_name, *adapters.of(caller))

    status = Status(engine, metrics, kind=state.conversations.kind, trouble=state.trouble)
    running = RunningRequests(planner.generations, cancel=service.cancel_here)
    apis += [
        TicketRoutes(state.tickets),
        status,
        stats,
        running,
        Description(names, config.root_path or ""),
    ]
    below_v1, others = routes_of(apis, mount="/v1")
    sockets = [
        WebSocketRoute("/v1/responses", ResponsesSocket(service).serve),
        WebSocketRoute("/v1/stats", stats.serve),
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
        middleware=_middleware(
            config,
            routes,
            keys=keys,
            tickets=state.tickets,
            admission=admission,
            request_log=request_log,
        ),
        exception_handlers={**EXCEPTION_HANDLERS, HTTPException: handle_wrong_path},
        lifespan=lifespan,
    )
    app.state.engine = engine
    app.state.log_store = state.logs
    app.state.conversations = state.conversations
    app.state.place = state.place
    return app


def _apis(
    config: GatewayConfig,
    planner: RequestPlanner,
    *,
    embedder: Embedder,
    service: ResponseService,
    engine: EnginePool,
    state: SharedState,
    admission: Admission,
) -> list[object]:
    """The objects whose methods serve the operations that take a body, and the models."""
    max_bytes, ping_s = config.max_body_bytes, config.ping_interval_s
    answers = IdempotentAnswers(service, state.claims)
    prompts = PooledPrompts(embedder, planner)
    of_adapters: list[object] = []
    if config.enable_lora:
        of_adapters = [
            Adapters(
                planner.adapters,
                engine,
                planner.model,
                max_rank=config.max_lora_rank,
                max_body_bytes=max_bytes,
            )
        ]
    return [
        ChatCompletions(planner, answers, max_body_bytes=max_bytes, ping_s=ping_s),
        Messages(
            planner,
            engine,
            answers,
            drops_billing_line=config.drop_billing_line,
            max_body_bytes=max_bytes,
            ping_s=ping_s,
        ),
        Completions(planner, answers, max_body_bytes=max_bytes, ping_s=ping_s),
        Infill(planner, max_body_bytes=max_bytes, ping_s=ping_s),
        Responses(service, answers, max_body_bytes=max_bytes, ping_s=ping_s),
        Embeddings(embedder, prompts, max_body_bytes=max_bytes),
        Classify(embedder, prompts, max_body_bytes=max_bytes),
        Rerank(embedder, max_body_bytes=max_bytes),
        Models(engine, planner.model, planner.adapters),
        Conversations(state.conversations, admission, service, max_body_bytes=max_bytes),
        ConversationItems(state.conversations, admission, service, max_body_bytes=max_bytes),
        Tokens(planner, engine, max_body_bytes=max_bytes),
        Usage(state.ledger, max_days=config.usage_days),
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
        engine_wait_s=config.engine_wait_s,
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
    admission: Admission,
    service: ResponseService,
    grammars: GrammarCheck,
    log: LogWriter | None,
) -> None:
    """Registers numbers that are read from their owners when metrics are collected."""
    metrics.gauge(
        "admission_queue_requests",
        "Requests in the engine's queue, as this gateway's admission control counts them.",
        lambda: admission.num_waiting,
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


def _middleware(
    config: GatewayConfig,
    routes: Sequence[BaseRoute],
    *,
    keys: KeyRing,
    tickets: Tickets,
    admission: Admission,
    request_log: Middleware,
) -> list[Middleware]:
    """The middlewares, outermost first."""
    keyed = {f"/{each.path.split('/')[1]}" for each in operations_of(routes) if each.needs_key}
    guard = Middleware(
        Guard,
        config=config,
        keyed_paths=sorted(keyed),
        keys=keys,
        tickets=tickets,
        limit_headers=admission.headers,
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


def _store_quotas(config: GatewayConfig, keys: KeyRing) -> QuotaOf:
    """What a tenant may store: by the key file, and otherwise by the flags."""

    def quota_of(tenant: str) -> StoreQuota:
        own = keys.store_quota(tenant)
        return StoreQuota(
            num_bytes=own.num_bytes or config.tenant_store_bytes,
            num_objects=own.num_objects or config.tenant_store_objects,
        )

    return quota_of


def _engine_pool(config: GatewayConfig) -> EnginePool:
    addresses, files = config.engine_addresses, config.tls_files
    tls = None
    if files is not None:
        context = CurrentContext(partial(gateway_context, files), files)
        tls = Tls(context, config.tls_server_name)
    return EnginePool(
        *((config.engine_address,) if addresses is None else addresses),
        engine_wait_s=config.engine_wait_s,
        routing=config.routing,
        kv_transfer=config.kv_transfer,
        tls=tls,
    )


def _discovery(config: GatewayConfig, engine: EnginePool, state: SharedState) -> Discovery:
    """Where engines on other machines are found."""
    finds: list[Find] = [partial(resolve, endpoint) for endpoint in config.remote_engines]
    if config.discover and state.engines is not None:
        finds.append(state.engines)
    return Discovery(engine, finds)


def _key_ring(config: GatewayConfig) -> KeyRing:
    """Raises: ConfigError: the key file is invalid."""
    file = config.api_keys_file
    return KeyRing(config.api_keys, None if file is None else Path(file))


def _admission(config: GatewayConfig, engine: EnginePool, state: SharedState) -> Admission:
    bounds = QueueBounds(
        max_requests=config.max_queue_requests,
        max_tokens=config.max_queue_tokens,
        deadline_s=_seconds(config.request_deadline_ms),
    )
    return Admission(state.quotas, EngineQueue(bounds, engine=engine, clock=time.monotonic))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
