"""The wire types of requests: the only pydantic in the project.

A body becomes a typed, frozen request here, or a `RequestRefusedError` that names the parameter
at fault (`messages[0].content`). Which parameters exist at all is `parameters`' business; what a
request then does is the endpoints'.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from penstock.engine.request import MAX_LOGPROBS
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.parameters import Endpoint, honoured

MAX_PROMPTS = 128  # of one completions request
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's, and vLLM's
_MAX_STOPS = 16
_MAX_STOP_CHARS = 1024
_MAX_LOGIT_BIAS = 1024
_MAX_ITEMS = 4096  # messages or input items
_MAX_DIAGNOSED_BYTES = 64 << 10
_MAX_KEYS = 128  # of one object
_MAX_METADATA = 16  # OpenAI's limit
_MAX_INCLUDES = 32
_PART_KEYS = frozenset({"type", "text", "annotations", "logprobs"})
# OpenAI's fields of messages and items that ask for what is not built; others are unknown.
_UNSUPPORTED_FIELDS = frozenset(
    {"tool_calls", "function_call", "tool_call_id", "audio", "refusal", "logprobs"}
)


class _Model(BaseModel):
    """Validation stops at a list's first fault and at an object with too many keys, so that a
    body made of faults costs no more than a good one."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _bound_keys(cls, value: Any) -> Any:
        return _bounded(value, _MAX_KEYS)


def _bounded(value: Any, max_keys: int) -> Any:
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


def _listed(value: Any) -> Any:
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


class Message(_Model):
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


class StreamOptions(_Model):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class SamplingRequest(_Model):
    """What all three endpoints share. Absent values take the model's defaults, then OpenAI's.

    Attributes:
        continues_prompt: the output is the prompt's next words, not a text of its own.
    """

    continues_prompt: ClassVar[bool] = False

    model: str | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[
        dict[Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
        BeforeValidator(lambda value: _bounded(value, _MAX_LOGIT_BIAS)),
    ] = {}
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARS)]],
        Field(max_length=_MAX_STOPS, fail_fast=True),
        BeforeValidator(_listed),
    ] = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MAX_LOGIT_BIAS, fail_fast=True)] = []
    min_tokens: Annotated[int, Field(ge=0)] = 0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @property
    def output_limit(self) -> int | None:
        """Output tokens asked for at most, under whatever name the endpoint has for it."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """None, or how many alternatives to report beside each token."""
        raise NotImplementedError


class _TemplateRequest(SamplingRequest):
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}


class ChatRequest(_TemplateRequest):
    messages: Annotated[list[Message], Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream_options: StreamOptions = StreamOptions()
    add_generation_prompt: bool = True
    add_special_tokens: bool = False

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise RequestRefusedError(
                "top_logprobs needs logprobs to be true", code="invalid_value", param="top_logprobs"
            )
        return self

    @property
    def output_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(SamplingRequest):
    continues_prompt: ClassVar[bool] = True

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    max_tokens: MaxTokens | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream_options: StreamOptions = StreamOptions()
    add_special_tokens: bool = True

    @property
    def prompts(self) -> Sequence[str | Sequence[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens or _DEFAULT_COMPLETION_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


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


class ResponsesRequest(_TemplateRequest):
    input: (
        str | Annotated[list[Message], Field(min_length=1, max_length=_MAX_ITEMS, fail_fast=True)]
    )
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    metadata: Annotated[
        dict[str, str], BeforeValidator(lambda value: _bounded(value, _MAX_METADATA))
    ] = {}
    previous_response_id: str | None = None
    store: bool = True
    include: Annotated[list[_Includable], Field(max_length=_MAX_INCLUDES, fail_fast=True)] = []
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @property
    def items(self) -> list[Message]:
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input)]
        return self.input

    @property
    def output_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        wants = "message.output_text.logprobs" in self.include or bool(self.top_logprobs)
        return (self.top_logprobs or 0) if wants else None


_Request = TypeVar("_Request", ChatRequest, CompletionRequest, ResponsesRequest)
_ENDPOINTS: Mapping[type[SamplingRequest], Endpoint] = {
    ChatRequest: Endpoint.CHAT,
    CompletionRequest: Endpoint.COMPLETIONS,
    ResponsesRequest: Endpoint.RESPONSES,
}


def parse_json(data: bytes | str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        RequestRefusedError: it is not UTF-8, not JSON (NaN and Infinity are not), or no object.
    """
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        param = _parameter_that_is_no_number(data)
        if param is not None:
            raise RequestRefusedError(
                f"{param}: NaN and Infinity are no JSON numbers", code="invalid_value", param=param
            ) from error
        raise RequestRefusedError(f"not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestRefusedError("the body must be a JSON object", code="invalid_json")
    return body


def _parameter_that_is_no_number(data: bytes | str) -> str | None:
    """The parameter whose value is NaN or Infinity, if that is what is wrong with a small body:
    Python's own JSON writes them."""
    if len(data) > _MAX_DIAGNOSED_BYTES:
        return None
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    values = body.items() if isinstance(body, dict) else ()
    return next((k for k, v in values if isinstance(v, float) and not math.isfinite(v)), None)


def parse_request(kind: type[_Request], body: Mapping[str, Any]) -> _Request:
    """A typed request out of a JSON object.

    Raises:
        RequestRefusedError: a parameter is unknown, unsupported, missing or wrong.
    """
    try:
        return kind.model_validate(honoured(_ENDPOINTS[kind], body))
    except ValidationError as error:
        raise _refusal(_most_telling(error.errors(include_url=False))) from error


def _most_telling(details: Sequence[ErrorDetails]) -> ErrorDetails:
    """Of a union every arm complains: the one that got furthest was meant."""
    first = details[0]["loc"][:1]
    return max(
        (detail for detail in details if detail["loc"][:1] == first),
        key=lambda detail: (
            len(detail["loc"]),
            [part for part in detail["loc"] if isinstance(part, int)],
            not detail["type"].endswith("_type"),
        ),
    )


def _refusal(detail: ErrorDetails) -> RequestRefusedError:
    param = _path(detail["loc"])
    kind = detail["type"]
    if kind == "extra_forbidden":
        is_known = detail["loc"][-1] in _UNSUPPORTED_FIELDS
        code = "unsupported_parameter" if is_known else "unknown_parameter"
        message = f"{'unsupported' if is_known else 'unknown'} parameter: {param!r}"
        return RequestRefusedError(message, code=code, param=param)
    if kind == "missing":
        code = "missing_required_parameter"
    elif kind in ("unknown_parameter", "unsupported_parameter", "invalid_type"):
        code = kind
    else:
        code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    return RequestRefusedError(f"{param}: {detail['msg']}", code=code, param=param or None)


def _path(location: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`, without pydantic's names for the
    arms of a union."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part != "str":
            path += f".{part}" if path else part
    return path
