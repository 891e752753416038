"""The synthetic server over HTTP: real processes, real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from penstock.load.launch import Started

from ..support.synthetic.plan import StreamPlan
from ..support.synthetic.server import SyntheticServer
from .synthetic_client import (
    FAST,
    deltas,
    events_of,
    lines,
    resume,
    text_of,
)


async def test_completions_with_usage(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [5, 6, 7], "max_tokens": 4, "stream_options": options, "synthetic": FAST}
    *chunks, usage, done = await lines(http, "/v1/completions", body)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(4)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens"] == 3
    assert usage["usage"]["total_tokens"] == 7
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_stock_client_reads_chat(server: SyntheticServer) -> None:
    base_url = f"{server.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="x", max_retries=0) as client:
        asked: Any = {"model": "synthetic", "messages": [{"role": "user", "content": "a b c"}]}
        stream = await client.chat.completions.create(
            **asked, stream=True, extra_body={"synthetic": {**FAST, "tokens_per_event": 8}}
        )
        choices = [chunk.choices[0] async for chunk in stream]
        assert "".join(choice.delta.content or "" for choice in choices) == text_of(64)
        assert choices[-1].finish_reason == "stop"  # nobody asked for a length
        whole = await client.chat.completions.create(**asked, max_tokens=3)
        assert whole.choices[0].message.content == text_of(3)
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == 3
        assert [model.id async for model in client.models.list()] == ["synthetic"]


async def test_no_token_is_early(http: httpx.AsyncClient) -> None:
    sent_s = time.monotonic()
    body = {"prompt": "x", "max_tokens": 30, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        times = [
            time.monotonic() - sent_s async for line in response.aiter_lines() if '" t' in line
        ]
    assert len(times) == 30
    errors = [at_s - (0.05 + 0.01 * token) for token, at_s in enumerate(times)]
    assert min(errors) > 0  # counted from before the request left
    late = (await http.get("/metrics")).text
    assert "synthetic:late_num_events" in late


async def test_the_schedule_does_not_drift(http: httpx.AsyncClient) -> None:
    """A stream that is late, here by 100 s and more, makes up for it: no token waits for 10 s
    after the one before."""
    wishes = {"ttft_ms": 0, "itl_ms": 10_000}
    body = {"input": "x", "max_output_tokens": 10, "stream": True, "synthetic": wishes}
    async with http.stream("POST", "/v1/responses", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                response_id = json.loads(line.removeprefix("data: "))["response"]["id"]
                break
    plan = StreamPlan.from_id(response_id)
    assert plan is not None
    late = replace(plan, began_us=plan.began_us - 100_000_000)
    async with asyncio.timeout(50):
        assert deltas(await resume(http, late.response_id(), after=-1)) == text_of(10)


async def test_responses_number_their_events(http: httpx.AsyncClient) -> None:
    events = await events_of(http, 5)
    assert [event["sequence_number"] for event in events] == list(range(13))
    assert deltas(events) == text_of(5)
    response = events[-1]["response"]
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", 5)
    assert response["output"][0]["content"][0]["text"] == text_of(5)
    stored = (await http.get(f"/v1/responses/{response['id']}")).json()
    assert stored == response


async def test_a_turn_counts_the_turns_before_it(http: httpx.AsyncClient) -> None:
    first = (await events_of(http, 5))[-1]["response"]
    body = {"input": "two words", "previous_response_id": first["id"], "synthetic": FAST}
    usage = (await lines(http, "/v1/responses", body))[-1]["response"]["usage"]
    assert usage["input_tokens"] == 1 + 5 + 2
    assert usage["input_tokens_details"]["cached_tokens"] == 6


async def test_the_events_are_those_of_our_server(http: httpx.AsyncClient, demo: Started) -> None:
    """Kind by kind and field by field, as far as the synthetic server tells."""
    ours: dict[str, list[Any]] = {}
    asked = [{"role": "user", "content": "hi"}]
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    bodies = {
        "/v1/responses": {"input": asked, "max_output_tokens": 6, "ignore_eos": True},
        "/v1/chat/completions": {"messages": asked, "max_tokens": 6, "ignore_eos": True, **usage},
        "/v1/completions": {"prompt": "hi", "max_tokens": 6, "ignore_eos": True, **usage},
    }
    async with httpx.AsyncClient(base_url=demo.base_url, timeout=60) as real:
        for path, body in bodies.items():
            ours[path] = await lines(real, path, body)
    for path, body in bodies.items():
        copied = await lines(http, path, body)
        assert _shape(copied) == _shape(ours[path]), path


def _shape(events: list[Any]) -> list[Any]:
    """Events without their values, equal ones that follow each other once."""
    shapes: list[Any] = []
    for event in events:
        shape = event
        if isinstance(event, dict):
            shape = {name: _nature(value) for name, value in event.items() if name != "response"}
            response = event.get("response", {})
            shape |= {f"response.{k}": _nature(response[k]) for k in ("status", "output", "usage")
                      if k in response}  # fmt: skip
            shape["kind"] = event.get("type")
        if not shapes or shapes[-1] != shape:
            shapes.append(shape)
    return shapes


def _nature(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _nature(item) for name, item in value.items() if name != "cache_write_tokens"}
    if isinstance(value, list):
        return [_nature(item) for item in value]
    return value if value in ("incomplete", "in_progress", "length") else type(value).__name__


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", "{", 400, "invalid_json"),
        ("/v1/completions", "[]", 400, "invalid_json"),
        ("/v1/completions", "{}", 400, "missing_required_parameter"),
        ("/v1/completions", '{"prompt": 7}', 400, "invalid_type"),
        ("/v1/completions", '{"prompt": ["a", "b"]}', 400, "invalid_type"),
        ("/v1/completions", '{"prompt": "x", "stream": "yes"}', 400, "invalid_type"),
        ("/v1/completions", '{"prompt": "x", "max_tokens": 0}', 400, "invalid_value"),
        ("/v1/completions", '{"prompt": "x", "max_tokens": true}', 400, "invalid_type"),
        ("/v1/completions", '{"prompt": "x", "max_tokens": 10000}', 400, "context_length_exceeded"),
        ("/v1/completions", '{"prompt": "x", "model": "y"}', 404, "model_not_found"),
        ("/v1/completions", '{"prompt": "' + "x" * 10_000 + '"}', 413, "request_too_large"),
        ("/v1/completions", '{"prompt": "x", "synthetic": {"x": 1}}', 400, "invalid_value"),
        ("/v1/completions", '{"prompt": "x", "synthetic": {"itl_ms": "x"}}', 400, "invalid_type"),
        ("/v1/completions", '{"prompt": "x", "synthetic": {"itl_ms": -1}}', 400, "invalid_value"),
        ("/v1/completions", '{"prompt": "x", "synthetic": {"itl_ms": 1e99}}', 400, "invalid_value"),
        ("/v1/completions", '{"prompt": "x", "synthetic": {"seed": -1}}', 400, "invalid_value"),
        ("/v1/completions", '{"prompt": "x", "synthetic": {"fault": "x"}}', 400, "invalid_value"),
        ("/v1/chat/completions", '{"messages": []}', 400, "invalid_value"),
        ("/v1/chat/completions", '{"messages": ["x"]}', 400, "invalid_type"),
        ("/v1/chat/completions", '{"messages": [{"role": "boss"}]}', 400, "invalid_value"),
        ("/v1/chat/completions", '{"messages": [{"role": "user"}]}', 400, "invalid_type"),
        ("/v1/responses", '{"previous_response_id": "x"}', 404, "previous_response_not_found"),
        ("/v1/responses/resp_1/cancel", "", 404, "response_not_found"),
        ("/v1/elsewhere", "{}", 404, "not_found"),
    ],
)  # fmt: skip
async def test_what_makes_no_sense_is_refused(
    http: httpx.AsyncClient, path: str, body: str, status: int, code: str
) -> None:
    response = await http.post(path, content=body)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
