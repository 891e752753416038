"""Messages of a conversation, in chat's `messages` and in responses' `input`, and the other items
of the latter: calls of tools, their outputs, thoughts and references.

`Message` is what both have; `ChatMessage` is chat's, with its tool calls and results.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import orjson
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from penstock.engine.chat_formats import CUSTOM_INPUT
from penstock.gateway.api.schema.model import Model, invalid
from penstock.gateway.storage.sealed_text import is_sealed

MAX_ITEMS = 4096  # messages or input items of a request
_MAX_CALLS = 128  # of a message
_MAX_ID_CHARS = 128
_MAX_ROLE_CHARS = 64
_TEXT_PARTS = ("text", "input_text", "output_text")
_IMAGE_PARTS = ("image_url", "input_image")
_MEDIA = ("image", "audio", "video", "file")  # in the names of parts that need more than a template
_DETAILS = ("auto", "low", "high", "original")


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a message's content.

    Attributes:
        url: as it was sent; not checked yet.
    """

    url: str


@dataclass(frozen=True, slots=True)
class TemplatePart:
    """A part with fields that only a chat template may know.

    Attributes:
        fields: as they were sent.
    """

    fields: dict[str, Any]


def _parts_of(content: Any) -> Any:
    """The texts and images of a message's content."""
    if not isinstance(content, list):
        return _texts_of(content)
    parts = [_typed(part) for part in content]
    return tuple(_image_part(part) or _part_text(part) for part in parts)


def _typed(part: Any) -> Any:
    """A part with its type, which clients leave out, or of a plain string. Fields that clients add
    have no effect."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or part.get("type") is not None:
        return part
    kind = next((name for name in ("text", "image_url") if name in part), None)
    return {**part, "type": kind}


def _image_part(part: Any) -> ImagePart | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in _IMAGE_PARTS:
        return None
    given = {key: value for key, value in part.items() if value is not None}
    if "file_id" in given:
        raise PydanticCustomError(
            "unsupported_parameter", "images by file_id are not supported; send a data URL"
        )
    image: Any = given.get("image_url")
    if isinstance(image, dict):  # chat's form
        given |= image
        image = image.get("url")
    if given.get("detail", "auto") not in _DETAILS:
        raise PydanticCustomError(
            "value_error",
            "an image's detail must be one of {names}",
            {"names": ", ".join(_DETAILS)},
        )
    if not isinstance(image, str):
        raise PydanticCustomError("invalid_type", "an image part needs a string `image_url`")
    return ImagePart(image)


def _texts_of(content: Any) -> Any:
    """The texts of a message's content; a list may hold only text parts."""
    if isinstance(content, str):
        return (content,)
    if isinstance(content, tuple):  # already validated: JSON has no tuples
        return content
    if not isinstance(content, list):
        raise PydanticCustomError(
            "invalid_type", "content must be a string or a list of text parts"
        )
    return tuple(_part_text(_typed(part)) for part in content)


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "refusal":
        part = {"type": "text", "text": part.get("refusal")}
    elif kind not in _TEXT_PARTS:
        raise PydanticCustomError(
            "unsupported_parameter", "content parts must be text, not {kind}", {"kind": repr(kind)}
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise PydanticCustomError("invalid_type", "a text part needs a string `text`")
    return text


def _chat_parts_of(content: Any) -> Any:
    """The parts of a content (`_parts_of`); a chat template may read further fields and kinds."""
    if not isinstance(content, list):
        return _texts_of(content)
    return tuple(
        _template_part(part) or _image_part(part) or _part_text(part)
        for part in map(_typed, content)
    )


def _template_part(part: Any) -> TemplatePart | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind == "refusal" or any(each in kind for each in _MEDIA):
        return None
    if kind in _TEXT_PARTS:
        if part.keys() <= {"type", "text"} or not isinstance(part.get("text"), str):
            return None
        kind = "text"
    return TemplatePart({**part, "type": kind})


class ImageUrlPart(Model):
    """What `_image_part` accepts; only the OpenAPI document uses it."""

    type: Literal["image_url", "input_image"]
    image_url: str | dict[str, Any]
    detail: Literal["auto", "low", "high", "original"] = "auto"


class TextPart(Model):
    """What `_texts_of` accepts as a part; only the OpenAPI document uses it."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = None


def _message_type(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "message":
        raise PydanticCustomError(
            "unsupported_parameter", "items must be messages, not {kind}", {"kind": kind}
        )
    return kind


def _given(value: Any) -> Any:
    """The fields that have a value."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if item is not None and item != []}


Texts = Annotated[
    tuple[str, ...], BeforeValidator(_texts_of, json_schema_input_type=str | list[TextPart])
]
Parts = Annotated[
    tuple[str | ImagePart, ...],
    BeforeValidator(_parts_of, json_schema_input_type=str | list[TextPart | ImageUrlPart]),
]
_ChatParts = Annotated[
    tuple[str | ImagePart | TemplatePart, ...],
    BeforeValidator(
        _chat_parts_of,
        json_schema_input_type=str | list[str | TextPart | ImageUrlPart | dict[str, Any]],
    ),
]
Role = Literal["system", "developer", "user", "assistant"]
# The template decides which other roles there are.
_ChatRole = Annotated[
    Annotated[str, Field(min_length=1, max_length=_MAX_ROLE_CHARS)],
    BeforeValidator(lambda role: "tool" if role == "function" else role),
]
_Status = Literal["in_progress", "completed", "incomplete"]
_CallId = Annotated[str, Field(min_length=1, max_length=_MAX_ID_CHARS)]
_OptionalCallId = Annotated[_CallId | None, BeforeValidator(lambda value: value or None)]
_ToolName = Annotated[str, Field(min_length=1, max_length=_MAX_ID_CHARS)]


class Message(Model):
    """One message of a conversation. Fields of others, which clients keep with it, are ignored.

    Attributes:
        content: the text of each part, or an image.
    """

    model_config = ConfigDict(extra="ignore")

    role: Role
    content: Parts
    name: str | None = None
    # Fields that a response's output has when it is sent back as input.
    type: Annotated[Literal["message"], BeforeValidator(_message_type)] = "message"
    id: str | None = None
    status: _Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    # What the model would have to see, but cannot.
    tool_calls: None = None
    tool_call_id: None = None
    function_call: None = None
    audio: None = None

    @field_validator("content")
    @classmethod
    def _check_images(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("role", "user") != "user" and any(isinstance(p, ImagePart) for p in value):
            raise PydanticCustomError("value_error", "only a user's message may have images")
        return value

    @property
    def images(self) -> list[tuple[int, ImagePart]]:
        """The images, with their numbers among the parts."""
        return [(at, part) for at, part in enumerate(self.content) if isinstance(part, ImagePart)]

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        kind = value.get("type")
        if kind not in (None, "message"):
            return {"type": kind, "role": "user", "content": ""}  # so only its type is refused
        content = {"content": ""} if value.get("content") == [] else {}
        return _given(value) | content


class _Lenient(Model):
    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, value: Any) -> Any:
        return _given(value)


def _as_text(arguments: Any) -> Any:
    """Arguments as JSON text, with spaces as models write it; some clients keep an object."""
    if not isinstance(arguments, dict):
        return arguments
    try:
        return json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        raise PydanticCustomError("value_error", "is nested too deeply") from None


_Arguments = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | dict[str, Any])]


class _Function(_Lenient):
    name: _ToolName
    arguments: _Arguments = ""


class _Custom(_Lenient):
    name: _ToolName
    input: str = ""


class ToolCall(_Lenient):
    """A call in an assistant's message."""

    id: _OptionalCallId = None
    type: Literal["function", "custom"] = "function"
    function: _Function | None = None
    custom: _Custom | None = None
    index: int | None = None  # left in by clients that collect streams

    @model_validator(mode="before")
    @classmethod
    def _from_langchain(cls, value: Any) -> Any:
        """Its messages' own form has name and `args` beside the id."""
        if not isinstance(value, dict) or value.get("type") != "tool_call" or "name" not in value:
            return value
        function = {"name": value["name"], "arguments": value.get("args")}
        return {"id": value.get("id"), "function": function}

    @model_validator(mode="after")
    def _check_kind(self) -> ToolCall:
        if getattr(self, self.type) is None:
            raise PydanticCustomError("missing", "a call needs `{kind}`", {"kind": self.type})
        return self

    def for_template(self) -> dict[str, Any]:
        if self.function is not None:
            return template_call(self.id or "", self.function.name, self.function.arguments)
        assert self.custom is not None
        return template_call(self.id or "", self.custom.name, custom_arguments(self.custom.input))


def _thoughts_of(value: Any) -> Any:
    """Thoughts as a text: some clients keep an object with it (LobeChat), or a list of these."""
    if isinstance(value, dict):
        texts = (value.get(name) for name in ("content", "text", "thinking", "reasoning"))
        return next((text for text in texts if isinstance(text, str) and text), None)
    if isinstance(value, list):
        texts = (
            each if isinstance(each, str) else _thoughts_of(each)
            for each in value
            if isinstance(each, str | dict)
        )
        return "".join(text for text in texts if text)
    return value


_ToolCalls = Annotated[list[ToolCall], Field(max_length=_MAX_CALLS, fail_fast=True)]
_OF_RESPONSES = frozenset({"type", "id", "status", "phase"})


class ChatMessage(Message):
    """A message of chat completions.

    Attributes:
        reasoning: the assistant's thoughts, by any of the names that clients send.
    """

    # Wider than those of a message of responses.
    role: _ChatRole  # type: ignore[assignment]
    content: _ChatParts  # type: ignore[assignment]
    tool_calls: _ToolCalls = Field(default_factory=list)  # type: ignore[assignment]
    tool_call_id: _OptionalCallId = None  # type: ignore[assignment]
    reasoning: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # A client's store has its own values of these.
        fields = {name: item for name, item in value.items() if name not in _OF_RESPONSES}
        content = fields.get("content")
        thought = fields.pop("reasoning_content", None)
        if fields.get("role") != "assistant":
            fields.pop("reasoning", None)
            fields.pop("refusal", None)
        else:
            fields["reasoning"] = _thoughts_of(fields.get("reasoning")) or _thoughts_of(thought)
            call = fields.get("function_call")
            if isinstance(call, dict):  # the older form of one call
                fields |= {"function_call": None}
                fields["tool_calls"] = fields.get("tool_calls") or [{"function": call}]
        if content in (None, []):
            if fields.get("role") == "assistant":
                fields["content"] = fields.get("refusal") or ""
            elif content is not None or fields.get("role") == "tool":
                fields["content"] = ""
        return fields

    @field_validator("tool_calls", "tool_call_id")
    @classmethod
    def _check_role(cls, value: Any, info: ValidationInfo) -> Any:
        needed = "tool" if info.field_name == "tool_call_id" else "assistant"
        if info.data.get("role", needed) != needed:
            raise PydanticCustomError(
                "value_error", "only a message of the role {role} may have it", {"role": needed}
            )
        return value

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it."""
        message = template_message(self.role, self.content, self.name)
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        return message


def template_message(
    role: str, parts: Sequence[str | ImagePart | TemplatePart], name: str | None = None
) -> dict[str, Any]:
    """A message as chat templates expect it: one text, or the parts where some are more than text,
    and `system` instead of `developer`."""
    named = {} if name is None else {"name": name}
    known_role = "system" if role == "developer" else role
    texts = [part for part in parts if isinstance(part, str)]
    content: str | list[dict[str, Any]] = "\n".join(texts)
    if len(texts) < len(parts):
        content = [_for_template(part) for part in parts]
    return {"role": known_role, "content": content, **named}


def _for_template(part: str | ImagePart | TemplatePart) -> dict[str, Any]:
    if isinstance(part, TemplatePart):
        return part.fields
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}


def template_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call as chat templates expect it."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def custom_arguments(text: str) -> str:
    """The input of a custom tool as the arguments that the model sees."""
    return orjson.dumps({CUSTOM_INPUT: text}).decode()


# -- items of responses --------------------------------------------------------------------------


class _Item(_Lenient):
    id: str | None = None
    status: _Status | None = None


class FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: _CallId
    name: _ToolName
    arguments: _Arguments = ""
    namespace: str | None = None


class CustomToolCall(_Item):
    type: Literal["custom_tool_call"]
    call_id: _CallId
    name: _ToolName
    input: str = ""
    namespace: str | None = None


class CallOutput(_Item):
    """What a tool returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: _CallId
    output: Texts = ("",)
    name: str | None = None


class _Summary(Model):
    type: Literal["summary_text"] = "summary_text"
    text: str


class _Thought(Model):
    type: Literal["reasoning_text", "text"] = "reasoning_text"
    text: str


class Reasoning(_Item):
    type: Literal["reasoning"]
    summary: list[_Summary] = Field(default_factory=list)
    content: list[_Thought] = Field(default_factory=list)
    encrypted_content: str | None = None


class Compaction(_Item):
    """What `/v1/responses/compact` made of a conversation."""

    type: Literal["compaction"]
    encrypted_content: str

    @field_validator("encrypted_content")
    @classmethod
    def _check_content(cls, value: str) -> str:
        if not is_sealed(value):
            raise PydanticCustomError("value_error", "was not made by this server")
        return value


class CompactionTrigger(_Item):
    """That the conversation is to be compacted; the last item."""

    type: Literal["compaction_trigger"]


class ItemReference(_Item):
    """An item that is stored, by its id."""

    type: Literal["item_reference"]
    id: str


_KINDS = {
    "message": "message",
    "function_call": "call",
    "custom_tool_call": "custom",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "reasoning": "reasoning",
    "compaction": "compaction",
    "compaction_trigger": "trigger",
    "item_reference": "reference",
}


def _kind_of(value: Any) -> str | None:
    """The tag of an item's model. Tags are no identifiers, which keeps them out of `param`."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    if kind is None and isinstance(value, dict) and "role" not in value and "id" in value:
        value["type"] = kind = "item_reference"  # OpenAI's type is optional here
    return f"<{_KINDS.get(kind, 'message') if isinstance(kind, str) else 'message'}>"


InputItem = Annotated[
    Annotated[Message, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<call>")]
    | Annotated[CustomToolCall, Tag("<custom>")]
    | Annotated[CallOutput, Tag("<output>")]
    | Annotated[Reasoning, Tag("<reasoning>")]
    | Annotated[Compaction, Tag("<compaction>")]
    | Annotated[CompactionTrigger, Tag("<trigger>")]
    | Annotated[ItemReference, Tag("<reference>")],
    Discriminator(_kind_of),
]


class _Continuable(Protocol):
    """A conversation to render."""

    @property
    def continue_final_message(self) -> bool: ...
    @property
    def add_generation_prompt(self) -> bool: ...
    @property
    def model_fields_set(self) -> set[str]: ...


def check_continuation(asked: _Continuable) -> None:
    """
    Raises:
        RequestRefusedError: the prompt is to end both inside the last message and after it.
    """
    is_sent = "add_generation_prompt" in asked.model_fields_set
    if asked.continue_final_message and is_sent and asked.add_generation_prompt:
        raise invalid("continue_final_message", "needs add_generation_prompt to be false")
