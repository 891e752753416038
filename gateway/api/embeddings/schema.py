"""The requests of `POST /v1/embeddings`: OpenAI's, with some of vLLM's extras, and vLLM's of a
conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, cast

from pydantic import Field, model_validator

from penstock.gateway.api.schema.fields import TokenIds
from penstock.gateway.api.schema.model import Model, invalid
from penstock.gateway.api.tokens.schema import TemplatedChat

MAX_INPUTS = 2048  # in one request, as OpenAI's
Text = Annotated[str, Field(min_length=1)]


class PoolingRequest(Model):
    """What requests for vectors and for scores share.

    Attributes:
        truncate_prompt_tokens: cut off the end of a text beyond so many tokens; -1: beyond the
            model's context.
        truncation_side: the end is what is cut off.
    """

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["right"] = "right"
    priority: int | None = None
    user: str | None = None  # without effect

    def max_tokens(self, max_model_len: int) -> int | None:
        """The length to which a text with special tokens is cut; None: nothing is cut off."""
        asked = self.truncate_prompt_tokens
        return max_model_len if asked == -1 else asked


class PooledTexts(PoolingRequest):
    """One text or several, or their token ids."""

    input: (
        Text
        | TokenIds
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_inputs(self) -> PooledTexts:
        if len(self.inputs) > MAX_INPUTS:
            raise invalid("input", f"must have at most {MAX_INPUTS} texts")
        return self

    @property
    def inputs(self) -> Sequence[tuple[str, str | Sequence[int]]]:
        """Each text, or its token ids, after its name."""
        given = self.input
        if isinstance(given, str):
            return [("input", given)]
        if isinstance(given[0], int):
            return [("input", given)]
        several = cast("Sequence[str | Sequence[int]]", given)
        return [(f"input[{number}]", each) for number, each in enumerate(several)]


class PooledChat(TemplatedChat, PoolingRequest):
    """One conversation, as the chat template writes it; nothing follows it."""

    add_generation_prompt: bool = False

    @model_validator(mode="after")
    def _check_images(self) -> PooledChat:
        if self.truncate_prompt_tokens is not None and any(each.images for each in self.messages):
            raise invalid("truncate_prompt_tokens", "is not allowed with images")
        return self


class _VectorOptions(Model):
    """How vectors are written."""

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class EmbeddingRequest(_VectorOptions, PooledTexts):
    """The request for vectors of texts."""


class EmbeddingChatRequest(_VectorOptions, PooledChat):
    """The request for the vector of a conversation."""
