"""A gateway on a real socket, in front of a fake engine on real ZeroMQ."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import types
import unittest.mock
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import tokenizers
import uvicorn
import websockets
from starlette.applications import Starlette
from tokenizers import decoders, models, pre_tokenizers, trainers

from penstock.engine.config import ModelConfig
from penstock.engine.text import Tokenizer
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.http.http_protocol import HttpLimits, RefuseConnections, limited_protocol
from penstock.gateway.http.server import HttpServer
from penstock.gateway.http.websocket_protocol import PatientWebSocketProtocol
from penstock.gateway.storage.response_log import redis_store
from penstock.gateway.storage.response_log.redis_store import RedisLogSettings

from ..redis_server import RedisServer
from .fake_engine import INFO, FakeEngine

ANSWER = "Hello, wörld! 😀 This is the fake engine speaking."
PATIENCE_S = 60.0  # what has not happened by then never will
_LIMITS = HttpLimits(max_connections=10_000, header_timeout_s=60.0, body_timeout_s=60.0)
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'user' and not message.content %}"
    "{{ raise_exception('empty user turn') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with everything of a model but its weights."""
    path = tmp_path_factory.mktemp("model")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([ANSWER] * 3, trainer)
    backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text(json.dumps({"eos_token_id": 0}))
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that nobody kills."""
    with RedisServer(tmp_path_factory.mktemp("redis"), appends=False) as server:
        yield server


@pytest.fixture
def patient_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For gateways with Redis: neither it nor one of them is given up because the machine stands
    still."""
    patient = partial(
        RedisLogSettings,
        ack_timeout_s=PATIENCE_S,
        request_timeout_s=PATIENCE_S,
        lease_s=PATIENCE_S / 10,
    )
    monkeypatch.setattr(redis_store, "RedisLogSettings", patient)
    monkeypatch.setattr(redis_store, "_HAND_OVER_S", PATIENCE_S)


@pytest.fixture(scope="session")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer.from_directory(model_path)


@dataclass
class Served:
    """A gateway that listens, and its engine."""

    port: int
    engine: FakeEngine
    tokenizer: Tokenizer
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    app: Starlette

    def prompt_of(self, index: int = -1) -> str:
        """The prompt of a submitted request, as text."""
        request = list(self.engine.submitted.values())[index]
        return self.tokenizer.decode(request.prompt_token_ids)

    def connect(self, **options: Any) -> websockets.connect:
        url = f"ws://127.0.0.1:{self.port}/v1/responses"
        return websockets.connect(url, open_timeout=PATIENCE_S, **options)

    async def aborted(self, num: int = 1) -> None:
        """Wait until the engine was told to stop that many requests."""
        await until(lambda: len(self.engine.aborted) >= num)

    async def submitted(self, num: int = 1) -> None:
        await until(lambda: len(self.engine.submitted) >= num)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  (the engine is a fake without events)
            await asyncio.sleep(0.005)


Serve = Callable[..., contextlib.AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(model_path: Path, tokenizer: Tokenizer, tmp_path: Path) -> Serve:
    """Starts a gateway: `async with serve(step_s=…, info={…}, **config) as served`; `info` is
    what the engine says of itself other than usual."""

    @contextlib.asynccontextmanager
    async def start(
        *, step_s: float = 0.0, info: Mapping[str, Any] | None = None, **settings: Any
    ) -> AsyncIterator[Served]:
        address = f"{tmp_path}/engine.sock"
        settings = {"model": ModelConfig(model=str(model_path)), **settings}
        config = GatewayConfig(engine_address=address, served_model_names=("tiny",), **settings)
        script = tokenizer.encode(ANSWER)
        engine_info = msgspec.structs.replace(INFO, **(info or {}))
        fake = FakeEngine(address, script, step_s=step_s, info=engine_info)
        app = create_app(config)
        async with fake as engine, listen(app, config) as port:
            url = f"http://127.0.0.1:{port}"
            key = {"Authorization": f"Bearer {config.api_keys[0]}"} if config.api_keys else {}
            async with (
                httpx.AsyncClient(base_url=url, headers=key, timeout=PATIENCE_S) as http,
                openai.AsyncOpenAI(
                    base_url=f"{url}/v1",
                    api_key=config.api_keys[0] if config.api_keys else "none",
                    max_retries=0,
                    timeout=PATIENCE_S,
                ) as client,
            ):
                yield Served(port, engine, tokenizer, http, client, app)

    return start


@contextlib.asynccontextmanager
async def listen(app: Starlette, config: GatewayConfig) -> AsyncIterator[int]:
    """A gateway's port, while it serves."""
    server = HttpServer(
        uvicorn.Config(
            RefuseConnections(app),
            http=limited_protocol(_LIMITS),
            ws=PatientWebSocketProtocol,
            ws_max_size=config.max_websocket_message_bytes,
            ws_per_message_deflate=False,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=1,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
            ssl_keyfile_password=config.ssl_keyfile_password,
        )
    )
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    task = asyncio.create_task(server._serve([listener]))
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            await app.state.engine.wait_ready()
        yield listener.getsockname()[1]
    finally:
        # What uvicorn waits for, it looks for ten times a second; here, as often as `until`.
        task.cancel()
        await asyncio.wait([task])
        with unittest.mock.patch.object(uvicorn.server, "asyncio", _HASTY_ASYNCIO):
            await server.shutdown([listener])


async def _sleep_briefly(_: float) -> None:
    await asyncio.sleep(0.005)


_HASTY_ASYNCIO = types.SimpleNamespace(**{**vars(asyncio), "sleep": _sleep_briefly})


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve() as served:
        yield served
