"""What requests have used, as their answers, the sums by key, and the engine's counters have it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from .processes import END_S, idle, metrics, serve

WORDS = "Once upon a time there was a mill by the river, and a fox lived near it. "
MESSAGES = [{"role": "user", "content": WORDS * 3}]
FEW_BLOCKS = ("--num-blocks", "32", "--num-host-blocks", "64", "--max-model-len", "256")
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 40}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 20, "n": 3}),
    ("/v1/completions", {"prompt": [WORDS, WORDS * 2], "max_tokens": 30}),
    ("/v1/responses", {"input": WORDS * 2, "max_output_tokens": 60}),
    ("/v1/messages", {"messages": MESSAGES, "max_tokens": 50}),
]


@pytest.mark.exhaustive
async def test_all_say_the_same(tmp_path: Path) -> None:
    """Also of requests that were preempted, and whose KV was in host memory."""
    with serve(*FEW_BLOCKS, log=tmp_path / "log") as served:
        async with httpx.AsyncClient(base_url=served.base_url, timeout=END_S) as http:

            async def told(path: str, body: dict[str, Any]) -> dict[str, Any]:
                answer = await http.post(path, json={"model": "demo", "ignore_eos": True, **body})
                assert answer.status_code == 200, answer.text
                used: dict[str, Any] = answer.json()["penstock"]["usage"]
                return used

            used = await asyncio.gather(*(told(*each) for _ in range(3) for each in ASKED))
            await idle(http)
            (day,) = (await http.get("/v1/usage")).json()["data"][-1:]
            (sums,) = day["results"]
            counted = await metrics(
                http,
                "engine_generation_tokens_total",
                "prefix_cache_queries_total",
                "prefix_cache_hits_total",
                "prefix_cache_host_hits_total",
                "engine_request_compute_seconds_total",
                "engine_request_kv_block_seconds_total",
            )
    more, tiers = sums["penstock"], sums["penstock"]["cached_tokens"]
    assert sums["num_model_requests"] == 3 * (len(ASKED) + 1)  # two prompts
    by_key = [
        sums["output_tokens"],
        sums["input_tokens"],
        tiers["device"] + tiers["host"],
        tiers["host"],
        more["compute_seconds"],
        more["kv_block_seconds"],
    ]
    by_answers = [
        sum(each["output_tokens"] for each in used),
        sum(each["prompt_tokens"] for each in used),
        sum(sum(each["cached_tokens"].values()) for each in used),
        sum(each["cached_tokens"]["host"] for each in used),
        sum(each["compute_seconds"] for each in used),
        sum(each["kv_block_seconds"] for each in used),
    ]
    assert by_key == pytest.approx(by_answers, abs=1e-7)
    assert by_key == pytest.approx(counted, abs=1e-7)
    assert min(by_key[:3]) > 0
