"""Messages of Anthropic's API and the blocks of their contents.

What is in a request for Anthropic's own servers (`cache_control`, `citations`, a block's `caller`)
has no effect. Blocks of tools that a server runs, and documents, are refused by their type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from penstock.gateway.api.schema.messages import MAX_ITEMS
from penstock.gateway.api.schema.model import Model

_MAX_ID_CHARS = 256
_NEEDS = {
    "document": "documents are not supported; send their text",
    "search_result": "search results are not supported; send their text",
}


class _Lenient(Model):
    model_config = ConfigDict(extra="ignore")


_Id = Annotated[str, Field(min_length=1, max_length=_MAX_ID_CHARS)]


class TextBlock(_Lenient):
    type: Literal["text"] = "text"
    text: str


class Base64Source(_Lenient):
    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str

    @property
    def as_url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(_Lenient):
    type: Literal["url"]
    url: str

    @property
    def as_url(self) -> str:
        return self.url


def _tag_of(value: Any) -> str | None:
    """The tag of a model by its `type`. Tags are no identifiers: they are not in `param`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if isinstance(kind, str) else None


def _known_source(value: Any) -> Any:
    if isinstance(value, dict) and value.get("type") == "file":
        raise PydanticCustomError(
            "unsupported_parameter", "images by file_id are not supported; send them as base64"
        )
    return value


_Source = Annotated[
    Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
    Discriminator(_tag_of),
    BeforeValidator(_known_source),
]


class ImageBlock(_Lenient):
    type: Literal["image"]
    source: _Source


class ToolReference(_Lenient):
    """A tool that a search for tools has found. All tools are shown at once, so it is its name."""

    type: Literal["tool_reference"]
    tool_name: str


class ThinkingBlock(_Lenient):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinking(_Lenient):
    """A thought that only the server which made it can read."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUse(_Lenient):
    type: Literal["tool_use"]
    id: _Id
    name: Annotated[str, Field(min_length=1, max_length=_MAX_ID_CHARS)]
    input: dict[str, Any] = Field(default_factory=dict)


def _refused(where: str, allowed: Sequence[str]) -> BeforeValidator:
    """Refuses a block whose type is not known in this place, and reads a text as a block."""

    def check(value: Any) -> Any:
        if isinstance(value, str):
            return {"type": "text", "text": value}
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in allowed:
            why = _NEEDS.get(kind, f"{where} may have {', '.join(allowed)} here, not {kind!r}")
            raise PydanticCustomError("unsupported_parameter", "{why}", {"why": why})
        return value

    return BeforeValidator(check)


def _listed(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _tool_change(value: Any) -> Any:
    tool = value.get("tool") if isinstance(value, dict) else None
    if isinstance(tool, dict) and "definition" in tool:
        raise PydanticCustomError(
            "unsupported_parameter", "tools are defined in `tools`, not between messages"
        )
    return value


class ToolChange(_Lenient):
    """That a tool is offered, or no longer, from here on. All of `tools` are offered anyway: to
    show others now and then would change the beginning of the prompt."""

    type: Literal["tool_addition", "tool_removal"]


Texts = Annotated[
    list[Annotated[TextBlock, _refused("a system message", ("text",))]],
    Field(max_length=MAX_ITEMS, fail_fast=True),
    BeforeValidator(_listed, json_schema_input_type=str | list[TextBlock]),
]
_ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ToolReference, Tag("<tool_reference>")],
    Discriminator(_tag_of),
    _refused("a tool's result", ("text", "image", "tool_reference")),
]
_Result = Annotated[
    list[_ResultBlock],
    Field(max_length=MAX_ITEMS, fail_fast=True),
    BeforeValidator(_listed, json_schema_input_type=str | list[_ResultBlock]),
]


class ToolResult(_Lenient):
    type: Literal["tool_result"]
    tool_use_id: _Id
    content: _Result = Field(default_factory=list)
    is_error: bool = False

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: item for name, item in value.items() if item is not None}


_UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ToolResult, Tag("<tool_result>")],
    Discriminator(_tag_of),
    _refused("a user's message", ("text", "image", "tool_result")),
]
_AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinking, Tag("<redacted_thinking>")]
    | Annotated[ToolUse, Tag("<tool_use>")],
    Discriminator(_tag_of),
    _refused("the assistant's message", ("text", "thinking", "redacted_thinking", "tool_use")),
]


_SystemBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolChange, Tag("<tool_addition>")]
    | Annotated[ToolChange, Tag("<tool_removal>")],
    Discriminator(_tag_of),
    BeforeValidator(_tool_change),
    _refused("a system message", ("text", "tool_addition", "tool_removal")),
]


class SystemMessage(_Lenient):
    """
    Attributes:
        clear_at: `next_user_message`: it is not shown once there is one.
    """

    role: Literal["system"]
    content: Annotated[
        list[_SystemBlock],
        Field(max_length=MAX_ITEMS, fail_fast=True),
        BeforeValidator(_listed, json_schema_input_type=str | list[_SystemBlock]),
    ] = Field(default_factory=list)
    clear_at: Literal["next_user_message", "never"] | None = None


class UserMessage(_Lenient):
    role: Literal["user"]
    content: Annotated[
        list[_UserBlock],
        Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True),
        BeforeValidator(_listed, json_schema_input_type=str | list[_UserBlock]),
    ]


class AssistantMessage(_Lenient):
    role: Literal["assistant"]
    content: Annotated[
        list[_AssistantBlock],
        Field(max_length=MAX_ITEMS, fail_fast=True),
        BeforeValidator(_listed, json_schema_input_type=str | list[_AssistantBlock]),
    ]


def _role_of(value: Any) -> str | None:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return f"<{role}>" if isinstance(role, str) else None


AnyMessage = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    Discriminator(
        _role_of,
        custom_error_type="wrong_role",
        custom_error_message="`role` must be user, assistant or system",
    ),
]
