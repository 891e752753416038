"""Stopping, counted in the engine's steps: two gateways on one Redis before an engine's real
server, scheduler and blocks, whose device takes a step when it is let. A stop that reaches the
engine during a step has freed the blocks before the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import websockets

from penstock.engine.config import ModelConfig
from penstock.engine.text import Tokenizer
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig

from ....engine.process.stack import Engine
from ....engine.scheduling.fake_device import expected_output
from ....redis_server import RedisServer
from ...conftest import listen
from ...fake_engine import INFO
from .records import PATIENCE_S

pytestmark = pytest.mark.redis
NUM_STEPS = 40  # before a stop
ENDLESS = {"model": "tiny", "ignore_eos": True, "stream": True}


async def holds(engine: Engine, num_steps: int) -> None:
    """Wait until so many steps are done and the next one is held."""
    await asyncio.to_thread(engine.wait_for_step, num_steps + 1)


@dataclass
class Stack:
    engine: Engine
    first: httpx.AsyncClient
    second: httpx.AsyncClient


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(f"{tmp_path}/engine.sock", INFO)
    engine.device.hold()
    with engine:
        yield engine
    assert engine.error is None


@pytest.fixture
async def stack(
    engine: Engine, model_path: Path, tmp_path: Path, shared_server: RedisServer
) -> AsyncIterator[Stack]:
    config = GatewayConfig(
        engine_address=f"{tmp_path}/engine.sock",
        served_model_names=("tiny",),
        model=ModelConfig(model=str(model_path)),
        redis_url=shared_server.url,
    )
    async with contextlib.AsyncExitStack() as exits:
        clients = []
        for _ in range(2):
            port = await exits.enter_async_context(listen(create_app(config), config))
            client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
            clients.append(await exits.enter_async_context(client))
        yield Stack(engine, *clients)
        engine.device.set_free()  # what still runs is to end


async def is_freed_by_the_next_step(engine: Engine, num_steps: int) -> None:
    """A stop is on its way to an engine that holds a step. See it through: after that step nothing
    is computed for it, and no block is taken."""
    await asyncio.to_thread(engine.wait_for_mail)
    assert len(engine.device.begun) == num_steps + 1
    assert engine.blocks.tiers.device.num_held > num_steps // INFO.block_size
    engine.device.allow(1)
    await holds(engine, num_steps + 1)
    assert engine.blocks.tiers.device.num_held == 0
    met, after = engine.device.begun[-2:]
    assert not after.scheduled
    assert list(after.left_seq_ids) == [item.seq_id for item in met.scheduled]


def events_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    return (
        json.loads(line.removeprefix("data: "))
        async for line in response.aiter_lines()
        if line.startswith("data: ")
    )


@pytest.mark.parametrize("by", ["post", "socket"])
@pytest.mark.parametrize("where", ["first", "second"])
async def test_a_cancel(stack: Stack, where: str, by: str) -> None:
    """From whichever gateway."""
    canceller: httpx.AsyncClient = getattr(stack, where)
    body = {**ENDLESS, "input": "!", "max_output_tokens": 900}
    stack.engine.device.allow(NUM_STEPS)
    async with stack.first.stream("POST", "/v1/responses", json=body) as response:
        events = events_of(response)
        response_id = (await anext(events))["response"]["id"]
        await holds(stack.engine, NUM_STEPS)
        if by == "post":
            answer = await canceller.post(f"/v1/responses/{response_id}/cancel")
            assert answer.status_code == 200, answer.text
        else:
            url = str(canceller.base_url.copy_with(scheme="ws", path="/v1/responses"))
            async with websockets.connect(url, open_timeout=PATIENCE_S) as socket:
                event = {"type": "penstock.cancel", "response_id": response_id}
                await socket.send(json.dumps(event))
                await asyncio.to_thread(stack.engine.wait_for_mail)
        await is_freed_by_the_next_step(stack.engine, NUM_STEPS)
        *_, last = [event async for event in events]
        assert last["response"]["status"] == "cancelled"


async def test_a_stop_string(stack: Stack, tokenizer: Tokenizer) -> None:
    prompt = [5, 6, 7]
    token_ids = expected_output(prompt, NUM_STEPS)
    stop = tokenizer.decode(token_ids)[-4:]
    num_steps = next(
        num for num in range(NUM_STEPS + 1) if stop in tokenizer.decode(token_ids[:num])
    )
    stack.engine.device.allow(num_steps)
    body = {"model": "tiny", "prompt": prompt, "stop": stop, "max_tokens": 900, "ignore_eos": True}
    answer = asyncio.create_task(stack.first.post("/v1/completions", json=body))
    await holds(stack.engine, num_steps)
    if stack.engine.device.begun[-1].scheduled:
        await is_freed_by_the_next_step(stack.engine, num_steps)
    else:  # the gateway was so quick that the stop came before the next step was scheduled
        assert stack.engine.blocks.tiers.device.num_held == 0
    (choice,) = (await answer).json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] + stop == tokenizer.decode(token_ids[:num_steps])


async def test_a_client_that_leaves(stack: Stack) -> None:
    body = {**ENDLESS, "messages": [{"role": "user", "content": "!"}], "max_tokens": 900}
    stack.engine.device.allow(NUM_STEPS)
    async with stack.first.stream("POST", "/v1/chat/completions", json=body) as response:
        events = events_of(response)  # held: dropped, it would close the connection
        await anext(events)
        await holds(stack.engine, NUM_STEPS)
    await is_freed_by_the_next_step(stack.engine, NUM_STEPS)
