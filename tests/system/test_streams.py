"""Many streams through the real server: each is what it would be alone."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.engine.model_files.resolve import DEMO_MODEL_PATH

from .processes import Served, idle

NUM_STREAMS = 64
NEAR_TIE = 1e-4
_TOPICS = ["a lighthouse", "a fox", "the sea", "a clock", "two friends", "a dragon", "snow", "Mira"]


def _body(index: int) -> dict[str, Any]:
    topic = _TOPICS[index % len(_TOPICS)]
    return {
        "model": "demo",
        "messages": [
            {"role": "user", "content": f"Hi, my name is Zorin{index}."},
            {"role": "assistant", "content": "Nice to meet you."},
            {"role": "user", "content": f"Tell me a story about {topic}." + " Please." * index},
        ],
        "temperature": 0,
        "max_tokens": 20 + index,
        "stream": True,
        "logprobs": True,
        "stream_options": {"include_usage": True},
    }


async def _stream(client: httpx.AsyncClient, index: int) -> tuple[str, list[str], dict[str, Any]]:
    """A stream's text, its tokens, its usage; asserts how it ends."""
    text, tokens, usage = "", [], {}
    async with client.stream("POST", "/v1/chat/completions", json=_body(index)) as response:
        assert response.status_code == 200, await response.aread()
        lines = [
            line.removeprefix("data: ")
            async for line in response.aiter_lines()
            if line.startswith("data: ")
        ]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        chunk = json.loads(line)
        assert "error" not in chunk
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            tokens += [
                entry["token"] for entry in (choice.get("logprobs") or {}).get("content", [])
            ]
        usage = chunk.get("usage") or usage
    usage.pop("prompt_tokens_details", None)  # what was cached depends on who came before
    return text, tokens, usage


async def test_64_streams_equal_the_same_request_alone(demo_server: Served) -> None:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(
        base_url=demo_server.base_url, limits=limits, timeout=300
    ) as client:
        together = await asyncio.gather(*(_stream(client, index) for index in range(NUM_STREAMS)))
        alone = [await _stream(client, index) for index in range(NUM_STREAMS)]
    num_tokens = sum(usage["completion_tokens"] for _, _, usage in alone)
    num_excused = sum(
        _is_excused(index, together[index], alone[index])
        for index in range(NUM_STREAMS)
        if together[index] != alone[index]
    )
    assert num_tokens > 1_000
    assert num_excused <= num_tokens / 10_000


def _is_excused(index: int, got: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    """Whether the reference's top two logits nearly tie where the streams first differ."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_PATH)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_PATH, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        _body(index)["messages"], add_generation_prompt=True, tokenize=False
    )
    place = next(i for i, (a, b) in enumerate(zip(got[1], expected[1], strict=False)) if a != b)
    ids = tokenizer(prompt + "".join(expected[1][:place]), add_special_tokens=False).input_ids
    with torch.inference_mode():
        top = model(torch.tensor([ids])).logits[0, -1].topk(2).values
    gap = float(top[0] - top[1])
    print(f"stream {index} differs at token {place}: top two logits differ by {gap:.2e}")
    assert gap < NEAR_TIE
    return True


@pytest.mark.parametrize("num_requests", [32])
async def test_aborted_streams_leave_others_alone(demo_server: Served, num_requests: int) -> None:
    """Half the clients hang up early; the other half get what they would have got."""
    async with httpx.AsyncClient(base_url=demo_server.base_url, timeout=300) as client:
        expected = [await _stream(client, index) for index in range(0, num_requests, 2)]

        async def hang_up(index: int) -> None:
            async with client.stream("POST", "/v1/chat/completions", json=_body(index)) as response:
                async for _ in response.aiter_raw():
                    return

        jobs = [
            _stream(client, index) if index % 2 == 0 else hang_up(index)
            for index in range(num_requests)
        ]
        results = await asyncio.gather(*jobs)
        assert [text for text, _, _ in results[::2]] == [text for text, _, _ in expected]
        await idle(client)
