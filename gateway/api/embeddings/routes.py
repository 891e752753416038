"""`POST /v1/embeddings`: texts or a conversation to vectors."""

from __future__ import annotations

import base64
import uuid
from functools import partial

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.pooling.settings import bytes_of, numbers_of, shortened
from penstock.gateway.api.embeddings.prompts import PooledPrompts
from penstock.gateway.api.embeddings.schema import EmbeddingChatRequest, EmbeddingRequest
from penstock.gateway.api.schema.parsing import parse_fields
from penstock.gateway.api.shared.json_api import CLIENT_GONE, read_fields, unless_gone
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of, deadline_of
from penstock.gateway.generation.pooled import MANY_NUMBERS, Embedder

_Asked = EmbeddingRequest | EmbeddingChatRequest


class Embeddings:
    """The endpoint."""

    def __init__(self, embedder: Embedder, prompts: PooledPrompts, *, max_body_bytes: int) -> None:
        self._embedder = embedder
        self._prompts = prompts
        self._max_body_bytes = max_body_bytes

    @operation(
        "POST /v1/embeddings",
        "Make a vector of each text.",
        "Embeddings",
        body=(EmbeddingRequest, EmbeddingChatRequest),
        statuses=(404, 429),
        example={"input": ["Once upon a time", "There was"], "encoding_format": "base64"},
    )
    async def create(self, request: Request) -> Response:
        body = await read_fields(request, max_bytes=self._max_body_bytes)
        asked: _Asked
        if "messages" in body:
            asked = parse_fields(EmbeddingChatRequest, body)
        else:
            asked = parse_fields(EmbeddingRequest, body)
        adapters, caller = self._embedder.adapters, caller_of(request.scope)
        model = await adapters.require(asked.model, caller, task="embed")
        self._embedder.model.pooling.check_dimensions(asked.dimensions)
        answer = await unless_gone(request, self._answer(request, asked, model))
        return Response(status_code=CLIENT_GONE) if answer is None else answer

    async def _answer(self, request: Request, asked: _Asked, model: str) -> Response:
        embedder = self._embedder
        pooled = await embedder.pool(
            f"embd-{uuid.uuid4().hex}",
            await self._prompts.of(asked),
            "embed",
            model=model,
            caller=caller_of(request.scope),
            deadline_s=deadline_of(request.scope),
            priority=asked.priority,
        )
        vectors = await pooled.run()
        num_tokens = pooled.num_prompt_tokens
        write = partial(_written, asked, vectors, model=model, num_tokens=num_tokens)
        num_numbers = sum(map(len, vectors)) // 4
        content = await embedder.long_work.run(write, is_long=num_numbers >= MANY_NUMBERS)
        return Response(content, media_type="application/json")


def _written(asked: _Asked, vectors: list[bytes], *, model: str, num_tokens: int) -> bytes:
    """The answer as JSON."""
    return orjson.dumps(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _embedding(asked, vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
    )


def _embedding(asked: _Asked, vector: bytes) -> str | list[float]:
    if asked.dimensions is None:
        if asked.encoding_format == "base64":
            return base64.b64encode(vector).decode()
        return numbers_of(vector).tolist()
    numbers = shortened(numbers_of(vector), asked.dimensions)
    if asked.encoding_format == "base64":
        return base64.b64encode(bytes_of(numbers)).decode()
    return numbers.tolist()
