"""Clients against a real server, as a user would point them at it; `openai` has its own files."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import httpx
import pytest
import websockets

from .processes import END_S, ENDLESS_TOKENS, PENSTOCK, Served, idle, metrics

_QUESTION = [{"role": "user", "content": "What is paged attention?"}]


@pytest.mark.curl
def test_curl_gets_an_event_stream(demo_server: Served) -> None:
    body = {"model": "demo", "messages": _QUESTION, "stream": True, "temperature": 0}
    result = subprocess.run(
        [
            "curl",
            "-sSN",
            f"{demo_server.base_url}/v1/chat/completions",
            "-H",
            "Content-Type: application/json",
            "-d",
            json.dumps(body),
        ],
        capture_output=True,
        text=True,
        timeout=END_S,
        check=True,
    )
    events = [line.removeprefix("data: ") for line in result.stdout.splitlines() if line]
    assert events[-1] == "[DONE]"
    text = "".join(
        json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]
    )
    assert len(text) > 20


async def test_a_websocket_client_chats_over_several_turns(demo_server: Served) -> None:
    address = demo_server.base_url.replace("http", "ws") + "/v1/responses"
    async with websockets.connect(address, open_timeout=END_S) as socket:

        async def turn(text: str, **more: Any) -> dict[str, Any]:
            create = {"type": "response.create", "model": "demo", "input": text, "temperature": 0}
            await socket.send(json.dumps({**create, **more}))
            deltas = ""
            numbers = []
            while True:
                event = json.loads(await socket.recv())
                numbers.append(event["sequence_number"])
                if event["type"] == "response.output_text.delta":
                    deltas += event["delta"]
                if event["type"] in ("response.completed", "response.incomplete"):
                    assert numbers == list(range(len(numbers)))
                    content = event["response"]["output"][0]["content"][0]["text"]
                    assert content == deltas
                    return dict(event["response"])

        first = await turn("Hello! My name is Velora.")
        second = await turn("How are you?", previous_response_id=first["id"])
        third = await turn("What is my name?", previous_response_id=second["id"])
        assert "Velora" in third["output"][0]["content"][0]["text"]


async def test_the_models_endpoint_and_probes(demo_server: Served) -> None:
    async with httpx.AsyncClient(base_url=demo_server.base_url, timeout=END_S) as client:
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["demo"]
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert 'penstock:generation_tokens_total{model_name="demo"}' in metrics


async def test_a_client_that_leaves_frees_its_blocks(demo_server: Served) -> None:
    body = {
        "model": "demo",
        "messages": _QUESTION,
        "stream": True,
        "max_tokens": ENDLESS_TOKENS,
        "ignore_eos": True,
    }

    async with httpx.AsyncClient(base_url=demo_server.base_url, timeout=60) as client:
        await idle(client)  # of what others left
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()  # held: without it, the connection closes
            await anext(lines)
            running, usage = await metrics(client, "num_requests_running", "kv_cache_usage_perc")
            assert running == 1
            assert usage > 0
        await idle(client)


def test_the_terminal_chat_answers_what_is_piped_in(demo_server: Served) -> None:
    result = subprocess.run(
        [PENSTOCK, "chat", "--base-url", demo_server.base_url],
        input="Hi, my name is Orlan.\nWhat is my name?",  # a last line without an end
        capture_output=True,
        text=True,
        timeout=END_S,
    )
    assert result.returncode == 0, result.stderr
    assert "Orlan" in result.stdout
