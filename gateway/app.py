"""The composition root: every part made once, and handed to those that need it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from penstock.engine.logs import LogWriter
from penstock.gateway.access_log import RequestLog, route_templates
from penstock.gateway.admission.factory import Gate, make_gate
from penstock.gateway.auth import Guard
from penstock.gateway.config import GatewayConfig
from penstock.gateway.endpoints.chat_completions import ChatCompletions
from penstock.gateway.endpoints.completions import Completions
from penstock.gateway.endpoints.conversations import conversation_routes
from penstock.gateway.endpoints.description import Description
from penstock.gateway.endpoints.models import Models
from penstock.gateway.endpoints.responses import Responses
from penstock.gateway.endpoints.stats_socket import StatsSocket
from penstock.gateway.endpoints.status import Status
from penstock.gateway.endpoints.tickets import TicketDesk
from penstock.gateway.endpoints.tokens import Tokens
from penstock.gateway.endpoints.wrong_methods import refusing_others
from penstock.gateway.engine_client import EngineClient
from penstock.gateway.errors import EXCEPTION_HANDLERS
from penstock.gateway.generator import Generator
from penstock.gateway.idempotency import IdempotentAnswers
from penstock.gateway.memory_trim import trim_memory
from penstock.gateway.metrics import Metrics
from penstock.gateway.model import ServedModel, load_model
from penstock.gateway.page import ChatPage
from penstock.gateway.request_ids import REQUEST_ID_HEADER
from penstock.gateway.responses.responder import Responder, ResponderSettings
from penstock.gateway.responses.run import RunSettings
from penstock.gateway.stores import Stores, make_stores
from penstock.gateway.template_process import TemplateProcess
from penstock.gateway.timers import StallTimer
from penstock.gateway.websocket import ResponsesSocket
from penstock.gateway.worker_metrics import Workers

if TYPE_CHECKING:
    from penstock.gateway.tracing import Tracing

# What a page of another origin may read of an answer beside its body.
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
    config: GatewayConfig, model: ServedModel | None = None, *, log: LogWriter | None = None
) -> Starlette:
    """The gateway as an ASGI application. `app.state.engine` is its link to the engine, which
    opens and closes with the application's lifespan; `app.state.log_store` hands its unfinished
    responses over.

    Args:
        log: who writes this process's log; its dropped lines are a metric.
        model: what `load_model` returns; None: it is called here.

    Raises:
        ModelLoadError: the model's tokenizer or settings cannot be read.
    """
    model = model or load_model(config)
    engine = EngineClient(config.engine_address, engine_wait_s=config.engine_wait_s)
    metrics = Metrics(engine, model.name, _workers(config))
    gate = make_gate(config, engine)
    generator = Generator(
        engine,
        model,
        metrics=metrics,
        admission=gate.admission,
        templates=TemplateProcess() if config.trust_request_chat_template else None,
        max_prompt_bytes=config.max_prompt_bytes,
    )

    stores = make_stores(config)
    responder = Responder(
        generator,
        engine=engine,
        conversations=stores.conversations,
        logs=stores.logs,
        settings=_responder_settings(config),
        metrics=metrics,
    )
    _watch(metrics, gate=gate, responder=responder, stores=stores, log=log)
    tracing = _tracing(config)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        await metrics.start()
        await responder.start()
        starting = asyncio.create_task(stores.start())
        trimming = asyncio.create_task(trim_memory())
        try:
            yield
        finally:
            starting.cancel()
            trimming.cancel()
            await engine.close()
            await gate.aclose()
            await responder.close()
            await generator.close()
            await stores.close()
            await metrics.close()
            if tracing is not None:
                await asyncio.to_thread(tracing.close)

    routes = [
        Mount(
            "/v1",
            routes=refusing_others(
                [
                    *_api_routes(config, generator, responder=responder, engine=engine),
                    WebSocketRoute("/stats", StatsSocket(engine, metrics).serve),
                    *TicketDesk(gate.tickets).routes(),
                    *conversation_routes(
                        stores.conversations, responder, max_body_bytes=config.max_body_bytes
                    ),
                ]
            ),
        ),
        *refusing_others(
            [
                *Tokens(generator, engine, max_body_bytes=config.max_body_bytes).routes(),
                *_status_routes(Status(engine, metrics)),
                Route("/openapi.json", Description(model.names).read, methods=["GET"]),
            ]
        ),
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
        middleware=_middleware(config, gate, request_log=request_log),
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.state.engine = engine
    app.state.log_store = stores.logs
    return app


def _api_routes(
    config: GatewayConfig, generator: Generator, *, responder: Responder, engine: EngineClient
) -> list[BaseRoute]:
    models = Models(engine, generator.model)
    max_bytes, ping_s = config.max_body_bytes, config.ping_interval_s
    answers = IdempotentAnswers(responder)
    chat = ChatCompletions(generator, answers, max_body_bytes=max_bytes, ping_s=ping_s)
    completions = Completions(generator, answers, max_body_bytes=max_bytes, ping_s=ping_s)
    responses = Responses(responder, max_body_bytes=max_bytes, ping_s=ping_s)
    return [
        Route("/chat/completions", chat.create, methods=["POST"]),
        Route("/completions", completions.create, methods=["POST"]),
        WebSocketRoute("/responses", ResponsesSocket(responder).serve),
        *responses.routes(),
        Route("/models", models.list, methods=["GET"]),
        Route("/models/{model:path}", models.retrieve, methods=["GET"]),
    ]


def _responder_settings(config: GatewayConfig) -> ResponderSettings:
    return ResponderSettings(
        run=RunSettings(
            grace_s=config.disconnect_grace_s, interval_s=config.stream_interval_ms / 1e3
        ),
        retention_s=config.session_retention_s,
        needs_storage=config.session_storage == "required",
    )


def _status_routes(status: Status) -> list[BaseRoute]:
    return [
        Route("/health", status.health, methods=["GET"]),
        Route("/ready", status.ready, methods=["GET"]),
        Route("/metrics", status.metrics, methods=["GET"]),
    ]


def _workers(config: GatewayConfig) -> Workers | None:
    if config.num_workers == 1:
        return None
    return Workers(config.engine_address, index=config.worker_index, num=config.num_workers)


def _tracing(config: GatewayConfig) -> Tracing | None:
    """OpenTelemetry is loaded only where it is asked for."""
    if config.otlp_endpoint is None:
        return None
    from penstock.gateway.tracing import Tracing

    return Tracing(config.otlp_endpoint)


def _watch(
    metrics: Metrics, *, gate: Gate, responder: Responder, stores: Stores, log: LogWriter | None
) -> None:
    """Numbers that the metrics read where they are kept."""
    metrics.gauge(
        "admission_queue_requests",
        "Requests in the engine's queue, as admission counts them.",
        lambda: gate.admission.num_waiting,
    )
    metrics.gauge(
        "response_logs_live", "Responses that are computed now.", lambda: responder.num_running
    )
    metrics.counter(
        "slow_readers_closed",
        "Connections closed because nobody read them.",
        lambda: StallTimer.num_stalled,
    )
    metrics.counter(
        "log_lines_dropped",
        "Lines of the log dropped because nobody read it, or because it could not be written.",
        lambda: 0 if log is None else log.num_dropped,
    )
    if stores.is_up is not None:
        metrics.probe("redis_up", "1 while Redis answers.", stores.is_up)


def _middleware(config: GatewayConfig, gate: Gate, *, request_log: Middleware) -> list[Middleware]:
    """Outermost first: what a request meets on its way in."""
    guard = Middleware(
        Guard,
        config=config,
        keys=gate.keys,
        tickets=gate.tickets,
        limit_headers=gate.admission.headers,
    )
    if not config.allowed_origins:
        return [request_log, guard]
    # Before the guard, so that a page let in can also read why it was refused.
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED_HEADERS,
    )
    return [request_log, cors, guard]
