"""The events of a response, one class each: `event["type"]` tells a type checker which it is.

Unknown events of a newer server are passed on unchanged.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from .objects import Item, Response, TextPart


class ResponseBegan(TypedDict):
    type: Literal["response.created", "response.queued", "response.in_progress"]
    sequence_number: int
    response: Response


class ItemChanged(TypedDict):
    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: Item


class PartChanged(TypedDict):
    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: TextPart


class TextDelta(TypedDict):
    type: Literal["response.output_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[dict[str, Any]]


class TextDone(TypedDict):
    type: Literal["response.output_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[dict[str, Any]]


class ReasoningDelta(TypedDict):
    type: Literal["response.reasoning_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDone(TypedDict):
    type: Literal["response.reasoning_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


class SummaryPart(TypedDict):
    """A thought begins or ends, where `reasoning.summary` was asked for."""

    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int
    part: dict[str, Any]


class SummaryDelta(TypedDict):
    type: Literal["response.reasoning_summary_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int
    delta: str


class SummaryDone(TypedDict):
    type: Literal["response.reasoning_summary_text.done"]
    sequence_number: int
    item_id: str
    output_index: int
    summary_index: int
    text: str


class ArgumentsDelta(TypedDict):
    type: Literal["response.function_call_arguments.delta", "response.custom_tool_call_input.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(TypedDict):
    type: Literal["response.function_call_arguments.done"]
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class InputDone(TypedDict):
    type: Literal["response.custom_tool_call_input.done"]
    sequence_number: int
    item_id: str
    output_index: int
    input: str


class ToolOutput(TypedDict):
    """What a tool returned; only from `run_tools`."""

    type: Literal["penstock.tool_output"]
    call_id: str
    name: str
    output: str


class ResponseEnded(TypedDict):
    """The terminal event; there is exactly one."""

    type: Literal["response.completed", "response.incomplete", "response.failed"]
    sequence_number: int
    response: Response


class Queued(TypedDict):
    """Only if requested with `penstock={"events": ["queue"]}`."""

    type: Literal["penstock.queue"]
    response_id: str
    position: int
    estimated_wait_ms: int


class Progress(TypedDict):
    """Only if requested with `penstock={"events": ["progress"]}`; fields by the stage."""

    type: Literal["penstock.progress"]
    response_id: str
    stage: Literal["queued", "preparing", "prefilling"]
    estimated_ms: NotRequired[int]
    position: NotRequired[int]
    resource: NotRequired[str]
    computed_tokens: NotRequired[int]
    cached_tokens: NotRequired[dict[Literal["device", "host"], int]]
    prompt_tokens: NotRequired[int]
    tokens_per_second: NotRequired[float]
    interpolated: NotRequired[bool]


class Parked(TypedDict):
    """Only if requested with `penstock={"events": ["preempted", "resumed"]}`."""

    type: Literal["penstock.preempted", "penstock.resumed"]
    response_id: str


ResponseEvent: TypeAlias = (
    ResponseBegan
    | ItemChanged
    | PartChanged
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryPart
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDone
    | ToolOutput
    | ResponseEnded
    | Queued
    | Progress
    | Parked
)
