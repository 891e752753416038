"""The parameters of requests. The server has the complete list, and refuses unknown ones by name;
`extra_body` takes those that are missing here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict

from .images import with_images
from .objects import Role


class _Message(TypedDict):
    role: Role
    # Of a list: parts, texts, and images as paths, bytes of a file or Pillow's.
    content: str | Sequence[Any]


class Message(_Message, total=False):
    """One message of the input."""

    type: Literal["message"]


# Messages, or items that an answer had: calls and their outputs, thoughts, references.
Messages: TypeAlias = Sequence[Message | Mapping[str, Any]]


Extensions = TypedDict(
    "Extensions",
    {
        "speculation": bool,
        "continue": bool,  # of responses; so are all `events` but `progress`
        "events": Sequence[Literal["progress", "queue", "preempted", "resumed"]],
    },
    total=False,
)


class PredictedPart(TypedDict):
    type: Literal["text"]
    text: str


class Prediction(TypedDict):
    """What an output may be. It changes no token, only the time."""

    type: Literal["content"]
    content: str | Sequence[PredictedPart]


class SamplingParams(TypedDict, total=False):
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    top_n_sigma: float
    seed: int
    stop: str | Sequence[str]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    thinking_token_budget: int
    ignore_eos: bool
    min_tokens: int
    priority: int
    cache_salt: str
    structured_outputs: Mapping[str, Any]
    prediction: Prediction
    penstock: Extensions
    extra_body: Mapping[str, Any]


class ResponseParams(SamplingParams, total=False):
    instructions: str
    max_output_tokens: int
    metadata: Mapping[str, str]
    previous_response_id: str | None
    conversation: str
    store: bool
    text: Mapping[str, Any]
    background: bool
    include: Sequence[str]
    top_logprobs: int
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    reasoning: Mapping[str, Any] | None


class ToolResponseParams(ResponseParams, total=False):
    tools: Sequence[Mapping[str, Any]]


class ChatParams(SamplingParams, total=False):
    max_tokens: int
    max_completion_tokens: int
    n: int
    logprobs: bool
    top_logprobs: int
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    reasoning_effort: str
    stream_options: Mapping[str, bool]


def body_of(params: Mapping[str, Any], **more: object) -> dict[str, Any]:
    """The body of a request, without parameters that are None."""
    everything = {**params, **(params.get("extra_body") or {}), **more}
    everything.pop("extra_body", None)
    for name in {"messages", "input"} & everything.keys():
        everything[name] = with_images(everything[name], is_chat=name == "messages")
    return {name: value for name, value in everything.items() if value is not None}
