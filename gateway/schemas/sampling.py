"""Parameters that several endpoints share: how tokens are chosen, and how many outputs there are.

Not known here: prompts, and what is particular to an endpoint (`requests`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from penstock.engine.request import MAX_BRANCHES, MAX_LOGPROBS, BeamSearch
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.schemas.fields import Model, NumKept, TokenId, bounded, listed

_MAX_STOPS = 16
_MAX_STOP_CHARS = 1024
_MAX_LOGIT_BIAS = 1024
_MAX_SALT_CHARS = 256
_MAX_PRIORITY = 1 << 31

NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
_Stop = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]
_Stops = Annotated[list[_Stop], Field(max_length=_MAX_STOPS, fail_fast=True)]
NumBranches = Annotated[int, Field(ge=1, le=MAX_BRANCHES)]


class StreamOptions(Model):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Branching:
    """How many outputs answer one prompt, as `SamplingParams` has it."""

    n: int = 1
    best_of: int | None = None
    beam_search: BeamSearch | None = None


class SamplingRequest(Model):
    """What all endpoints share. Absent values take the model's defaults, then OpenAI's.

    Attributes:
        default_output_limit: output tokens where the caller names no limit; None: what fits.
    """

    default_output_limit: ClassVar[int | None] = None

    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
        BeforeValidator(lambda value: bounded(value, _MAX_LOGIT_BIAS)),
    ] = Field(default_factory=dict)
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 64) - 1)] | None = None
    stop: Annotated[_Stops, BeforeValidator(listed, json_schema_input_type=_Stop | _Stops)] = Field(
        default_factory=list
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_LOGIT_BIAS, fail_fast=True)] = (
        Field(default_factory=list)
    )
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=_MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Field(ge=-_MAX_PRIORITY, lt=_MAX_PRIORITY)] = 0

    @property
    def continues_prompt(self) -> bool:
        """Whether the output is the prompt's next words, not a text of its own."""
        return False

    @property
    def output_limit(self) -> int | None:
        """Output tokens asked for at most, under whatever name the endpoint has for it."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """None, or how many alternatives to report beside each token."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of each token of the prompt."""
        return None

    @property
    def wants_queue_position(self) -> bool:
        """Whether the caller is to be told of its place in the engine's queue."""
        return False

    @property
    def branching(self) -> Branching:
        """How many outputs are wanted."""
        return Branching()


class ChoicesRequest(SamplingRequest):
    """What chat completions and completions share: several choices, and OpenAI's stream options.

    Of a beam search, `n` is the width and the number of hypotheses, as in vLLM.

    Attributes:
        truncate_prompt_tokens: only that many tokens of a prompt are taken, its last ones.
    """

    stream_options: StreamOptions = StreamOptions()
    n: NumBranches = 1
    use_beam_search: bool = False
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = 1.0
    early_stopping: bool | Literal["never"] = False
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: NumKept | None = None

    @model_validator(mode="after")
    def _check_choices(self) -> ChoicesRequest:
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "cannot be used with stream")
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != neutral:
                    raise invalid(name, "needs use_beam_search to be true")
        return self

    def kept(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """What is taken of a prompt."""
        num_kept = self.truncate_prompt_tokens
        return prompt_token_ids if num_kept is None else prompt_token_ids[-num_kept:]

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs

    @property
    def branching(self) -> Branching:
        return Branching(n=self.n, beam_search=self._beam_search)

    @property
    def beyond_one_output(self) -> Iterator[str]:
        """What it asks for beside one output, by the parameter that does."""
        if self.n > 1:
            yield "n above 1"
        if self.use_beam_search:
            yield "use_beam_search"
        if self.prompt_logprobs is not None:
            yield "prompt_logprobs"

    @property
    def _beam_search(self) -> BeamSearch | None:
        if not self.use_beam_search:
            return None
        return BeamSearch(
            width=self.n, length_penalty=self.length_penalty, early_stopping=self.early_stopping
        )


def invalid(param: str, rule: str) -> RequestRefusedError:
    return RequestRefusedError(f"{param} {rule}", code="invalid_value", param=param)
