"""The requests of `/rerank`, as Jina, Cohere and vLLM write them, and as TEI does, and of `/score`,
vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from penstock.gateway.api.embeddings.schema import MAX_INPUTS, PoolingRequest, Text
from penstock.gateway.api.schema.model import Model, invalid

_Texts = Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]


class RerankDocument(Model):
    text: Text


class ScoringRequest(PoolingRequest):
    """
    Attributes:
        instruction: of a reranker that judges by one: what makes a document a good one.
    """

    instruction: Annotated[str, Field(min_length=1)] | None = None


class RerankRequest(ScoringRequest):
    """
    Attributes:
        top_n: answer with the best so many; 0: with all.
        max_tokens_per_doc: cut off the end of a document beyond so many tokens.
    """

    query: Text
    documents: Annotated[
        list[Text | RerankDocument], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
    ]
    top_n: Annotated[int, Field(ge=0)] = 0
    return_documents: bool = True
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None

    @property
    def texts(self) -> list[str]:
        return [each if isinstance(each, str) else each.text for each in self.documents]


class RerankTextsRequest(ScoringRequest):
    """
    Attributes:
        truncate: cut off the end of a text beyond the model's context.
    """

    query: Text
    texts: Annotated[list[Text], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)]
    truncate: bool = False
    truncation_direction: Literal["Right", "right"] = "Right"
    raw_scores: Literal[False] = False
    return_text: bool = False

    def max_tokens(self, max_model_len: int) -> int | None:
        return max_model_len if self.truncate else super().max_tokens(max_model_len)


class ScoreRequest(ScoringRequest):
    """One text against each of several, or several pairs."""

    text_1: _Texts | None = None
    text_2: _Texts | None = None
    queries: _Texts | None = None
    documents: _Texts | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ScoreRequest:
        for name, other in (("text_1", "queries"), ("text_2", "documents")):
            given = [getattr(self, each) for each in (name, other)]
            if given.count(None) != 1:
                raise invalid(name, f"or {other} must be given, and not both")
        if 1 != len(self.firsts) != len(self.seconds):
            raise invalid(self.names[0], "must be one text, or as many as it is compared with")
        return self

    @property
    def names(self) -> tuple[str, str]:
        """The names of the two parameters that are given."""
        return (
            "queries" if self.text_1 is None else "text_1",
            "documents" if self.text_2 is None else "text_2",
        )

    @property
    def firsts(self) -> Sequence[str]:
        return _listed(self.queries if self.text_1 is None else self.text_1)

    @property
    def seconds(self) -> Sequence[str]:
        return _listed(self.documents if self.text_2 is None else self.text_2)


def _listed(texts: str | list[str] | None) -> list[str]:
    return [texts] if isinstance(texts, str) else texts or []
