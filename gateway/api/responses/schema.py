"""The request of `POST /v1/responses`, and of `response.create` on its WebSocket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from penstock.engine.chat_formats import OfferedTools
from penstock.gateway.api.schema.fields import (
    CacheKey,
    ConversationId,
    Extensions,
    Includes,
    MaxTokens,
    Metadata,
    NumLogprobs,
    SamplingRequest,
)
from penstock.gateway.api.schema.messages import (
    MAX_ITEMS,
    CompactionTrigger,
    InputItem,
    Message,
)
from penstock.gateway.api.schema.model import Model, invalid
from penstock.gateway.api.schema.parameters import Endpoint
from penstock.gateway.api.schema.structured_outputs import Asked, TextOptions
from penstock.gateway.api.schema.tools import (
    ReasoningOptions,
    ResponsesTool,
    ResponsesToolChoice,
    check_thinking,
    choice_of,
    offered,
    template_kwargs,
)
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.cache_history import Predecessor, predecessor
from penstock.gateway.generation.context_limits import Effort

MAX_SUMMARY_TOKENS = 4096
_MAX_EVENTS = 8
_MAX_KEY_CHARS = 512
_MAX_RULES = 8


class ResponseExtensions(Extensions):
    """Extensions that only responses have.

    Attributes:
        continues: `continue` on the wire: continue the previous response where it was cut off.
        events: kinds of `penstock.*` events to send beside OpenAI's.
    """

    continues: bool = Field(default=False, alias="continue")
    events: Annotated[
        list[Literal["preempted", "resumed", "queue", "progress"]],
        Field(max_length=_MAX_EVENTS, fail_fast=True),
    ] = Field(default_factory=list)


class ResponseStreamOptions(Model):
    """OpenAI's. This server never pads streams, so `include_obfuscation` has no effect."""

    include_obfuscation: bool = False


class CacheOptions(Model):
    """OpenAI's. The engine decides what it caches and how long, so `mode` and `ttl` have no
    effect."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    comparison_response_id: CacheKey | None = None
    prewarm: bool | None = None


class BackgroundOptions(Model):
    """OpenAI's. A response begins as soon as there is room; the longer windows, which are cheaper
    there, only need what they need there."""

    completion_window: Literal["soonest", "2h", "8h"] = "soonest"
    continuation_id: Annotated[str, Field(max_length=_MAX_KEY_CHARS)] | None = None


class ContextManagement(Model):
    """OpenAI's: a conversation whose prompt has more tokens than the threshold is compacted before
    it is answered; None: than three quarters of the context."""

    type: Literal["compaction"]
    compact_threshold: Annotated[int, Field(ge=1)] | None = None

    def threshold(self, max_model_len: int) -> int:
        return self.compact_threshold or max_model_len * 3 // 4


class ResponsesRequest(SamplingRequest):
    endpoint: ClassVar = Endpoint.RESPONSES

    input: str | Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = (
        None
    )
    instructions: str | None = None
    max_output_tokens: MaxTokens = None
    metadata: Metadata = Field(default_factory=dict)
    previous_response_id: str | None = None
    conversation: ConversationId | None = None
    store: bool = True
    background: bool = False
    background_options: BackgroundOptions = BackgroundOptions()
    stream_options: ResponseStreamOptions = ResponseStreamOptions()
    include: Includes = Field(default_factory=list)
    top_logprobs: NumLogprobs | None = None
    text: TextOptions = TextOptions()
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    prompt_cache_options: CacheOptions = CacheOptions()
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: ResponsesToolChoice = None
    parallel_tool_calls: bool = True
    # Of tools that a server runs itself; this one has none.
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    reasoning: ReasoningOptions = ReasoningOptions()
    enable_thinking: bool | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    context_management: Annotated[list[ContextManagement], Field(max_length=_MAX_RULES)] = Field(
        default_factory=list
    )
    safety_identifier: Annotated[str, Field(max_length=_MAX_KEY_CHARS)] | None = None
    prompt_cache_key: CacheKey | None = None
    penstock: ResponseExtensions = ResponseExtensions()

    @model_validator(mode="after")
    def _check_input(self) -> ResponsesRequest:
        if self.penstock.continues:
            self._check_continue()
        elif self.input in (None, []) and not (self.previous_response_id or self.conversation):
            raise RequestRefusedError(
                "input is required unless previous_response_id or conversation is given",
                code="missing_required_parameter" if self.input is None else "invalid_value",
                param="input",
            )
        return self

    @model_validator(mode="after")
    def _check_trigger(self) -> ResponsesRequest:
        for index, item in enumerate(self.items[:-1]):
            if isinstance(item, CompactionTrigger):
                raise invalid(f"input[{index}]", "is a compaction trigger and not the last item")
        return self

    @model_validator(mode="after")
    def _check_storage(self) -> ResponsesRequest:
        if self.previous_response_id is not None and self.conversation is not None:
            raise RequestRefusedError(
                "previous_response_id and conversation cannot be used together",
                code="mutually_exclusive_parameters",
                param="previous_response_id",
            )
        if self.background and not self.store:
            raise invalid("background", "needs store to be true")
        window = self.background_options.completion_window
        if window != "soonest" and (self.stream or not self.background):
            raise invalid(
                "background_options.completion_window",
                f"{window} needs background to be true and stream to be false",
            )
        check_thinking(self.enable_thinking, self.reasoning.effort, "reasoning.effort")
        _ = self.offered
        return self

    @cached_property
    def offered(self) -> OfferedTools:
        """The tools that the model may call. Raises: RequestRefusedError."""
        found = offered(
            [d for index, tool in enumerate(self.tools) for d in tool.defined(f"tools[{index}]")],
            choice_of(self.tool_choice),
            is_parallel=self.parallel_tool_calls,
        )
        # Where a conversation is compacted they are shown, as in the requests before.
        return replace(found, choice="none", named="", allowed=None) if self.compacts else found

    @property
    def effort(self) -> Effort | None:
        return "none" if self.enable_thinking is False else self.reasoning.effort

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template."""
        asked = template_kwargs(
            self.reasoning.effort,
            thinks=self.enable_thinking,
            verbosity=self.text.verbosity,
            budget=self.thought_budget,
        )
        return {**asked, **self.chat_template_kwargs}

    def _check_continue(self) -> None:
        if self.previous_response_id is None:
            raise RequestRefusedError(
                "penstock.continue needs previous_response_id: the response to continue",
                code="missing_required_parameter",
                param="previous_response_id",
            )
        if self.input not in (None, [], ""):
            raise invalid("input", "must be empty with penstock.continue")
        if not self.generates:
            raise invalid("penstock.continue", "cannot be used with generate: false or prewarm")

    @property
    def continues_prompt(self) -> bool:
        return self.penstock.continues

    @property
    def items(self) -> Sequence[InputItem]:
        if self.penstock.continues:
            return []
        if isinstance(self.input, str):
            return [Message(role="user", content=(self.input,))]
        return self.input or []

    @property
    def compacts(self) -> bool:
        """Whether the conversation is to be summarised instead of answered."""
        return any(isinstance(item, CompactionTrigger) for item in self.items[-1:])

    def compacts_above(self, max_model_len: int) -> int | None:
        """Tokens of a prompt above which the conversation is compacted before it is answered;
        None: it is not. One that leaves no room for output always is."""
        if self.compacts or not self.generates:
            return None
        thresholds = [rule.threshold(max_model_len) for rule in self.context_management]
        return min([*thresholds, max_model_len - 1]) if thresholds else None

    def for_summary(self, max_tokens: int) -> ResponsesRequest:
        """The request for the summary with which the answer begins."""
        trigger = CompactionTrigger(type="compaction_trigger")
        asked = self.model_copy(
            update={
                "input": [*self.items, trigger],
                "max_output_tokens": max_tokens,
                "context_management": [],
                # What is asked of the answer only.
                "include": [],
                "top_logprobs": None,
                "prediction": None,
                "stop": [],
                "stop_token_ids": [],
                "min_tokens": 0,
                "ignore_eos": False,
            }
        )
        for name in ("offered", "constraint"):  # which were found for the answer
            asked.__dict__.pop(name, None)
        return asked

    def after(self, items: Sequence[InputItem]) -> ResponsesRequest:
        """The request with these items before its own."""
        return self.model_copy(update={"input": [*items, *self.items]})

    @property
    def drops_items(self) -> bool:
        """Whether the oldest items of a conversation that is too long are dropped."""
        return self.truncation == "auto" or self.compacts

    @property
    def formats(self) -> Iterator[Asked]:
        if self.compacts:
            return
        if self.text.format is not None:
            yield from self.text.format.asked
        yield from super().formats

    @property
    def wants_queue_position(self) -> bool:
        return bool({"queue", "progress"} & set(self.penstock.events))

    @property
    def generates(self) -> bool:
        """Whether to generate output; otherwise the prompt is only prepared."""
        return not self.prompt_cache_options.prewarm

    @property
    def predecessor(self) -> Predecessor:
        """With which request its prompt is compared."""
        return predecessor(
            self.prompt_cache_options.comparison_response_id,
            previous_id=self.previous_response_id,
            conversation_id=self.conversation,
            prompt_cache_key=self.prompt_cache_key,
        )

    @property
    def output_limit(self) -> int | None:
        if not self.generates:
            return 0
        return self.max_output_tokens or (MAX_SUMMARY_TOKENS if self.compacts else None)

    @property
    def num_logprobs(self) -> int | None:
        wants = "message.output_text.logprobs" in self.include or bool(self.top_logprobs)
        return (self.top_logprobs or 0) if wants else None


class SocketRequest(ResponsesRequest):
    """`response.create` of the WebSocket mode."""

    endpoint: ClassVar = Endpoint.RESPONSES_SOCKET

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


class CompactRequest(ResponsesRequest):
    """A conversation that ends with a compaction trigger."""

    @model_validator(mode="after")
    def _check_compaction(self) -> CompactRequest:
        for name, is_asked in (
            ("stream", self.stream),
            ("background", self.background),
            ("penstock.continue", self.penstock.continues),
            ("prompt_cache_options.prewarm", not self.generates),
        ):
            if is_asked:
                raise invalid(name, "cannot be used where a conversation is compacted")
        return self

    @property
    def items(self) -> Sequence[InputItem]:
        return [*super().items, CompactionTrigger(type="compaction_trigger")]
