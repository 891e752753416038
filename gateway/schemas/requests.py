"""The request of each endpoint, as types: one class per row of endpoints in `parameters`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from penstock.engine.request import Notice
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.schemas.fields import MaxTokens, Message, Model, TokenIds, bounded
from penstock.gateway.schemas.sampling import (
    Branching,
    ChoicesRequest,
    NumBranches,
    NumLogprobs,
    SamplingRequest,
    invalid,
)

MAX_PROMPTS = 128  # of one completions request
MAX_OUTPUTS = 1024  # computed for all of them
_MAX_ITEMS = 4096  # messages or input items
_MAX_METADATA = 16  # OpenAI's limit
_MAX_INCLUDES = 32


class ChatRequest(ChoicesRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    add_special_tokens: bool = False

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs to be true")
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(ChoicesRequest):
    continues_prompt: ClassVar[bool] = True
    default_output_limit: ClassVar[int | None] = 16  # OpenAI's, and vLLM's

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: NumLogprobs | None = None
    best_of: NumBranches | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check_completion(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "must be at least 1, unless echo asks for the prompt alone")
        if self.stream and self.best_of is not None and self.best_of > self.n:
            raise invalid("best_of", "must be n with stream: the best are known at the end alone")
        if len(self.prompts) * max(self.n, self.best_of or 1) > MAX_OUTPUTS:
            raise invalid("n", f"times the prompts must be at most {MAX_OUTPUTS}")
        return self

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        counts = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return max(counts, default=None)

    @property
    def branching(self) -> Branching:
        return Branching(n=self.n, best_of=self.best_of, beam_search=self._beam_search)


_Includable = Literal[
    "message.output_text.logprobs",
    # Of tools, images and hidden reasoning, of which there are none here.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]


class Extensions(Model):
    """What of penstock's own a client asks for.

    Attributes:
        events: kinds of `penstock.*` events to send beside OpenAI's.
    """

    events: Annotated[
        list[Literal["preempted", "resumed"]], Field(max_length=len(Notice), fail_fast=True)
    ] = Field(default_factory=list)


class CacheOptions(Model):
    """OpenAI's; where and how long it caches is the engine's business here."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    comparison_response_id: str | None = None
    prewarm: bool | None = None


class ResponsesRequest(SamplingRequest):
    input: str | Annotated[list[Message], Field(max_length=_MAX_ITEMS, fail_fast=True)] | None = (
        None
    )
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    metadata: Annotated[
        dict[str, str], BeforeValidator(lambda value: bounded(value, _MAX_METADATA))
    ] = Field(default_factory=dict)
    previous_response_id: str | None = None
    store: bool = True
    include: Annotated[list[_Includable], Field(max_length=_MAX_INCLUDES, fail_fast=True)] = Field(
        default_factory=list
    )
    top_logprobs: NumLogprobs | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    prompt_cache_options: CacheOptions = CacheOptions()
    penstock: Extensions = Extensions()

    @model_validator(mode="after")
    def _check_input(self) -> ResponsesRequest:
        if self.previous_response_id is not None or self.input not in (None, []):
            return self
        raise RequestRefusedError(
            "input is needed, unless previous_response_id names something to continue",
            code="missing_required_parameter" if self.input is None else "invalid_value",
            param="input",
        )

    @property
    def items(self) -> list[Message]:
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        return self.input or []

    @property
    def generates(self) -> bool:
        """Whether there is to be output; otherwise the prompt is only prepared."""
        return not self.prompt_cache_options.prewarm

    @property
    def output_limit(self) -> int | None:
        return self.max_output_tokens if self.generates else 0

    @property
    def num_logprobs(self) -> int | None:
        wants = "message.output_text.logprobs" in self.include or bool(self.top_logprobs)
        return (self.top_logprobs or 0) if wants else None


class SocketRequest(ResponsesRequest):
    """`response.create` of the WebSocket mode."""

    generate: bool = True

    @property
    def generates(self) -> bool:
        return self.generate and super().generates
