"""The requests of `POST /v1/messages` and of `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from penstock.engine.chat_formats import OfferedTools
from penstock.gateway.api.anthropic.blocks import AnyMessage, AssistantMessage, Texts
from penstock.gateway.api.schema.fields import CacheKey, SamplingRequest
from penstock.gateway.api.schema.messages import MAX_ITEMS
from penstock.gateway.api.schema.model import Model, invalid
from penstock.gateway.api.schema.parameters import Endpoint
from penstock.gateway.api.schema.structured_outputs import Asked
from penstock.gateway.api.schema.tools import (
    Choice,
    DefinedTool,
    FunctionDefinition,
    ToolSchema,
    offered,
    template_kwargs,
)
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.cache_history import NO_PREDECESSOR, Predecessor, predecessor
from penstock.gateway.generation.context_limits import Effort

_MIN_BUDGET = 1024  # Anthropic's
_CLEARS_THOUGHTS = "clear_thinking_20251015"


class MessagesTool(FunctionDefinition):
    type: Literal["custom"] = "custom"
    parameters: ToolSchema = Field(alias="input_schema")

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise PydanticCustomError(
                "unsupported_parameter",
                "{kind} is a tool that Anthropic's servers run or define; only tools with an "
                "input_schema are supported",
                {"kind": repr(kind)},
            )
        return value


class MessagesChoice(Model):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> MessagesChoice:
        if self.type == "tool" and not self.name:
            raise PydanticCustomError("missing", "needs `name`")
        return self

    @property
    def choice(self) -> Choice:
        if self.type == "tool":
            return Choice("required", [self.name or ""], is_named=True)
        return Choice("required") if self.type == "any" else Choice(self.type)


class Thinking(Model):
    """Whether to think. Where it is absent or `adaptive`, the chat template decides.

    Attributes:
        budget_tokens: as `thinking_token_budget`.
        display: `omitted`: thoughts are sealed in their signatures.
        block_binding: without effect: thoughts that are sent back are not checked.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=_MIN_BUDGET)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Thinking:
        if self.type == "enabled" and self.budget_tokens is None:
            raise PydanticCustomError("missing", "needs `budget_tokens`")
        if self.type == "disabled" and self.budget_tokens is not None:
            raise PydanticCustomError("value_error", "has no budget_tokens where it is disabled")
        return self


class OutputFormat(Model):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Model):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None  # without effect


class ThinkingTurns(Model):
    type: Literal["thinking_turns", "all"]
    value: Annotated[int, Field(ge=1)] = 1


class ContextEdit(Model):
    """An edit of the conversation on the server's side: which thoughts are left, as Claude Code
    sends it. Others are refused."""

    model_config = ConfigDict(extra="ignore")

    type: str
    keep: Literal["all"] | ThinkingTurns = ThinkingTurns(type="thinking_turns")

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        return value if kind in (None, _CLEARS_THOUGHTS) else {"type": kind}


class ContextManagement(Model):
    edits: Annotated[list[ContextEdit], Field(max_length=MAX_ITEMS)] = Field(default_factory=list)

    @property
    def num_thinking_turns(self) -> int | None:
        """Of how many turns, the last ones, thoughts are left; None: of all."""
        numbers = [
            edit.keep.value
            for edit in self.edits
            if isinstance(edit.keep, ThinkingTurns) and edit.keep.type != "all"
        ]
        return min(numbers, default=None)


class Conversation(SamplingRequest):
    """What is sent to be answered, or to be counted."""

    endpoint: ClassVar = Endpoint.ANTHROPIC

    messages: Annotated[list[AnyMessage], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    system: Texts = Field(default_factory=list)
    tools: Annotated[list[MessagesTool], Field(fail_fast=True)] = Field(default_factory=list)
    tool_choice: MessagesChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    context_management: ContextManagement = ContextManagement()
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_conversation(self) -> Conversation:
        last = self.messages[-1]
        if isinstance(last, AssistantMessage) and (
            not last.content or last.content[-1].type != "text"
        ):
            raise invalid(
                f"messages[{len(self.messages) - 1}]",
                "is the assistant's and the last one, so that the answer continues it: it must end "
                "with text",
            )
        for index, edit in enumerate(self.context_management.edits):
            if edit.type != _CLEARS_THOUGHTS:
                # By these words Claude Code knows that it has to send it no more.
                raise RequestRefusedError(
                    f"{self.model or 'this model'} does not support the '{edit.type}' context "
                    f"management strategy; this server knows '{_CLEARS_THOUGHTS}'",
                    code="unsupported_parameter",
                    param=f"context_management.edits[{index}].type",
                )
        _ = self.offered
        return self

    @cached_property
    def offered(self) -> OfferedTools:
        """The tools that the model may call. Raises: RequestRefusedError."""
        choice = self.tool_choice
        return offered(
            [DefinedTool(tool, f"tools[{index}]") for index, tool in enumerate(self.tools)],
            None if choice is None else choice.choice,
            is_parallel=choice is None or not choice.disable_parallel_tool_use,
        )

    @property
    def continues_prompt(self) -> bool:
        return isinstance(self.messages[-1], AssistantMessage)

    @property
    def session(self) -> str:
        user = (self.metadata or {}).get("user_id")
        return user if isinstance(user, str) else ""

    @property
    def _thinks(self) -> bool | None:
        known = {"enabled": True, "disabled": False}
        return None if self.thinking is None else known.get(self.thinking.type)

    @property
    def effort(self) -> Effort | None:
        return "none" if self._thinks is False else self.output_config.effort

    @property
    def thought_budget(self) -> int:
        own = None if self.thinking is None else self.thinking.budget_tokens
        return super().thought_budget if own is None else own

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template."""
        asked = template_kwargs(
            self.output_config.effort,
            thinks=self._thinks,
            verbosity=None,
            budget=self.thought_budget,
        )
        return {**asked, **self.chat_template_kwargs}

    @property
    def formats(self) -> Iterator[Asked]:
        if self.output_config.format is not None:
            schema = self.output_config.format.schema_
            param = "output_config.format.schema"
            yield Asked(param=param, keyword="json_schema", value=schema)
        yield from super().formats

    @property
    def num_logprobs(self) -> int | None:
        return None

    @property
    def output_limit(self) -> int | None:
        return None


class CountTokensRequest(Conversation):
    max_tokens: int | None = None  # clients send the whole request


class Diagnostics(Model):
    """With which message's request this one's prompt is compared; None: it is the first."""

    previous_message_id: CacheKey | None = None


class MessagesRequest(Conversation):
    """
    Attributes:
        max_tokens: 0: the prompt is only prepared.
    """

    max_tokens: Annotated[int, Field(ge=0)]
    diagnostics: Diagnostics | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> MessagesRequest:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise RequestRefusedError(
                f"thinking.budget_tokens ({budget}) must be less than max_tokens "
                f"({self.max_tokens})",
                code="invalid_value",
                param="thinking.budget_tokens",
            )
        return self

    @property
    def output_limit(self) -> int:
        return self.max_tokens

    @property
    def predecessor(self) -> Predecessor:
        """With which request its prompt is compared."""
        if self.diagnostics is None:
            return NO_PREDECESSOR
        return predecessor(self.diagnostics.previous_message_id)

    @property
    def shows_thoughts(self) -> bool:
        """Whether thoughts are in the answer: a model may think although it was told not to."""
        return self.thinking is None or self.thinking.type != "disabled"

    @property
    def seals_thoughts(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"
