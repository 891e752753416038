"""Admission in front of the real engine: places in the queue, who is refused, no secret told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from .processes import metric, serve

KEYS = """
[[keys]]
key = "sk-flood-secret"
tenant = "flood"

[[keys]]
key = "sk-small-secret"
tenant = "small"

[tenants.flood]
[tenants.small]
weight = 2
"""
LONG = {"input": "Tell me a story.", "max_output_tokens": 1900, "ignore_eos": True, "stream": True}
QUEUE = {"penstock": {"events": ["queue"]}}


async def events_of(
    client: httpx.AsyncClient, body: dict[str, Any], key: str, begun: asyncio.Event | None = None
) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"}
    events: list[dict[str, Any]] = []
    async with client.stream("POST", "/v1/responses", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
                if begun is not None and "delta" in events[-1]:
                    begun.set()
    return events


async def waiting(client: httpx.AsyncClient, num: int) -> None:
    async with asyncio.timeout(30):
        while await metric(client, "num_requests_waiting") < num:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_who_waits_is_told_and_who_comes_too_late_is_refused(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    await asyncio.to_thread(keys.write_text, KEYS)
    log = tmp_path / "log"
    flags = ("--max-num-seqs", "1", "--max-queue-requests", "2", "--api-keys-file", str(keys))
    flags += ("--log-level", "debug")
    with serve(*flags, log=log) as served:
        async with httpx.AsyncClient(base_url=served.base_url, timeout=60) as client:
            flood, small = "sk-flood-secret", "sk-small-secret"
            begun = asyncio.Event()
            runs = asyncio.create_task(events_of(client, LONG, flood, begun))
            await begun.wait()
            short = {**LONG, "max_output_tokens": 5, **QUEUE}
            later = []
            for number in (1, 2):
                later.append(asyncio.create_task(events_of(client, short, flood)))
                await waiting(client, number)
            # The other tenant has a share of the queue, and the second turn in it.
            first = asyncio.create_task(events_of(client, short, small))
            await waiting(client, 3)
            refused = await client.post(
                "/v1/responses", json=short, headers={"Authorization": f"Bearer {flood}"}
            )
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert error["code"] == "server_overloaded"
            assert error["penstock"]["queue_length"] == 3
            assert 0 < int(refused.headers["retry-after-ms"]) <= 120_000
            impatient = await client.post(
                "/v1/completions",
                json={"prompt": "x", "max_tokens": 1},
                headers={"Authorization": f"Bearer {small}", "x-request-deadline-ms": "0.001"},
            )
            assert impatient.status_code == 503
            await asyncio.gather(runs, first, *later)
        told = [
            [event for event in task.result() if event["type"] == "penstock.queue"]
            for task in (first, *later)
        ]
        assert [each[0]["position"] for each in told[:2]] == [1, 0]
        assert max(event["position"] for event in told[2]) == 2, "the other tenant goes before"
        for each in told:
            assert all(event["estimated_wait_ms"] >= 0 for event in each)
            assert all(event["response_id"] == each[0]["response_id"] for event in each)
        assert not any(event["type"] == "penstock.queue" for event in runs.result())
    text = await asyncio.to_thread(log.read_text)
    assert "secret" not in text
