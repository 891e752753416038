"""The pieces that request schemas are made of: strict models, bounded values, text and messages.

Not known here: endpoints and their parameters.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

_MAX_KEYS = 128  # of one object
_PART_KEYS = frozenset({"type", "text", "annotations", "logprobs"})


class Model(BaseModel):
    """Validation stops at a list's first fault and at an object with too many keys, so that a
    body made of faults costs no more than a good one."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound_keys(cls, value: Any) -> Any:
        return bounded(value, _MAX_KEYS)


def bounded(value: Any, max_keys: int) -> Any:
    if isinstance(value, dict) and len(value) > max_keys:
        raise PydanticCustomError("too_long", "at most {max} keys", {"max": max_keys})
    return value


def _text_of(content: Any) -> Any:
    """Content as one string; lists may hold text parts only."""
    if not isinstance(content, list):
        return content
    return "\n".join(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text"):
        raise PydanticCustomError(
            "unsupported_parameter", "content parts must be text, not {kind}", {"kind": repr(kind)}
        )
    unknown = sorted(set(part) - _PART_KEYS)
    if unknown:
        raise PydanticCustomError(
            "unknown_parameter", "a text part has no {name}", {"name": repr(unknown[0])}
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise PydanticCustomError("invalid_type", "a text part needs a string `text`")
    return text


def listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _supported_role(role: Any) -> Any:
    if role in ("tool", "function"):
        raise PydanticCustomError("unsupported_parameter", "this server does not support tools")
    return role


def _message_type(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "message":
        raise PydanticCustomError(
            "unsupported_parameter", "input items must be messages, not {kind}", {"kind": kind}
        )
    return kind


Text = Annotated[str, BeforeValidator(_text_of)]
Role = Annotated[
    Literal["system", "developer", "user", "assistant"], BeforeValidator(_supported_role)
]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
MaxTokens = Annotated[int, Field(ge=1)]


class Message(Model):
    """One turn of a conversation, of chat's `messages` and responses' `input` alike."""

    role: Role
    content: Text
    name: str | None = None
    # What a response's output carries when it is sent back as input.
    type: Annotated[Literal["message"], BeforeValidator(_message_type)] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if kind not in (None, "message"):
            return {"type": kind, "role": "user", "content": ""}  # refused by its type alone
        return {key: item for key, item in value.items() if item is not None and item != []}

    def for_template(self) -> dict[str, str]:
        """As chat templates know it: they have no developer."""
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.content, **named}
