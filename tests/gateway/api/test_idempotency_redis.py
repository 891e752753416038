"""`Idempotency-Key` before several gateways on one Redis."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from penstock.engine.config import ModelConfig
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig

from ...redis_server import RedisServer
from ..conftest import ANSWER, Serve, listen, patient_log_settings
from .keyed import (
    BODIES,
    CHAT,
    COMPLETIONS,
    KEY,
    PATIENCE_S,
    chunks_of,
    post,
    read_chunks,
    text_of,
)
from .test_tools import CALL, PARSERS, SCHEMA, says

MESSAGES = "/v1/messages"
pytestmark = [pytest.mark.redis, pytest.mark.usefixtures("patient_logs")]


@dataclass
class Gateway:
    """Another gateway before the engine of the one that `serve` started."""

    app: Starlette
    http: httpx.AsyncClient


@contextlib.asynccontextmanager
async def another(model_path: Path, tmp_path: Path, **settings: Any) -> AsyncIterator[Gateway]:
    config = GatewayConfig(
        engine_address=f"{tmp_path}/engine.sock",
        served_model_names=("tiny",),
        model=ModelConfig(model=str(model_path)),
        **settings,
    )
    app = create_app(config, log_settings=patient_log_settings())
    async with (
        listen(app, config) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as http,
    ):
        yield Gateway(app, http)


async def test_another_gateway_gives_the_same_answer(
    serve: Serve, model_path: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        serve(step_s=0.01, redis_url=redis_server.patient_url) as served,
        another(model_path, tmp_path, redis_url=redis_server.patient_url) as other,
    ):
        body = BODIES[CHAT] | {"stream": True}
        async with served.http.stream("POST", CHAT, json=body, headers=KEY) as response:
            begun = await read_chunks(response, 3)
        again = await post(other.http, stream=True)  # while it runs
        assert again.text.startswith(begun[: begun.rindex("\n\n")])
        assert text_of(chunks_of(again.text)) == ANSWER
        assert (await post(other.http, stream=True)).text == again.text  # and from Redis
        assert (await post(other.http, stream=True, seed=1)).status_code == 409
        assert len(served.engine.submitted) == 1


async def test_a_message_of_anthropics_goes_on_at_another_gateway(
    serve: Serve, model_path: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    """With the same ids of its calls, although its own gateway is gone."""
    settings = {"redis_url": redis_server.patient_url, **PARSERS}
    tool = {"name": "weather", "input_schema": SCHEMA}
    body = BODIES[CHAT] | {"stream": True, "max_tokens": 500, "tools": [tool]}
    async with serve(step_s=0.005, **settings) as served:
        says(served, f"Let me see.\n{CALL}\n{CALL}")
        async with another(model_path, tmp_path, **settings) as first:
            async with first.http.stream("POST", MESSAGES, json=body, headers=KEY) as response:
                begun = await read_chunks(response, 4)
            await first.app.state.log_store.hand_over()
        again = await served.http.post(MESSAGES, json=body, headers=KEY)
        assert again.text.startswith(begun[: begun.rindex("\n\n")])
        assert again.text.endswith('data: {"type":"message_stop"}\n\n')
        ids = re.findall(r'"id":"(toolu_\w+)"', again.text)
        assert len(set(ids)) == 2
        assert (await served.http.post(MESSAGES, json=body, headers=KEY)).text == again.text


async def test_gateways_race_for_a_key(
    serve: Serve, model_path: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        serve(redis_url=redis_server.patient_url) as served,
        another(model_path, tmp_path, redis_url=redis_server.patient_url) as other,
    ):
        for number in range(8):
            headers = {"Idempotency-Key": f"race-{number}"}
            gateways = (served.http, other.http) * 2
            answers = await asyncio.gather(
                *(post(each, CHAT, headers, max_tokens=5) for each in gateways)
            )
            assert len({answer.content for answer in answers}) == 1
        assert len(served.engine.submitted) == 8


async def test_it_outlives_its_gateway(
    serve: Serve, model_path: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    body = BODIES[COMPLETIONS] | {"stream": True, "logprobs": 1}
    async with serve(redis_url=redis_server.patient_url) as served:
        async with another(model_path, tmp_path, redis_url=redis_server.patient_url) as first:
            served.engine.step_s = 3600.0  # one token, and silence
            async with first.http.stream(
                "POST", COMPLETIONS, json=body, headers=KEY, timeout=PATIENCE_S
            ) as response:
                pieces = response.aiter_text()
                followed = await anext(pieces)
                [request] = served.engine.submitted.values()
                served.engine.step_s = 0.0
                await first.app.state.log_store.hand_over()
                followed += "".join([piece async for piece in pieces])
        again = (await post(served.http, COMPLETIONS, **body)).text
        [_, carried_on] = served.engine.submitted.values()
        assert carried_on.sampling_params == request.sampling_params
        assert carried_on.output_token_ids == tuple(served.engine.script[:1])
    assert again == followed
    chunks = chunks_of(again)
    assert text_of(chunks) == ANSWER
    lists = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    tokens = [token for each in lists if each for token in each["tokens"]]
    assert len(tokens) == len(served.engine.script)
