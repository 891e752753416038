"""The tokens of logprobs, joined, are the text, with a tokenizer whose first token loses its space
(SentencePiece's, of Llama 2 and Mistral)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import ModelConfig

from ...engine.text.test_token_texts import llama_2
from ..conftest import Serve, Served

SAID = "it is it, é"
MESSAGES = [{"role": "user", "content": "is it"}]
CHAT = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
COMPLETION = {"prompt": "it is", "logprobs": 1}
RESPONSE = {"input": "is it", "include": ["message.output_text.logprobs"], "top_logprobs": 1}


@pytest.fixture
def sentence_piece_model(model_path: Path, tmp_path: Path) -> ModelConfig:
    path = tmp_path / "model"
    shutil.copytree(model_path, path)
    llama_2()._backend.save(str(path / "tokenizer.json"))
    return ModelConfig(model=str(path))


async def _events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with served.http.stream("POST", path, json={**body, "stream": True}) as answer:
        lines = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def _joined(tokens: list[dict[str, Any]]) -> tuple[str, str]:
    for each in tokens:
        [candidate, *_] = each["top_logprobs"]
        assert candidate["token"] == each["token"]
    return (
        "".join(each["token"] for each in tokens),
        b"".join(bytes(each["bytes"]) for each in tokens).decode(),
    )


async def test_tokens_joined_are_the_text(serve: Serve, sentence_piece_model: ModelConfig) -> None:
    async with serve(model=sentence_piece_model) as served:
        served.engine.script = llama_2().encode(SAID, add_special_tokens=False)
        whole = (await served.http.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]
        assert whole["message"]["content"] == SAID
        assert _joined(whole["logprobs"]["content"]) == (SAID, SAID)
        chunks = await _events(served, "/v1/chat/completions", CHAT)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        tokens = [t for each in choices for t in (each["logprobs"] or {}).get("content") or ()]
        assert _joined(tokens) == (SAID, SAID)

        response = (await served.http.post("/v1/responses", json=RESPONSE)).json()
        [part] = response["output"][0]["content"]
        assert (part["text"], _joined(part["logprobs"])) == (SAID, (SAID, SAID))
        events = await _events(served, "/v1/responses", RESPONSE)
        [part] = events[-1]["response"]["output"][0]["content"]
        assert (part["text"], _joined(part["logprobs"])) == (SAID, (SAID, SAID))

        choice = (await served.http.post("/v1/completions", json=COMPLETION)).json()["choices"][0]
        assert choice["text"] == f" {SAID}"  # it continues the prompt
        assert "".join(choice["logprobs"]["tokens"]) == f" {SAID}"
        echoed = (
            await served.http.post("/v1/completions", json={**COMPLETION, "echo": True})
        ).json()["choices"][0]
        assert "".join(echoed["logprobs"]["tokens"]) == echoed["text"] == f"it is {SAID}"


async def test_what_continues_a_text_keeps_its_first_space(
    serve: Serve, sentence_piece_model: ModelConfig
) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "it"}]
    body = {**CHAT, "messages": messages, "continue_final_message": True}
    async with serve(model=sentence_piece_model) as served:
        served.engine.script = llama_2().encode(SAID, add_special_tokens=False)
        answer = await served.http.post(
            "/v1/chat/completions", json={**body, "add_generation_prompt": False}
        )
        choice = answer.json()["choices"][0]
        assert choice["message"]["content"] == f" {SAID}"
        assert _joined(choice["logprobs"]["content"]) == (f" {SAID}", f" {SAID}")
        cut = {**RESPONSE, "max_output_tokens": 2}
        first = (await served.http.post("/v1/responses", json=cut)).json()
        served.engine.script = served.engine.script[2:]
        rest = (
            await served.http.post(
                "/v1/responses",
                json={
                    **RESPONSE,
                    "input": [],
                    "previous_response_id": first["id"],
                    "penstock": {"continue": True},
                },
            )
        ).json()
        parts = [each["output"][0]["content"][0] for each in (first, rest)]
        assert "".join(part["text"] for part in parts) == SAID
        assert "".join(_joined(part["logprobs"])[1] for part in parts) == SAID


async def test_a_message_behind_a_thought(serve: Serve, sentence_piece_model: ModelConfig) -> None:
    async with serve(model=sentence_piece_model, reasoning_parser="qwen3") as served:
        text = "<think>it</think>\n\nit is"
        served.engine.script = llama_2().encode(text, add_special_tokens=False)
        response = (await served.http.post("/v1/responses", json=RESPONSE)).json()
        [part] = response["output"][-1]["content"]
        assert part["text"] == "it is"
        assert _joined(part["logprobs"])[1].strip() == "it is"
        choice = (await served.http.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]
        assert _joined(choice["logprobs"]["content"])[1] == text
