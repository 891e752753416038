"""What is cheap to send and costs a server much: schemas, grammars, tiny messages, much to store,
images from a host that sends byte by byte, and peers of an engine that say nothing.

Sent by a tenant of its own, where the server has keys, over some connections at once. A server may
refuse any of it properly; `verdict` judges what other streams notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import orjson

from penstock.engine.protocol.tls import CurrentContext, gateway_context
from penstock.gateway.engines.engine_link import Tls
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.load.soak.journal import Kind
from penstock.load.soak.scene import Scene, post
from penstock.load.soak.target import Target

NUM_CONNECTIONS = 3
FOR_S = 8.0  # of each kind
NUM_GRAMMARS = 60
NUM_STORED, STORED_BYTES = 60, 3_800_000
STORE_MEMORY_BYTES = 100_000_000  # in Redis, at most: the tenant's quota, and what is sent
NUM_IDLE, NUM_GATEWAYS, GATEWAY_WITHIN_S = 100, 5, 10.0
_STATUSES = (200, *range(400, 500), 503)
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


def _user(content: str | list[Any], count: int = 1) -> Body:
    return {"messages": [{"role": "user", "content": content}] * count}


def _format(schema: Body) -> Body:
    named = {"name": "x", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _tool(schema: Body) -> Body:
    function = {"name": "f", "strict": True, "parameters": schema}
    return {"tools": [{"type": "function", "function": function}]}


# The rest of a chat request, by a number that makes it another one.
BODIES: Mapping[Kind, Callable[[int], Body]] = {
    Kind.PLAIN_TEXT: lambda number: _user(f"{number} " + "words " * (_PLAIN_BYTES // 6)),
    Kind.TOOL_SCHEMAS: lambda number: _tool(_schema(number, _SCHEMA_BYTES)),
    Kind.RESPONSE_FORMATS: lambda number: _format(_schema(number, _FORMAT_BYTES)),
    Kind.DEEP_SCHEMAS: lambda number: _format(_deep(_DEPTH, f"{number}_")),
    Kind.TINY_MESSAGES: lambda number: _user(str(number), _NUM_MESSAGES),
}


async def keep_sending(kind: Kind, scene: Scene, target: Target) -> None:
    """Requests of one kind, each another one, for a time."""
    bodies = map(partial(partial, BODIES[kind]), itertools.count())
    await _send(scene, target, kind, _for_a_time(bodies))


async def flood_grammars(scene: Scene, target: Target) -> None:
    """Small patterns that become large grammars."""

    def body(number: int) -> Body:
        return {"guided_regex": rf"(\w{{1,40}}[ ,.]){{1,240}}{number}", "max_tokens": 256}

    bodies = map(partial(partial, body), range(NUM_GRAMMARS))
    await _send(scene, target, Kind.GRAMMARS, bodies)


async def flood_store(scene: Scene, target: Target) -> None:
    """Conversations as large as a body may be; those of other tenants must stay."""
    async with scene.http.post("/v1/conversations", json={}) as response:
        kept = orjson.loads(await response.read())["id"]
    redis = target.victims().get("redis")
    before = 0 if redis is None else redis.memory_info().rss
    item = {"type": "message", "role": "user", "content": "x" * STORED_BYTES}
    bodies = itertools.repeat(lambda: {"items": [item]}, NUM_STORED)
    await _send(scene, target, Kind.STORE, bodies, path="/v1/conversations")
    async with scene.http.get(f"/v1/conversations/{kept}") as response:
        if response.status != 200:
            detail = f"another tenant's conversation is gone: {response.status}"
            scene.journal.problem(Kind.STORE, detail)
    taken = 0 if redis is None else redis.memory_info().rss - before
    if taken > STORE_MEMORY_BYTES:
        scene.journal.problem(Kind.STORE, f"Redis took {taken / 1e6:,.0f} MB more")


async def ask_image_host(scene: Scene, target: Target) -> None:
    """Images from a listed host that sends chunks of one byte, without end."""
    url = {"type": "image_url", "image_url": {"url": f"http://{target.image_host}/x.png"}}
    body = _user([{"type": "text", "text": "what is this?"}, *[url] * _NUM_IMAGES])
    bodies = _for_a_time(itertools.repeat(lambda: body))
    # Not a flood of requests.
    await _send(scene, target, Kind.IMAGE_HOST, bodies, every_s=_IMAGES_EVERY_S)


def _for_a_time(bodies: Iterable[Callable[[], Body]]) -> Iterable[Callable[[], Body]]:
    ends_s = time.perf_counter() + FOR_S
    return itertools.takewhile(lambda _: time.perf_counter() < ends_s, bodies)


async def _send(
    scene: Scene,
    target: Target,
    kind: Kind,
    bodies: Iterable[Callable[[], Body]],
    *,
    path: str = "/v1/chat/completions",
    every_s: float = 0.0,
) -> None:
    """Post bodies over some connections at once; those of chat get the usual fields."""
    usual: Body = {"model": scene.model, **_user("hello"), "max_tokens": 1}
    usual = usual if path.endswith("completions") else {}
    left = iter(bodies)

    def dump(make: Callable[[], Body]) -> bytes:
        return orjson.dumps({**usual, **make()})

    async def work() -> None:
        for make in left:
            data, key = await asyncio.to_thread(dump, make), target.flood_key
            await post(scene, path, data, actor=kind, key=key, statuses=_STATUSES)
            await asyncio.sleep(every_s)

    await asyncio.gather(*(work() for _ in range(NUM_CONNECTIONS)))


# -- peers of an engine -------------------------------------------------------------------------


async def idle_peers(scene: Scene, target: Target) -> None:
    """Peers that connect to an engine and say nothing, again when they are closed; beside them
    gateways must get in."""
    assert target.peer_engine is not None
    address, files = target.peer_engine
    host, _, port = address.rpartition(":")
    idle = [asyncio.create_task(_stay_idle(host, int(port))) for _ in range(NUM_IDLE)]
    try:
        await asyncio.sleep(1.0)  # until they are there
        for number in range(NUM_GATEWAYS):
            context = CurrentContext(partial(gateway_context, files), files)
            client = EnginePool(address, tls=Tls(context))
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
