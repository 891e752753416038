"""A gateway on a real socket, in front of a fake engine on a real Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import socket
import types
import unittest.mock
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
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
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.text import Tokenizer
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.engines import engine_link, engine_pool
from penstock.gateway.http.http_protocol import HttpLimits, RefuseConnections, limited_protocol
from penstock.gateway.http.server import HttpServer
from penstock.gateway.http.websocket_protocol import PatientWebSocketProtocol
from penstock.gateway.storage.response_log.redis_settings import RedisLogSettings

from ..redis_server import RedisServer
from ..support.toxic_proxy import ToxicProxy
from .fake_engine import INFO, FakeEngine

ANSWER = "Hello, wörld! 😀 This is the fake engine speaking."
IMAGE = "<image>"
SIDE = 2  # image tokens of a row
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
def vision_path(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model's directory, of a model that takes images."""
    path = tmp_path_factory.mktemp("vision") / "model"
    shutil.copytree(model_path, path)
    words = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    words.add_special_tokens([IMAGE])
    words.save(str(path / "tokenizer.json"))
    config = {
        "model_type": "llava",
        "eos_token_id": 0,
        "image_token_id": words.token_to_id(IMAGE),
        "vision_config": {"image_size": 7 * SIDE, "patch_size": 7},
    }
    (path / "config.json").write_text(json.dumps(config))
    parts = (
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type == 'image' %}"
        f"{IMAGE}{{% else %}}{{{{ part.text }}}}{{% endif %}}{{% endfor %}}{{% endif %}}"
    )
    template = TEMPLATE.replace("{{ message.content }}", parts)
    assert template != TEMPLATE
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return path


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis that nobody kills, freezes, or leaves with other settings."""
    with RedisServer(tmp_path_factory.mktemp("redis"), appends=False) as server:
        yield server


@pytest.fixture
def redis_server(shared_server: RedisServer) -> RedisServer:
    """The same, empty."""
    return _emptied(shared_server)


@pytest.fixture(scope="session")
def shared_cluster_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    path = tmp_path_factory.mktemp("node")
    with RedisServer(path, is_cluster=True, password="geheim", appends=False) as server:
        yield server


@pytest.fixture
def cluster_node(shared_cluster_node: RedisServer) -> RedisServer:
    """The only node of a cluster, empty, which refuses what concerns keys of several slots."""
    return _emptied(shared_cluster_node)


def _emptied(server: RedisServer) -> RedisServer:
    with server.client() as client:
        client.flushall()
    return server


@contextlib.contextmanager
def configured(server: RedisServer, **settings: object) -> Iterator[None]:
    """Redis with other settings, named as in `redis.conf` but for the hyphens, as long as the
    context lasts."""
    wanted = {name.replace("_", "-"): str(value) for name, value in settings.items()}
    with server.client() as client:
        before = {name: client.config_get(name)[name] for name in wanted}
        client.config_set(*itertools.chain(*wanted.items()))
        try:
            yield
        finally:
            client.config_set(*itertools.chain(*before.items()))


class RedisPath(ToxicProxy):
    """A way to Redis that can be lost and found again: all that a gateway notices of a Redis that
    is killed or frozen."""

    def __init__(self, server: RedisServer) -> None:
        super().__init__("127.0.0.1", server.port)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def url_with(self, password: str) -> str:
        return f"redis://:{password}@127.0.0.1:{self.port}/0"

    @property
    def patient_url(self) -> str:
        """As that of `RedisServer`."""
        return f"{self.url}?socket_timeout=60&socket_connect_timeout=60"

    async def lose(self) -> None:
        """Connections end, and new ones are refused, until `find`."""
        self.refuse()
        self.reset_all()

    def find(self) -> None:
        self.accept()

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """What is sent meanwhile is not heard."""
        self.upstream.is_black_hole = True
        try:
            yield
        finally:
            self.upstream.is_black_hole = False


def patient_log_settings() -> RedisLogSettings:
    """Of gateways with Redis: neither it nor one of them is given up because the machine stands
    still."""
    return RedisLogSettings(
        ack_timeout_s=PATIENCE_S,
        request_timeout_s=PATIENCE_S,
        lease_s=PATIENCE_S / 10,
        hand_over_s=PATIENCE_S,
    )


@pytest.fixture
def app_options() -> dict[str, Any]:
    """What `serve` gives `create_app` beside the settings."""
    return {}


@pytest.fixture
def patient_logs(app_options: dict[str, Any]) -> RedisLogSettings:
    """Makes gateways of `serve` as patient as `patient_log_settings`."""
    settings = app_options["log_settings"] = patient_log_settings()
    return settings


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
def serve(
    model_path: Path, tokenizer: Tokenizer, tmp_path: Path, app_options: dict[str, Any]
) -> Serve:
    """Starts a gateway: `async with serve(step_s=…, info={…}, **config) as served`; `info` is
    what the engine says of itself other than usual, `chat_template` is used instead of the
    model's."""

    @contextlib.asynccontextmanager
    async def start(
        *,
        step_s: float = 0.0,
        info: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        **settings: Any,
    ) -> AsyncIterator[Served]:
        address = f"{tmp_path}/engine.sock"
        given = ModelConfig(model=str(model_path), chat_template=chat_template)
        model = ModelConfig(model=str(resolve_model(given, weights=False)))
        usual = {"model": model, "served_model_names": ("tiny",)}
        config = GatewayConfig(engine_address=address, **{**usual, **settings})
        script = tokenizer.encode(ANSWER)
        engine_info = msgspec.structs.replace(INFO, **(info or {}))
        fake = FakeEngine(address, script, step_s=step_s, info=engine_info)
        app = create_app(config, **app_options)
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
    settings = uvicorn.Config(
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
    async with serving(settings) as (_, port):
        async with asyncio.timeout(PATIENCE_S):
            await app.state.engine.wait_ready()
        yield port


@contextlib.asynccontextmanager
async def serving(config: uvicorn.Config) -> AsyncIterator[tuple[HttpServer, int]]:
    """A server and its port, while it serves."""
    server = HttpServer(config)
    # asyncio lets only sockets that name their protocol send without delay: without TCP_NODELAY,
    # each answer of a connection but the first takes 40 ms.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        task = asyncio.create_task(server._serve([listener]))
        await until(lambda: server.started or task.done())
        if not server.started:
            await task  # to fail as it did
        try:
            yield server, listener.getsockname()[1]
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
def soon_alarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways notice at once that an engine is dead, and do not take its silence for that."""
    monkeypatch.setattr(engine_link, "HEARTBEAT_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_link, "MAX_SILENT_BEATS", 50 * PATIENCE_S)
    monkeypatch.setattr(engine_pool, "_FIND_AGAIN_S", 0.05)


@pytest.fixture
async def served(serve: Serve) -> AsyncIterator[Served]:
    async with serve() as served:
        yield served
