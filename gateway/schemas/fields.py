"""The pieces that request schemas are made of: strict models, bounded values, text and messages.

Not known here: endpoints and their parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

_MAX_KEYS = 128  # of one object
_MAX_METADATA = 16
_MAX_METADATA_KEY_CHARS = 64
_MAX_METADATA_CHARS = 512
_MAX_INCLUDES = 32
_MAX_ID_CHARS = 128
_PART_KEYS = frozenset({"type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"})


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


def _texts_of(content: Any) -> Any:
    """Content as its texts; lists may hold text parts only."""
    if isinstance(content, str):
        return (content,)
    if isinstance(content, tuple):  # texts already, which no JSON is
        return content
    if not isinstance(content, list):
        raise PydanticCustomError(
            "invalid_type", "content must be a string or a list of text parts"
        )
    return tuple(_part_text(part) for part in content)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text"):
        raise PydanticCustomError(
            "unsupported_parameter", "content parts must be text, not {kind}", {"kind": repr(kind)}
        )
    unknown = sorted({key for key, value in part.items() if value is not None} - _PART_KEYS)
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


def _id_of(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    unknown = sorted(set(value) - {"id"}, key=str)
    if unknown:
        raise PydanticCustomError(
            "unknown_parameter", "a conversation has no {name}", {"name": repr(unknown[0])}
        )
    if "id" not in value:
        raise PydanticCustomError("missing", "a conversation is named by its id")
    return value["id"]


class TextPart(Model):
    """How `_texts_of` takes a part: for the description of the API alone."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


class ConversationName(Model):
    """How `_id_of` takes a conversation; as `TextPart`."""

    id: Annotated[str, Field(max_length=_MAX_ID_CHARS)]


Texts = Annotated[
    tuple[str, ...], BeforeValidator(_texts_of, json_schema_input_type=str | list[TextPart])
]
Role = Annotated[
    Literal["system", "developer", "user", "assistant"], BeforeValidator(_supported_role)
]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenIds = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
MaxTokens = Annotated[int, Field(ge=1)]
NumKept = Annotated[int, Field(ge=1)]
# OpenAI's limits.
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=_MAX_METADATA_KEY_CHARS)],
        Annotated[str, Field(max_length=_MAX_METADATA_CHARS)],
    ],
    BeforeValidator(lambda value: bounded(value, _MAX_METADATA)),
]
ConversationId = Annotated[
    str,
    Field(max_length=_MAX_ID_CHARS),
    BeforeValidator(_id_of, json_schema_input_type=str | ConversationName),
]
Includable = Literal[
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
Includes = Annotated[list[Includable], Field(max_length=_MAX_INCLUDES, fail_fast=True)]


class Message(Model):
    """One message of a conversation, of chat's `messages` and responses' `input` alike.

    Attributes:
        content: the text of each part.
    """

    role: Role
    content: Texts
    name: str | None = None
    # What a response's output carries when it is sent back as input.
    type: Annotated[Literal["message"], BeforeValidator(_message_type)] = "message"
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None

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
        """As chat templates know it."""
        return template_message(self.role, self.content, self.name)


def template_message(role: str, texts: Sequence[str], name: str | None = None) -> dict[str, str]:
    """A message as chat templates know it: of one text, and there is no developer."""
    named = {} if name is None else {"name": name}
    known_role = "system" if role == "developer" else role
    return {"role": known_role, "content": "\n".join(texts), **named}
