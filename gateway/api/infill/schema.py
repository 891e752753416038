"""The request of `POST /infill`, in llama.cpp's format."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from penstock.gateway.api.completions.schema import CompletionRequest
from penstock.gateway.api.schema.fields import TokenIds
from penstock.gateway.api.schema.model import Model, invalid

_MAX_EXTRAS = 1024
_MAX_FIELDS = 256


class ExtraFile(Model):
    """Part of another file."""

    text: str
    filename: str = "tmp"


class InfillRequest(CompletionRequest):
    """A gap between two texts.

    Attributes:
        prompt: what is written of the gap so far; it goes behind `input_prefix`.
        n_predict: maximum of output tokens; -1: what fits.
        response_fields: answer with these only; `a/b` is b of a.
    """

    prompt: str = ""
    input_prefix: str | TokenIds
    input_suffix: str | TokenIds
    input_extra: Annotated[list[ExtraFile], Field(max_length=_MAX_EXTRAS, fail_fast=True)] = Field(
        default_factory=list
    )
    n_predict: Annotated[int, Field(ge=-1)] | None = None
    response_fields: Annotated[list[str], Field(max_length=_MAX_FIELDS)] = Field(
        default_factory=list
    )
    # Of llama.cpp and its editors' plugins, without effect here.
    cache_prompt: bool | None = None
    id_slot: int | None = None
    n_indent: int | None = None
    samplers: Any = None
    t_max_prompt_ms: int | None = None
    t_max_predict_ms: int | None = None

    @model_validator(mode="after")
    def _check_infill(self) -> InfillRequest:
        others = ("suffix", "truncate_prompt_tokens", "logprobs")
        for name in (*self.beyond_one_output, *others):
            if name not in others or getattr(self, name) is not None:
                raise invalid(name.split()[0], "is not supported by /infill")
        return self

    @property
    def output_limit(self) -> int | None:
        if self.n_predict is None:
            return super().output_limit
        return None if self.n_predict < 0 else self.n_predict

    @property
    def default_output_limit(self) -> int | None:
        return None
