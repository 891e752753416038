"""`POST /classify`: the probability of each label of each text, in vLLM's format."""

from __future__ import annotations

import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.pooling.settings import numbers_of
from penstock.gateway.api.classify.schema import ClassifyChatRequest, ClassifyRequest
from penstock.gateway.api.embeddings.prompts import PooledPrompts
from penstock.gateway.api.schema.parsing import parse_fields
from penstock.gateway.api.shared.json_api import (
    CLIENT_GONE,
    json_response,
    read_fields,
    unless_gone,
)
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of, deadline_of
from penstock.gateway.generation.pooled import Embedder


class Classify:
    """The endpoint."""

    def __init__(self, embedder: Embedder, prompts: PooledPrompts, *, max_body_bytes: int) -> None:
        self._embedder = embedder
        self._prompts = prompts
        self._max_body_bytes = max_body_bytes

    @operation(
        "POST /classify",
        "Classify each text.",
        "Classes",
        body=(ClassifyRequest, ClassifyChatRequest),
        statuses=(404, 429),
        example={"input": ["Once upon a time", "There was"]},
    )
    async def create(self, request: Request) -> Response:
        body = await read_fields(request, max_bytes=self._max_body_bytes)
        asked: ClassifyRequest | ClassifyChatRequest
        if "messages" in body:
            asked = parse_fields(ClassifyChatRequest, body)
        else:
            asked = parse_fields(ClassifyRequest, body)
        caller = caller_of(request.scope)
        model = await self._embedder.adapters.require(asked.model, caller, task="classify")
        answer = await unless_gone(request, self._answer(request, asked, model))
        return Response(status_code=CLIENT_GONE) if answer is None else json_response(answer)

    async def _answer(
        self, request: Request, asked: ClassifyRequest | ClassifyChatRequest, model: str
    ) -> dict[str, Any]:
        identity = f"classify-{uuid.uuid4().hex}"
        pooled = await self._embedder.pool(
            identity,
            await self._prompts.of(asked),
            "classify",
            model=model,
            caller=caller_of(request.scope),
            deadline_s=deadline_of(request.scope),
            priority=asked.priority,
        )
        labels = self._embedder.model.pooling.labels
        data = []
        for index, vector in enumerate(await pooled.run()):
            probabilities = numbers_of(vector).tolist()
            likeliest = max(range(len(probabilities)), key=probabilities.__getitem__)
            data.append(
                {
                    "index": index,
                    "label": labels[likeliest],
                    "probs": probabilities,
                    "num_classes": len(probabilities),
                }
            )
        num_tokens = pooled.num_prompt_tokens
        return {
            "id": identity,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": data,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }
