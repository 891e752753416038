"""`/v1/embeddings`, `/v1/rerank` and `/v1/score`: texts to vectors and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic

from ..objects import EmbeddingList, Ranking, ScoreList
from ..operation import R, Resource, operation
from ..server import Server
from ..steps import Steps


class Embeddings(Resource[R], Generic[R]):
    """Vectors of texts, and how well texts answer a query."""

    def __init__(self, runner: R, server: Server) -> None:
        super().__init__(runner)
        self._server = server

    @operation
    def create(
        self,
        *,
        model: str,
        input: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],  # noqa: A002
        dimensions: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Steps[EmbeddingList]:
        """A vector of each text.

        Args:
            input: a text, several, or their token ids.
            dimensions: keep the first numbers of each vector only, normalised again.
            extra_body: further parameters.
        """
        body = {"model": model, "input": input, "dimensions": dimensions, **(extra_body or {})}
        answer: EmbeddingList = yield from self._post("/embeddings", body)
        return answer

    @operation
    def rerank(
        self,
        *,
        model: str,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
    ) -> Steps[Ranking]:
        """Documents by how well they answer a query, the best first.

        Args:
            top_n: the best so many only.
            extra_body: further parameters.
        """
        body = {
            "model": model,
            "query": query,
            "documents": documents,
            "top_n": top_n,
            **(extra_body or {}),
        }
        answer: Ranking = yield from self._post("/rerank", body)
        return answer

    @operation
    def score(
        self,
        *,
        model: str,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        extra_body: Mapping[str, Any] | None = None,
    ) -> Steps[ScoreList]:
        """How well each document answers its query, or the one query of all."""
        body = {"model": model, "queries": queries, "documents": documents, **(extra_body or {})}
        answer: ScoreList = yield from self._post("/score", body)
        return answer

    def _post(self, path: str, body: Mapping[str, Any]) -> Steps[Any]:
        given = {name: value for name, value in body.items() if value is not None}
        return (yield from self._server.call(self._server.request("POST", path, body=given)))
