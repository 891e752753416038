"""The request of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from penstock.engine.chat_formats import OfferedTools
from penstock.engine.vision.image_file import LoadedImage
from penstock.gateway.api.schema.fields import (
    CacheKey,
    ChoicesRequest,
    MaxTokens,
    NumLogprobs,
)
from penstock.gateway.api.schema.messages import MAX_ITEMS, ChatMessage, check_continuation
from penstock.gateway.api.schema.model import invalid
from penstock.gateway.api.schema.parameters import Endpoint
from penstock.gateway.api.schema.tools import (
    ChatTool,
    ChatToolChoice,
    Verbosity,
    check_thinking,
    choice_of,
    offered,
    template_kwargs,
)
from penstock.gateway.api.tokens.schema import TemplatedChat
from penstock.gateway.generation.cache_history import Predecessor, predecessor
from penstock.gateway.generation.context_limits import Effort
from penstock.gateway.generation.images.loader import ImageSource
from penstock.gateway.generation.request_planner import ChatPrompt


class ChatRequest(ChoicesRequest):
    endpoint: ClassVar = Endpoint.CHAT

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
    ]
    max_tokens: MaxTokens = None
    max_completion_tokens: MaxTokens = None
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: list[dict[str, Any]] = Field(default_factory=list)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    tools: Annotated[list[ChatTool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: ChatToolChoice = None
    parallel_tool_calls: bool = True
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    verbosity: Verbosity | None = None
    include_reasoning: bool = True
    prompt_cache_key: CacheKey | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs to be true")
        check_continuation(self)
        check_thinking(self.enable_thinking, self.reasoning_effort, "reasoning_effort")
        if self.truncate_prompt_tokens is not None and any(each.images for each in self.messages):
            raise invalid("truncate_prompt_tokens", "is not allowed with images")
        _ = self.offered
        return self

    @cached_property
    def offered(self) -> OfferedTools:
        """The tools that the model may call. Raises: RequestRefusedError."""
        return offered(
            [tool.defined(f"tools[{index}]") for index, tool in enumerate(self.tools)],
            choice_of(self.tool_choice),
            is_parallel=self.parallel_tool_calls,
        )

    @property
    def continues_prompt(self) -> bool:
        return self.continue_final_message

    @property
    def session(self) -> str:
        return self.prompt_cache_key or self.user or ""

    @property
    def effort(self) -> Effort | None:
        return "none" if self.enable_thinking is False else self.reasoning_effort

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template."""
        asked = template_kwargs(
            self.reasoning_effort,
            thinks=self.enable_thinking,
            verbosity=self.verbosity,
            budget=self.thought_budget,
        )
        documents = {"documents": self.documents} if self.documents else {}
        return {**asked, **documents, **self.chat_template_kwargs}

    @property
    def predecessor(self) -> Predecessor:
        """With which request its prompt is compared."""
        return predecessor(prompt_cache_key=self.prompt_cache_key)

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def image_sources(messages: Sequence[ChatMessage]) -> list[ImageSource]:
    """The images of messages, in order."""
    return [
        ImageSource(url=image.url, param=f"messages[{number}].content[{at}].image_url")
        for number, message in enumerate(messages)
        for at, image in message.images
    ]


def chat_prompt(
    asked: ChatRequest | TemplatedChat, images: Sequence[LoadedImage] = ()
) -> ChatPrompt:
    """The conversation of a request, with its images."""
    return ChatPrompt(
        images=images,
        messages=[message.for_template() for message in asked.messages],
        add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
        continue_final_message=asked.continue_final_message,
        add_special_tokens=asked.add_special_tokens,
        template=asked.chat_template,
        kwargs=asked.template_kwargs,
        tools=asked.offered.for_template,
    )
