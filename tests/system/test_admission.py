"""Admission in front of the real engine: places in the queue, who is refused, no secret told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from .processes import END_S, ENDLESS_TOKENS, metric, serve

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
STORY = {"input": "Tell me a story.", "ignore_eos": True, "stream": True}
# Nothing of it is stored: it ends when its reader leaves, and not before.
ENDLESS = {**STORY, "max_output_tokens": ENDLESS_TOKENS, "store": False}
QUEUE = {"penstock": {"events": ["queue"]}}


Events = list[dict[str, Any]]


async def read(client: httpx.AsyncClient, body: dict[str, Any], key: str, events: Events) -> Events:
    """All events of a response, each put into `events` when it comes."""
    headers = {"Authorization": f"Bearer {key}"}
    async with client.stream("POST", "/v1/responses", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
    return events


async def waiting(client: httpx.AsyncClient, num: int) -> None:
    async with asyncio.timeout(END_S):
        while await metric(client, "num_requests_waiting") < num:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def heard(events: Events, key: str, value: object = None) -> None:
    """Wait for an event that has the key, with that value if one is given."""
    async with asyncio.timeout(END_S):
        while not any(key in event and value in (None, event[key]) for event in events):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_who_waits_is_told_and_who_comes_too_late_is_refused(
    long_model: tuple[str, ...], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    await asyncio.to_thread(keys.write_text, KEYS)
    log = tmp_path / "log"
    flags = ("--max-num-seqs", "1", "--max-queue-requests", "2", "--api-keys-file", str(keys))
    flags += ("--log-level", "debug")
    with serve(*long_model, *flags, log=log) as served:
        async with httpx.AsyncClient(base_url=served.base_url, timeout=END_S) as client:
            flood, small = "sk-flood-secret", "sk-small-secret"
            run_events, last_events = Events(), Events()
            runs = asyncio.create_task(read(client, ENDLESS, flood, run_events))
            await heard(run_events, "delta")
            short = {**STORY, "max_output_tokens": 5, **QUEUE}
            later = []
            for number, events in enumerate((Events(), last_events), 1):
                later.append(asyncio.create_task(read(client, short, flood, events)))
                await waiting(client, number)
            # The other tenant has a share of the queue, and the second turn in it.
            first = asyncio.create_task(read(client, short, small, Events()))
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
            await heard(last_events, "position", 2)
            assert runs.cancel()
            await asyncio.gather(first, *later)
        told = [
            [event for event in task.result() if event["type"] == "penstock.queue"]
            for task in (first, *later)
        ]
        assert [each[0]["position"] for each in told[:2]] == [1, 0]
        assert max(event["position"] for event in told[2]) == 2, "the other tenant goes before"
        for each in told:
            assert all(event["estimated_wait_ms"] >= 0 for event in each)
            assert all(event["response_id"] == each[0]["response_id"] for event in each)
        assert not any(event["type"] == "penstock.queue" for event in run_events)
    text = await asyncio.to_thread(log.read_text)
    assert "secret" not in text
