"""`/v1/stats`: the numbers of `/metrics` as they change, for those who may see them."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
import websockets
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families

from penstock.gateway.api.status import stats_socket
from penstock.gateway.api.status.stats_socket import changes, series_of

from ..conftest import PATIENCE_S, Serve, Served


def watch(served: Served, query: str = "", **options: Any) -> websockets.connect:
    url = f"ws://127.0.0.1:{served.port}/v1/stats{query}"
    return websockets.connect(url, open_timeout=PATIENCE_S, **options)


async def scraped(served: Served) -> dict[str, float]:
    text = (await served.http.get("/metrics")).text
    return series_of(text_string_to_metric_families(text))


async def next_message(socket: websockets.ClientConnection) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        return json.loads(await socket.recv())


async def test_all_numbers_and_then_the_changed_ones(served: Served) -> None:
    await served.client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=5)
    async with watch(served) as socket:
        first = await next_message(socket)
        assert abs(first["time"] - time.time()) < 60
        assert first["engine"]["model"] == "tiny"
        assert first["engine"]["max_num_seqs"] == 16
        before = first["series"]
        assert before["generation_tokens_total"] == 5
        assert before['kv_blocks{state="used",tier="device"}'] > 0
        assert before['time_to_first_token_seconds_bucket{le="+Inf"}'] == 1
        assert before['tenant_generation_tokens_total{tenant="default"}'] == 5
        metrics = await scraped(served)
        counted_by_scraping = 'http_requests_total{method="GET",route="/metrics",status="200"}'
        assert {**metrics, counted_by_scraping: 1} == {**before, counted_by_scraping: 1}

        await served.client.completions.create(model="tiny", prompt=[1, 2, 3, 4], max_tokens=3)
        seen = {}
        while seen.get("generation_tokens_total") != 8:
            message = await next_message(socket)
            assert "engine" not in message
            assert "kv_cache_usage_perc" not in message["series"]  # as before
            seen |= message["series"]
        assert seen["prompt_tokens_total"] == 7


async def test_watchers_share_what_is_collected_once_in_an_interval(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stats_socket, "INTERVAL_S", PATIENCE_S)
    async with watch(served) as one, watch(served) as other:
        first = await next_message(one)
        await served.client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=5)
        assert await next_message(other) == first
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await one.recv()


@pytest.mark.usefixtures("soon_alarmed")
async def test_an_engine_that_dies_and_comes_back(serve: Serve) -> None:
    async with serve() as served, watch(served) as socket:
        assert (await next_message(socket))["engine"] is not None
        await served.engine.die()
        while "engine" not in (message := await next_message(socket)):
            pass
        assert message["engine"] is None
        async with asyncio.timeout(PATIENCE_S):
            while "engine_up" not in message["series"]:
                message = await next_message(socket)
        assert message["series"]["engine_up"] == 0


async def test_needs_the_key(serve: Serve) -> None:
    async with serve(api_keys=("secret",)) as served:
        with pytest.raises(websockets.InvalidStatus) as refused:
            await watch(served)
        assert refused.value.response.status_code == 401
        ticket = (await served.http.post("/v1/tickets")).json()["ticket"]
        async with watch(served, f"?ticket={ticket}") as socket:
            assert (await next_message(socket))["series"]
        subprotocol = "openai-insecure-api-key.secret"
        async with watch(served, subprotocols=[subprotocol]) as socket:
            assert socket.subprotocol == subprotocol


def test_numbers_of_several_workers_are_added_up() -> None:
    tokens = CounterMetricFamily("penstock:tokens", "", labels=["model_name", "worker", "tenant"])
    for worker, tenant, number in (("0", "a", 1), ("1", "a", 2), ("1", "b", 4)):
        tokens.add_metric(["tiny", worker, tenant], number)
    process = Metric("process_open_fds", "", "gauge")
    process.add_sample("process_open_fds", {}, 7)
    assert series_of([tokens, process]) == {
        'tokens_total{tenant="a"}': 3,
        'tokens_total{tenant="b"}': 4,
    }


def test_changes() -> None:
    before, after = (
        {"same": 1.0, "other": 1.0, "gone": 1.0},
        {"same": 1.0, "other": 2.0, "new": 0.0},
    )
    assert changes(before, after) == {"other": 2.0, "new": 0.0, "gone": None}
    assert changes({}, after) == after


async def test_an_hour_is_kept(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """As columns; a number that has not changed is there once."""
    monkeypatch.setattr(stats_socket, "HISTORY_INTERVAL_S", 0.02)
    async with serve() as served:
        await served.client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=5)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                kept = (await served.http.get("/v1/stats/history")).json()
                tokens = kept["series"].get("generation_tokens_total")
                if isinstance(tokens, list) and tokens[-1] == 5:
                    break
        times = kept["times"]
        assert times == sorted(times)
        assert len(tokens) == len(times)
        assert tokens[0] in (0, None)
        assert len(times) > 1
