"""The requests of `/tokenize` and `/detokenize`, in vLLM's format."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from penstock.engine.chat_formats import OfferedTools
from penstock.gateway.api.schema.fields import TokenId
from penstock.gateway.api.schema.messages import ChatMessage, check_continuation
from penstock.gateway.api.schema.model import Model
from penstock.gateway.api.schema.tools import ChatTool, offered

_MAX_MESSAGES = 4096
_MAX_TOKENS = 1 << 20


class TokenizePrompt(Model):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TemplatedChat(Model):
    """A conversation that is rendered, whatever for."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)
    ]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False  # templates write their own
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: Annotated[list[ChatTool], Field(fail_fast=True)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_continue(self) -> TemplatedChat:
        check_continuation(self)
        return self

    @property
    def offered(self) -> OfferedTools:
        defined = [tool.defined(f"tools[{index}]") for index, tool in enumerate(self.tools)]
        return offered(defined, None, is_parallel=True)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return self.chat_template_kwargs


class TokenizeChat(TemplatedChat):
    model: str | None = None
    return_token_strs: bool = False


class Detokenize(Model):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=_MAX_TOKENS, fail_fast=True)]
