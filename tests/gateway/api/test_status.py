"""Health, readiness, metrics, models, and carrying on when an engine comes back."""

from __future__ import annotations

import asyncio
import math
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from penstock.engine.config import ModelConfig
from penstock.engine.protocol.messages import EngineStats
from penstock.gateway.app import create_app
from penstock.gateway.config import GatewayConfig
from penstock.gateway.engines import engine_pool
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.telemetry.engine_metrics import EngineCollector

from ..conftest import PATIENCE_S, Serve, Served, until
from ..fake_engine import FakeEngine


async def test_models(served: Served) -> None:
    [model] = (await served.client.models.list()).data
    assert model.id == "tiny"
    assert (await served.client.models.retrieve("tiny")).id == "tiny"
    assert model.max_model_len == 1024


async def test_the_version_is_that_of_the_package(served: Served) -> None:
    answer = await served.http.get("/version")
    assert answer.json() == {"version": metadata.version("penstock-llm")}


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


async def test_other_servers_names_of_the_same(served: Served) -> None:
    health = (await served.http.get("/health")).json()
    for method in ("GET", "POST"):
        answer = await served.http.request(method, "/ping")
        assert (answer.status_code, answer.json()) == (200, health)
    assert (await served.http.get("/load")).json() == {"server_load": 0}
    served.engine.stats = EngineStats(num_requests_running=3, num_requests_waiting=2)
    await served.client.completions.create(model="tiny", prompt="x", max_tokens=1)
    assert (await served.http.get("/load")).json() == {"server_load": 5}
    served.engine.may_speak.clear()
    asking = [
        asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "x"}))
        for _ in range(7)
    ]
    await served.submitted(8)
    assert (await served.http.get("/load")).json() == {"server_load": 7}
    served.engine.may_speak.set()
    await asyncio.gather(*asking)


def _engine_metrics(stats: EngineStats) -> dict[tuple[str, str], float]:
    """What is exported of the engine, by name and labels."""
    engine = EnginePool("unused")
    engine.links[0].stats = stats
    return {
        (sample.name, str(sorted(sample.labels.items()))): sample.value
        for family in EngineCollector(engine, "tiny").collect()
        for sample in family.samples
    }


@pytest.mark.parametrize("name", [field.name for field in msgspec.structs.fields(EngineStats)])
def test_every_number_of_the_engine_is_exported(name: str) -> None:
    base = EngineStats(num_blocks=100, num_host_blocks=50, num_accepted_tokens_per_pos_total=(3, 2))
    value = getattr(base, name)
    more = (*value[:-1], value[-1] + 7) if isinstance(value, tuple) else value + 7
    before = _engine_metrics(base)
    after = _engine_metrics(msgspec.structs.replace(base, **{name: more}))
    assert before.keys() == after.keys()
    changed = [sample for sample in after if after[sample] != before[sample]]
    assert changed
    if name.endswith("_total"):
        unit = 1e-6 if name.endswith("_us_total") else 1
        assert [after[sample] - before[sample] for sample in changed] == [7 * unit]
        assert changed[0][0].endswith("_total")


async def test_metrics_of_kv_memory(served: Served) -> None:
    served.engine.stats = EngineStats(
        num_requests_swapped=2, num_blocks=100, num_blocks_used=25, num_blocks_cached=30,
        num_host_blocks=40, num_host_blocks_kept=10, num_host_blocks_cached=5,
        num_slots_allocated=400, num_slots_empty=12, num_preemptions_total=9,
        num_swap_preemptions_total=6, num_recompute_preemptions_total=3, swapped_out_bytes_total=64,
        swap_in_seconds_total=0.5, num_blocks_evicted_total=8, num_host_blocks_evicted_total=1,
        prefix_cache_queries_total=1000, prefix_cache_hits_total=600,
    )  # fmt: skip
    await served.client.completions.create(model="tiny", prompt="x", max_tokens=1)
    text = (await served.http.get("/metrics")).text
    for line in (
        'num_requests_swapped{model_name="tiny"} 2.0',
        'kv_cache_usage_perc{model_name="tiny"} 0.25',
        'kv_blocks{model_name="tiny",state="used",tier="device"} 25.0',
        'kv_blocks{model_name="tiny",state="cached",tier="device"} 30.0',
        'kv_blocks{model_name="tiny",state="free",tier="device"} 45.0',
        'kv_blocks{model_name="tiny",state="used",tier="host"} 10.0',
        'kv_blocks{model_name="tiny",state="free",tier="host"} 25.0',
        'kv_slots{model_name="tiny",state="empty"} 12.0',
        'num_preemptions_total{model_name="tiny"} 9.0',
        'preemptions_by_kind_total{kind="swap",model_name="tiny"} 6.0',
        'swapped_bytes_total{direction="out",model_name="tiny"} 64.0',
        'swap_seconds_total{direction="in",model_name="tiny"} 0.5',
        'kv_blocks_evicted_total{model_name="tiny",tier="host"} 1.0',
        'prefix_cache_queries_total{model_name="tiny"} 1000.0',
        'prefix_cache_hits_total{model_name="tiny"} 600.0',
    ):
        assert f"penstock:{line}\n" in text


async def answers(served: Served, path: str, status: int) -> None:
    """Wait until a path answers with a status."""
    async with asyncio.timeout(PATIENCE_S):
        while (await served.http.get(path)).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


NEED_ENGINE: dict[str, dict[str, Any] | None] = {  # with the body of a POST
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x", "stream": True},
    "/v1/responses": {"input": "x"},
    "/v1/models": None,
    "/v1/models/tiny": None,
    "/ready": None,
    "/tokenize": {"prompt": "x"},
}


def wait_ms(refused: httpx.Response) -> int:
    """What the client is told to wait: both headers say the same."""
    milliseconds = int(refused.headers["retry-after-ms"])
    assert 1000 <= milliseconds <= 5000
    assert int(refused.headers["retry-after"]) == math.ceil(milliseconds / 1000)
    return milliseconds


@pytest.mark.usefixtures("soon_alarmed")
async def test_before_the_first_engine(model_path: Path, tmp_path: Path) -> None:
    config = GatewayConfig(
        engine_address=f"{tmp_path}/engine.sock",
        served_model_names=("tiny",),
        model=ModelConfig(model=str(model_path)),
    )
    app = create_app(config)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        for path, body in NEED_ENGINE.items():
            refused = await http.request("GET" if body is None else "POST", path, json=body)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_unavailable"
            wait_ms(refused)
        starting = await http.get("/health")  # as compose files and probes written for vLLM ask
        assert starting.status_code == 503
        assert starting.json()["error"]["message"] == "the engine is starting"
        assert (await http.get("/live")).json() == {"status": "live"}


@pytest.mark.usefixtures("soon_alarmed")
async def test_engine_death_and_return(serve: Serve) -> None:
    async with serve() as served:
        assert (await served.http.get("/health")).status_code == 200
        assert (await served.http.get("/ready")).status_code == 200
        await served.engine.die()
        await answers(served, "/health", 503)
        lost = (await served.http.get("/health")).json()["error"]
        assert lost["penstock"]["estimated_wait_ms"] >= 0  # as long as the first one took at most
        assert (await served.http.post("/ping")).status_code == 503
        assert (await served.http.get("/live")).status_code == 200
        ready = await served.http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["error"]["code"] == "engine_unavailable"
        waits = set()
        for path, body in NEED_ENGINE.items():
            method = "GET" if body is None else "POST"
            refused = await served.http.request(method, path, json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "engine_unavailable",
            )
            waits.add(wait_ms(refused))
        assert len(waits | {wait_ms(ready)}) > 1  # spread, lest all return at once
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


async def test_a_request_waits_a_moment_for_a_link_that_was_lost(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a gateway that was stopped: the engine has dropped it, and takes it again."""
    monkeypatch.setattr(engine_pool, "_FIND_AGAIN_S", 60.0)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    served.engine.lose_gateways()
    await answers(served, "/ready", 503)
    answer = await served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


async def test_running_requests_are_listed_and_cancelled(served: Served) -> None:
    assert (await served.http.get("/v1/requests")).json() == {"object": "list", "data": []}
    served.engine.may_speak.clear()
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 500, "ignore_eos": True}
    asking = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await until(lambda: bool(served.engine.submitted))
    [found] = (await served.http.get("/v1/requests")).json()["data"]
    assert (found["status"], found["tenant"]) == ("waiting", "default")
    assert (found["prompt_tokens"], found["output_tokens"]) == (3, 0)
    cancelled = await served.http.post(f"/v1/requests/{found['id']}/cancel")
    assert cancelled.json() == found
    served.engine.may_speak.set()
    [choice] = (await asyncio.wait_for(asking, PATIENCE_S)).json()["choices"]
    assert choice["text"] == ""
    assert (await served.http.get("/v1/requests")).json()["data"] == []
    gone = await served.http.post(f"/v1/requests/{found['id']}/cancel")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "request_not_found")
