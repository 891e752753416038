"""The request of `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar

from pydantic import Field, model_validator

from penstock.gateway.api.schema.aliases import NO_LIMIT
from penstock.gateway.api.schema.fields import (
    Branching,
    ChoicesRequest,
    NumBranches,
    NumLogprobs,
    TokenIds,
)
from penstock.gateway.api.schema.model import invalid
from penstock.gateway.api.schema.parameters import Endpoint

MAX_PROMPTS = 128  # in one request
MAX_OUTPUTS = 1024  # computed for all prompts of a request
_DEFAULT_LIMIT = 16  # of output tokens; OpenAI's, and vLLM's


class CompletionRequest(ChoicesRequest):
    """
    Attributes:
        suffix: what comes after the output: the model fills in the middle.
    """

    endpoint: ClassVar = Endpoint.COMPLETIONS

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=NO_LIMIT)] | None = None
    logprobs: NumLogprobs | None = None
    best_of: NumBranches | None = None
    suffix: str | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "must be at least 1; 0 is allowed only with echo")
        if self.stream and self.best_of is not None and self.best_of > self.n:
            raise invalid("best_of", "must equal n with stream: the best are only known at the end")
        if self.echo and self.truncate_prompt_tokens is not None:
            raise invalid("truncate_prompt_tokens", "cannot be used with echo")
        for name in ("echo", "truncate_prompt_tokens") if self.suffix else ():
            if getattr(self, name):
                raise invalid(name, "cannot be used with suffix")
        if self.prediction is not None and len(self.prompts) > 1:
            raise invalid("prediction", "cannot be used with several prompts")
        if len(self.prompts) * max(self.n, self.best_of or 1) > MAX_OUTPUTS:
            raise invalid("n", f"(or best_of) times prompts must be at most {MAX_OUTPUTS}")
        return self

    @property
    def continues_prompt(self) -> bool:
        return True

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def output_limit(self) -> int | None:
        return None if self.max_tokens == NO_LIMIT else self.max_tokens

    @property
    def default_output_limit(self) -> int | None:
        return None if self.max_tokens == NO_LIMIT else _DEFAULT_LIMIT

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        counts = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(counts, default=None)

    @property
    def beyond_one_output(self) -> Iterator[str]:
        yield from super().beyond_one_output
        if len(self.prompts) > 1:
            yield "several prompts"
        if self.best_of is not None and self.best_of > 1:
            yield "best_of above 1"
        if self.echo:
            yield "echo"

    @property
    def branching(self) -> Branching:
        return Branching(n=self.n, best_of=self.best_of, beam_search=self._beam_search)
