"""The composition root: every part made once, and handed to those that need it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import zmq.asyncio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute

from penstock.gateway.auth import Guard
from penstock.gateway.config import GatewayConfig
from penstock.gateway.endpoints.chat_completions import ChatCompletions
from penstock.gateway.endpoints.completions import Completions
from penstock.gateway.endpoints.models import Models
from penstock.gateway.endpoints.responses import Responses
from penstock.gateway.endpoints.status import Status
from penstock.gateway.engine_client import EngineClient
from penstock.gateway.errors import EXCEPTION_HANDLERS
from penstock.gateway.generator import Generator
from penstock.gateway.metrics import Metrics
from penstock.gateway.model import load_model
from penstock.gateway.page import ChatPage
from penstock.gateway.responder import Responder
from penstock.gateway.sessions import SessionStore
from penstock.gateway.websocket import ResponsesSocket


def create_app(config: GatewayConfig) -> Starlette:
    """The gateway as an ASGI application. `app.state.engine` is its link to the engine, which
    opens and closes with the application's lifespan.

    Raises:
        ModelLoadError: the model's tokenizer or settings cannot be read.
    """
    model = load_model(config)
    context = zmq.asyncio.Context()
    engine = EngineClient(config.engine_address, context)
    metrics = Metrics(engine, model.name)
    generator = Generator(
        engine,
        model,
        metrics=metrics,
        trusts_request_template=config.trust_request_chat_template,
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.close()
            context.destroy(linger=200)

    app = Starlette(
        routes=[
            Mount("/v1", routes=_api_routes(config, generator, engine=engine)),
            *_status_routes(Status(engine, metrics)),
            Mount("/", app=ChatPage()),
        ],
        middleware=_middleware(config),
        exception_handlers=EXCEPTION_HANDLERS,
        lifespan=lifespan,
    )
    app.state.engine = engine
    return app


def _api_routes(
    config: GatewayConfig, generator: Generator, *, engine: EngineClient
) -> list[BaseRoute]:
    models = Models(engine, generator.model)
    sessions = SessionStore(config.session_store_bytes)
    responder = Responder(
        generator, sessions, engine=engine, retention_s=config.session_retention_s
    )
    max_bytes, ping_s = config.max_body_bytes, config.sse_ping_s
    chat = ChatCompletions(generator, max_body_bytes=max_bytes, ping_s=ping_s)
    completions = Completions(generator, max_body_bytes=max_bytes, ping_s=ping_s)
    responses = Responses(responder, sessions, max_body_bytes=max_bytes, ping_s=ping_s)
    return [
        Route("/chat/completions", chat.create, methods=["POST"]),
        Route("/completions", completions.create, methods=["POST"]),
        WebSocketRoute("/responses", ResponsesSocket(responder, sessions).serve),
        Route("/responses", responses.create, methods=["POST"]),
        Route("/responses/{response_id}", responses.retrieve, methods=["GET"]),
        Route("/responses/{response_id}", responses.delete, methods=["DELETE"]),
        Route("/models", models.list, methods=["GET"]),
        Route("/models/{model:path}", models.retrieve, methods=["GET"]),
    ]


def _status_routes(status: Status) -> list[BaseRoute]:
    return [
        Route("/health", status.health, methods=["GET"]),
        Route("/ready", status.ready, methods=["GET"]),
        Route("/metrics", status.metrics, methods=["GET"]),
    ]


def _middleware(config: GatewayConfig) -> list[Middleware]:
    guard = Middleware(Guard, config=config)
    if not config.allowed_origins:
        return [guard]
    # Outermost, so that a page let in can also read why it was refused.
    cors = Middleware(
        CORSMiddleware,
        allow_origins=config.allowed_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
    )
    return [cors, guard]
