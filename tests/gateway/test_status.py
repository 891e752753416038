"""Health, readiness, metrics, models, and carrying on when an engine comes back."""

from __future__ import annotations

import asyncio

import openai
import pytest

from .conftest import Serve, Served, until
from .fake_engine import FakeEngine


async def test_models(served: Served) -> None:
    [model] = (await served.client.models.list()).data
    assert model.id == "tiny"
    assert (await served.client.models.retrieve("tiny")).id == "tiny"
    assert model.max_model_len == 1024


async def test_metrics(served: Served) -> None:
    await served.client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=5)
    text = (await served.http.get("/metrics")).text
    label = 'model_name="tiny"'
    for line in (
        f"penstock:num_requests_running{{{label}}} 1.0",
        f"penstock:num_requests_waiting{{{label}}} 0.0",
        f"penstock:kv_cache_usage_perc{{{label}}} 0.25",
        f"penstock:num_preemptions_total{{{label}}} 0.0",
        f"penstock:prompt_tokens_total{{{label}}} 3.0",
        f"penstock:generation_tokens_total{{{label}}} 5.0",
        f'penstock:request_success_total{{finished_reason="length",{label}}} 1.0',
        f"penstock:time_to_first_token_seconds_count{{{label}}} 1.0",
        f"penstock:e2e_request_latency_seconds_count{{{label}}} 1.0",
        "penstock:inter_token_latency_seconds_sum",
    ):
        assert line in text


async def answers(served: Served, path: str, status: int) -> None:
    """Wait until a path answers with a status."""
    async with asyncio.timeout(5):
        while (await served.http.get(path)).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_engine_death_and_return(serve: Serve) -> None:
    async with serve() as served:
        assert (await served.http.get("/health")).status_code == 200
        assert (await served.http.get("/ready")).status_code == 200
        await served.engine.die()
        await answers(served, "/health", 503)
        ready = await served.http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["error"]["code"] == "engine_unavailable"
        with pytest.raises(openai.InternalServerError) as caught:
            await served.client.completions.create(model="tiny", prompt="x")
        assert (caught.value.status_code, caught.value.code) == (503, "engine_unavailable")
        # Another engine takes its place: nobody needs to restart the gateway.
        await served.engine.__aexit__()
        async with FakeEngine(served.engine.address, served.engine.script) as successor:
            await answers(served, "/ready", 200)
            assert (await served.http.get("/health")).status_code == 200
            await served.client.completions.create(model="tiny", prompt="x", max_tokens=2)
            await until(lambda: len(successor.submitted) == 1)
