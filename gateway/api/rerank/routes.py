"""`POST /rerank`: documents in the order in which they answer a query; `POST /score`: their scores.

A reranker reads both texts together. With any other model a score is the cosine of two embeddings.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Coroutine, Sequence
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.pooling.settings import cosine, numbers_of
from penstock.gateway.api.rerank.schema import (
    RerankRequest,
    RerankTextsRequest,
    ScoreRequest,
    ScoringRequest,
)
from penstock.gateway.api.schema.model import invalid
from penstock.gateway.api.schema.parsing import parse_fields
from penstock.gateway.api.shared.json_api import (
    CLIENT_GONE,
    json_response,
    read_fields,
    unless_gone,
)
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of, deadline_of
from penstock.gateway.generation.pooled import MANY_NUMBERS, Embedder

_SUMMARY = "Order documents by how well they answer a query."
_SCORE_SUMMARY = "Score pairs of texts."
_RERANK: dict[str, Any] = {"body": (RerankRequest, RerankTextsRequest), "statuses": (404, 429)}
_SCORE: dict[str, Any] = {"body": (ScoreRequest,), "statuses": (404, 429)}


class Rerank:
    """The endpoints, under every path at which clients look for them."""

    def __init__(self, embedder: Embedder, *, max_body_bytes: int) -> None:
        self._embedder = embedder
        self._max_body_bytes = max_body_bytes

    @operation("POST /v1/rerank", _SUMMARY, "Ranking", **_RERANK)
    async def rerank(self, request: Request) -> Response:
        body = await self._body(request)
        if "texts" in body:
            texts = parse_fields(RerankTextsRequest, body)
            return await _answered(request, self._ranking_as_tei(request, texts))
        asked = parse_fields(RerankRequest, body)
        return await _answered(request, self._ranking(request, asked))

    @operation("POST /rerank", _SUMMARY, "Ranking", **_RERANK)
    async def rerank_as_jina(self, request: Request) -> Response:
        return await self.rerank(request)

    @operation("POST /v2/rerank", _SUMMARY, "Ranking", **_RERANK)
    async def rerank_as_cohere(self, request: Request) -> Response:
        return await self.rerank(request)

    @operation("POST /v1/score", _SCORE_SUMMARY, "Scores", **_SCORE)
    async def score(self, request: Request) -> Response:
        asked = parse_fields(ScoreRequest, await self._body(request))
        return await _answered(request, self._scores(request, asked))

    @operation("POST /score", _SCORE_SUMMARY, "Scores", **_SCORE)
    async def score_as_vllm(self, request: Request) -> Response:
        return await self.score(request)

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_fields(request, max_bytes=self._max_body_bytes)

    async def _ranking(self, request: Request, asked: RerankRequest) -> dict[str, Any]:
        texts = asked.texts
        identity = f"rerank-{uuid.uuid4().hex}"
        named = [(f"documents[{number}]", text) for number, text in enumerate(texts)]
        if asked.max_tokens_per_doc is not None:
            named = await self._embedder.cut_off(named, asked.max_tokens_per_doc)
        name, scores, num_tokens = await self._scored(
            request, asked, identity, [("query", asked.query)], named
        )
        results = []
        for index in _ranked(scores)[: asked.top_n or None]:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if asked.return_documents:
                result["document"] = {"text": texts[index]}
            results.append(result)
        return {
            "id": identity,
            "model": name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "results": results,
        }

    async def _ranking_as_tei(
        self, request: Request, asked: RerankTextsRequest
    ) -> list[dict[str, Any]]:
        """In the form of TEI, whose clients alone send `texts`."""
        identity = f"rerank-{uuid.uuid4().hex}"
        named = [(f"texts[{number}]", text) for number, text in enumerate(asked.texts)]
        _, scores, _ = await self._scored(request, asked, identity, [("query", asked.query)], named)
        return [
            {"index": index, "score": scores[index]}
            | ({"text": asked.texts[index]} if asked.return_text else {})
            for index in _ranked(scores)
        ]

    async def _scores(self, request: Request, asked: ScoreRequest) -> dict[str, Any]:
        identity = f"score-{uuid.uuid4().hex}"
        firsts, seconds = (
            [
                (name if len(texts) == 1 else f"{name}[{number}]", text)
                for number, text in enumerate(texts)
            ]
            for name, texts in zip(asked.names, (asked.firsts, asked.seconds), strict=True)
        )
        name, scores, num_tokens = await self._scored(request, asked, identity, firsts, seconds)
        return {
            "id": identity,
            "object": "list",
            "created": int(time.time()),
            "model": name,
            "data": [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(scores)
            ],
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    async def _scored(
        self,
        request: Request,
        asked: ScoringRequest,
        identity: str,
        firsts: Sequence[tuple[str, str]],
        seconds: Sequence[tuple[str, str]],
    ) -> tuple[str, list[float], int]:
        """The model's name, the score of each pair, and how many tokens were computed.

        Args:
            firsts, seconds: each text after its parameter's name; a single first one belongs to
                every second one.
        """
        embedder = self._embedder
        model = embedder.model
        is_reranker = "score" in model.pooling.tasks
        caller = caller_of(request.scope)
        task: Literal["embed", "score"] = "score" if is_reranker else "embed"
        name = await embedder.adapters.require(asked.model, caller, task=task)
        if asked.instruction is not None and model.pooling.pair_format != "yes_no":
            raise invalid("instruction", "needs a reranker that judges by one")
        if is_reranker:
            prompts = await embedder.tokenise_pairs(
                firsts, seconds, instruction=asked.instruction, truncate=asked.max_tokens
            )
        else:
            prompts = await embedder.tokenise_each(
                [*firsts, *seconds], add_special_tokens=True, truncate=asked.max_tokens
            )
        pooled = await embedder.pool(
            identity,
            prompts,
            task,
            model=name,
            caller=caller,
            deadline_s=deadline_of(request.scope),
            priority=asked.priority,
        )
        vectors = list(map(numbers_of, await pooled.run()))
        if is_reranker:
            return name, [each[0] for each in vectors], pooled.num_prompt_tokens
        ones, others = vectors[: len(firsts)], vectors[len(firsts) :]
        ones *= len(others) // len(ones)
        scores = await embedder.long_work.run(
            lambda: list(map(cosine, ones, others)),
            is_long=len(others) * len(others[0]) >= MANY_NUMBERS,
        )
        return name, scores, pooled.num_prompt_tokens


def _ranked(scores: Sequence[float]) -> list[int]:
    """The numbers of documents, the best first."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


async def _answered(request: Request, work: Coroutine[Any, Any, Any]) -> Response:
    answer = await unless_gone(request, work)
    return Response(status_code=CLIENT_GONE) if answer is None else json_response(answer)
