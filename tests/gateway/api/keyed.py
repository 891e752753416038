"""What tests of `Idempotency-Key` share."""

from __future__ import annotations

import json
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    COMPLETIONS: {"prompt": "hello", "max_tokens": 1000},
}
KEY = {"Idempotency-Key": "7c4a8d09-ca37"}
PATIENCE_S = 60.0


async def post(
    http: httpx.AsyncClient, path: str = CHAT, headers: dict[str, str] = KEY, **extra: Any
) -> httpx.Response:
    body = BODIES[path] | extra
    return await http.post(path, json=body, headers=headers, timeout=PATIENCE_S)


def chunks_of(text: str) -> list[dict[str, Any]]:
    blocks = [block for block in text.split("\n\n") if not block.startswith(":")]
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices
    )


async def read_chunks(response: httpx.Response, num: int) -> str:
    """The first chunks of a stream, as they came."""
    text = ""
    async for piece in response.aiter_text():
        text += piece
        if text.count("\n\n") >= num:
            break
    return text
