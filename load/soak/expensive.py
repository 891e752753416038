"""What is cheap to send and costs a server much: schemas, grammars, tiny messages, much to store,
images from a host that sends byte by byte, and peers of an engine that say nothing.

Sent by a tenant of its own, where the server has keys, over some connections at once. A server may
refuse any of it properly; `verdict` judges what other streams notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import orjson
import psutil

from penstock.engine.config import TlsFiles
from penstock.engine.protocol.tls import CurrentContext, gateway_context
from penstock.gateway.engines.engine_client import EngineClient
from penstock.gateway.engines.engine_link import Tls
from penstock.load.soak.journal import Kind
from penstock.load.soak.scene import Scene

NUM_CONNECTIONS = 3
FOR_S = 8.0  # of each kind
NUM_GRAMMARS = 60
NUM_STORED, STORED_BYTES = 60, 3_800_000
STORE_MEMORY_BYTES = 100_000_000  # in Redis, at most: the tenant's quota, and what is sent
NUM_IDLE, NUM_GATEWAYS, GATEWAY_WITHIN_S = 100, 5, 10.0
_ANSWER_S = 60.0
_REFUSALS = (*range(400, 500), 503)
_CHAT = "/v1/chat/completions"
_SCHEMA_BYTES, _FORMAT_BYTES, _PLAIN_BYTES = 215_000, 151_000, 250_000
_DEPTH, _NUM_MESSAGES, _NUM_IMAGES, _IMAGES_EVERY_S = 10, 4096, 4, 0.1
Body: TypeAlias = Mapping[str, Any]


# -- requests -----------------------------------------------------------------------------------


def _schema(number: int, num_bytes: int) -> Body:
    """An object of many fields; no two numbers have the same."""
    field = {"type": "string", "description": "what somebody said of it " * 3}
    num_fields = num_bytes // (len(orjson.dumps(field)) + 40)
    names = [f"field_{number}_{index:05}" for index in range(num_fields)]
    return {
        "type": "object",
        "properties": dict.fromkeys(names, field),
        "required": names,
        "additionalProperties": False,
    }


def _deep(level: int, path: str) -> Body:
    if not level:
        names = {f"of_{path}": {"type": "string"}}
        return {"type": "object", "properties": names, "required": [*names]}
    return {"anyOf": [_deep(level - 1, f"{path}{side}") for side in "ab"]}


def _format(schema: Body) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


# The rest of a chat request, by a number that makes it another one.
BODIES: Mapping[Kind, Callable[[int], Body]] = {
    Kind.PLAIN_TEXT: lambda number: {
        "messages": [{"role": "user", "content": f"{number} " + "words " * (_PLAIN_BYTES // 6)}]
    },
    Kind.TOOL_SCHEMAS: lambda number: {
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "strict": True,
                    "parameters": _schema(number, _SCHEMA_BYTES),
                },
            }
        ]
    },
    Kind.RESPONSE_FORMATS: lambda number: {
        "response_format": _format(_schema(number, _FORMAT_BYTES))
    },
    Kind.DEEP_SCHEMAS: lambda number: {"response_format": _format(_deep(_DEPTH, f"{number}_"))},
    Kind.TINY_MESSAGES: lambda number: {
        "messages": [{"role": "user", "content": str(number)}] * _NUM_MESSAGES
    },
}


async def keep_sending(scene: Scene, flood_key: str | None, kind: Kind) -> None:
    """Requests of one kind, each another one, for a time."""
    ends_s, numbers = time.perf_counter() + FOR_S, itertools.count()

    async def send() -> None:
        while time.perf_counter() < ends_s:
            body = await asyncio.to_thread(BODIES[kind], next(numbers))
            await _ask(scene, flood_key, kind, body)

    await asyncio.gather(*(send() for _ in range(NUM_CONNECTIONS)))


async def flood_grammars(scene: Scene, flood_key: str | None) -> None:
    """Small patterns that become large grammars."""

    async def send(number: int) -> None:
        pattern = rf"(\w{{1,40}}[ ,.]){{1,240}}{number}"
        await _ask(scene, flood_key, Kind.GRAMMARS, {"guided_regex": pattern, "max_tokens": 256})

    await _some_at_once(map(partial(partial, send), range(NUM_GRAMMARS)))


async def flood_store(scene: Scene, flood_key: str, redis: psutil.Process | None) -> None:
    """Conversations as large as a body may be; those of other tenants must stay."""
    async with scene.http.post("/v1/conversations", json={}) as response:
        kept = orjson.loads(await response.read())["id"]
    before = 0 if redis is None else redis.memory_info().rss
    content = "x" * STORED_BYTES
    items = [{"type": "message", "role": "user", "content": content}]
    body = await asyncio.to_thread(orjson.dumps, {"items": items})

    async def send() -> None:
        await _post(scene, flood_key, Kind.STORE, "/v1/conversations", body)

    await _some_at_once(itertools.repeat(send, NUM_STORED))
    async with scene.http.get(f"/v1/conversations/{kept}") as response:
        if response.status != 200:
            detail = f"another tenant's conversation is gone: {response.status}"
            scene.journal.problem(Kind.STORE, detail)
    taken = 0 if redis is None else redis.memory_info().rss - before
    if taken > STORE_MEMORY_BYTES:
        scene.journal.problem(Kind.STORE, f"Redis took {taken / 1e6:,.0f} MB more")


async def ask_image_host(scene: Scene, flood_key: str | None, host: str) -> None:
    """Images from a listed host that sends chunks of one byte, without end."""
    ends_s = time.perf_counter() + FOR_S

    async def send() -> None:
        while time.perf_counter() < ends_s:
            url = {"type": "image_url", "image_url": {"url": f"http://{host}/x.png"}}
            content = [{"type": "text", "text": "what is this?"}, *[url] * _NUM_IMAGES]
            body = {"messages": [{"role": "user", "content": content}]}
            await _ask(scene, flood_key, Kind.IMAGE_HOST, body)
            await asyncio.sleep(_IMAGES_EVERY_S)  # not a flood of requests

    await asyncio.gather(*(send() for _ in range(NUM_CONNECTIONS)))


async def _some_at_once(sends: Iterator[Callable[[], Awaitable[None]]]) -> None:
    async def work() -> None:
        for send in sends:
            await send()

    await asyncio.gather(*(work() for _ in range(NUM_CONNECTIONS)))


async def _ask(scene: Scene, key: str | None, kind: Kind, body: Body) -> None:
    usual = {
        "model": scene.model,
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 1,
    }
    data = await asyncio.to_thread(orjson.dumps, {**usual, **body})
    await _post(scene, key, kind, _CHAT, data)


async def _post(scene: Scene, key: str | None, kind: Kind, path: str, body: bytes) -> None:
    """Post, and note an answer that is neither one nor a proper refusal."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    try:
        async with asyncio.timeout(_ANSWER_S):
            async with scene.http.post(path, data=body, headers=headers) as response:
                said = await response.read()
    except TimeoutError:
        scene.journal.problem(kind, f"no answer within {_ANSWER_S:g} s")
    except (aiohttp.ClientError, OSError) as error:
        scene.journal.problem(kind, f"the connection broke: {error!r}")
    else:
        if response.status != 200 and not (response.status in _REFUSALS and b'"error"' in said):
            scene.journal.problem(kind, f"answered {response.status} {said[:200]!r}")


# -- a host of images ---------------------------------------------------------------------------


@contextlib.contextmanager
def dripping_host() -> Iterator[str]:
    """HOST:PORT of one that answers every request with chunks of one byte, without end."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\nTransfer-Encoding: chunked\r\n\r\n"

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(head)
            while True:
                connection.sendall(b"1\r\nx\r\n" * 1000)

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, args=(listener,), daemon=True).start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


# -- peers of an engine -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerEngine:
    """An engine that listens for gateways of other machines."""

    address: str
    files: TlsFiles  # certificate, key and authority of engine and gateways alike


def certificate(folder: Path) -> TlsFiles:
    """One for 127.0.0.1 that signs itself, for engines and gateways."""
    cert, key = folder / "peer.pem", folder / "peer.key"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj /CN=peer -addext subjectAltName=IP:127.0.0.1 "
        "-addext extendedKeyUsage=serverAuth,clientAuth"
    )
    subprocess.run(  # noqa: S603  (our own command)
        [*command.split(), "-out", str(cert), "-keyout", str(key)], check=True, capture_output=True
    )
    return TlsFiles(str(cert), str(key), str(cert))


async def idle_peers(scene: Scene, engine: PeerEngine) -> None:
    """Peers that connect to an engine and say nothing, again when they are closed; beside them
    gateways must get in."""
    host, _, port = engine.address.rpartition(":")
    idle = [asyncio.create_task(_stay_idle(host, int(port))) for _ in range(NUM_IDLE)]
    try:
        await asyncio.sleep(1.0)  # until they are there
        for number in range(NUM_GATEWAYS):
            context = CurrentContext(partial(gateway_context, engine.files), engine.files)
            client = EngineClient(engine.address, tls=Tls(context))
            client.start()
            try:
                async with asyncio.timeout(GATEWAY_WITHIN_S):
                    await client.wait_ready()
            except TimeoutError:
                detail = f"gateway {number} did not get in within {GATEWAY_WITHIN_S:g} s"
                scene.journal.problem(Kind.IDLE_PEERS, detail)
            finally:
                await client.close()
    finally:
        for task in idle:
            task.cancel()
        await asyncio.gather(*idle, return_exceptions=True)


async def _stay_idle(host: str, port: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                await reader.read()
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.01)
