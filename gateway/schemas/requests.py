"""The request of each endpoint, as types: one class per row of endpoints in `parameters`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.schemas.fields import (
    ConversationId,
    Includes,
    MaxTokens,
    Message,
    Metadata,
    Model,
    TokenIds,
)
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
_MAX_EVENTS = 8


class ChatRequest(ChoicesRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs to be true")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("continue_final_message", "needs add_generation_prompt to be false")
        return self

    @property
    def continues_prompt(self) -> bool:
        return self.continue_final_message

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(ChoicesRequest):
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
        if self.echo and self.truncate_prompt_tokens is not None:
            raise invalid("truncate_prompt_tokens", "cannot be used with echo")
        if len(self.prompts) * max(self.n, self.best_of or 1) > MAX_OUTPUTS:
            raise invalid("n", f"times the prompts must be at most {MAX_OUTPUTS}")
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


class Extensions(Model):
    """What of penstock's own a client asks for.

    Attributes:
        continues: `continue` on the wire: go on where the previous response broke off.
        events: kinds of `penstock.*` events to send beside OpenAI's.
    """

    continues: bool = Field(default=False, alias="continue")
    events: Annotated[
        list[Literal["preempted", "resumed", "queue"]],
        Field(max_length=_MAX_EVENTS, fail_fast=True),
    ] = Field(default_factory=list)


class ResponseStreamOptions(Model):
    """OpenAI's; streams are not padded here, whatever is asked."""

    include_obfuscation: bool = False


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
    metadata: Metadata = Field(default_factory=dict)
    previous_response_id: str | None = None
    conversation: ConversationId | None = None
    store: bool = True
    background: bool = False
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    include: Includes = Field(default_factory=list)
    top_logprobs: NumLogprobs | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    prompt_cache_options: CacheOptions = CacheOptions()
    penstock: Extensions = Extensions()

    @model_validator(mode="after")
    def _check_input(self) -> ResponsesRequest:
        if self.penstock.continues:
            self._check_continue()
        elif self.input in (None, []) and not (self.previous_response_id or self.conversation):
            raise RequestRefusedError(
                "input is needed, unless previous_response_id or conversation names something to "
                "continue",
                code="missing_required_parameter" if self.input is None else "invalid_value",
                param="input",
            )
        return self

    @model_validator(mode="after")
    def _check_storage(self) -> ResponsesRequest:
        if self.previous_response_id is not None and self.conversation is not None:
            raise RequestRefusedError(
                "only one of previous_response_id and conversation can be given",
                code="mutually_exclusive_parameters",
                param="previous_response_id",
            )
        if self.background and not self.store:
            raise invalid("background", "needs store to be true")
        return self

    def _check_continue(self) -> None:
        if self.previous_response_id is None:
            raise RequestRefusedError(
                "penstock.continue needs previous_response_id: the response to go on with",
                code="missing_required_parameter",
                param="previous_response_id",
            )
        if self.input not in (None, [], ""):
            raise invalid("input", "must be empty with penstock.continue")
        if not self.generates:
            raise invalid("penstock.continue", "needs output to be generated")

    @property
    def items(self) -> list[Message]:
        if self.penstock.continues:
            return []
        if isinstance(self.input, str):
            return [Message(role="user", content=(self.input,))]
        return self.input or []

    @property
    def wants_queue_position(self) -> bool:
        return "queue" in self.penstock.events

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

    @model_validator(mode="after")
    def _check_background(self) -> SocketRequest:
        if self.background:
            raise RequestRefusedError(
                "background is not supported over WebSocket",
                code="unsupported_parameter",
                param="background",
            )
        return self

    @property
    def generates(self) -> bool:
        return self.generate and super().generates
