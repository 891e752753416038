"""The objects of the API, as in the server's JSON. Unknown fields are kept."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

Role = Literal["user", "assistant", "system", "developer"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]


class _Model(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    quantization: str
    weight_bytes: int


class Model(_Model, total=False):
    # Of the server's page and `penstock chat`: the model's own or, where it has none, some that
    # suit most models. Older servers do not say.
    chat_sampling: dict[str, float]


class ModelList(TypedDict):
    object: str
    data: list[Model]


class PoolingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int


class Embedding(TypedDict):
    object: str
    index: int
    embedding: list[float] | str  # base64 of float32, if it was asked for


class EmbeddingList(TypedDict):
    object: str
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class RankedDocument(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[dict[str, str]]


class Ranking(TypedDict):
    id: str
    model: str
    usage: PoolingUsage
    results: list[RankedDocument]


class Score(TypedDict):
    index: int
    object: str
    score: float


class ScoreList(TypedDict):
    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class TextPart(TypedDict):
    type: str
    text: str
    annotations: list[Any]
    logprobs: list[dict[str, Any]]


class Item(TypedDict):
    """A message of the input or of the answer. Items of other types, which a newer server may send,
    have other fields than `id` and `type`."""

    id: str
    type: str
    role: Role
    status: str
    content: list[TextPart]
    call_id: NotRequired[str]  # of a tool call, with the next two
    name: NotRequired[str]
    arguments: NotRequired[str]


class ItemPage(TypedDict):
    object: str
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensDetails(TypedDict):
    cached_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    total_tokens: int


class ErrorInfo(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: str


class ConversationRef(TypedDict):
    id: str


class Response(TypedDict):
    """The main fields; the request's parameters are echoed as further ones. The client adds
    `output_parsed` where a `text_format` was given."""

    id: str
    object: str
    created_at: int
    completed_at: int | None
    status: Status
    model: str
    output: list[Item]
    usage: ResponseUsage | None
    error: ErrorInfo | None
    incomplete_details: IncompleteDetails | None
    previous_response_id: str | None
    conversation: ConversationRef | None
    metadata: dict[str, str]
    output_parsed: NotRequired[Any]


class Steer(TypedDict):
    """Input for a response that runs, and what became of it: `committed` (the successor has it),
    `pending` (the next request that continues the response gets it) or `failed`."""

    id: str
    object: Literal["response.steer"]
    previous_response_id: str
    status: Literal["accepted", "committed", "pending", "failed"]
    successor_id: NotRequired[str]
    error: NotRequired[ErrorInfo]


class Deleted(TypedDict):
    id: str
    object: str
    deleted: bool


class Conversation(TypedDict):
    """`used_at`: seconds of the epoch, of the last turn."""

    id: str
    object: str
    created_at: int
    used_at: int
    pinned: NotRequired[bool]
    metadata: dict[str, str]


class ConversationPage(TypedDict):
    object: str
    data: list[Conversation]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FoundConversation(TypedDict):
    """`turn`: where the words are; None: in the title."""

    conversation: Conversation
    turn: str | None
    excerpt: str


class FoundConversations(TypedDict):
    object: str
    data: list[FoundConversation]
    has_more: bool


class Turn(TypedDict):
    """`items` (what came in) and `output` are there where the tree was asked for them."""

    turn: str
    parent: str | None
    status: Status
    response_id: str | None
    created_at: int
    items: NotRequired[list[Item]]
    output: NotRequired[Item | list[Item] | None]


class ConversationTree(TypedDict):
    object: str
    conversation_id: str
    head: str | None
    running: str | None
    data: list[Turn]


class ConversationHead(TypedDict):
    object: str
    conversation_id: str
    turn: str | None


class ChatMessage(TypedDict):
    """The client adds `parsed` where a `response_format` was to be parsed. Thoughts are there where
    the model has any."""

    role: Role
    content: str
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    parsed: NotRequired[Any]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    finish_reason: str | None
    logprobs: dict[str, Any] | None


class CompletionTokensDetails(TypedDict, total=False):
    """The two of predictions are there where one was given."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ChatUsage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class ChatCompletion(TypedDict):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage


class ChatDelta(TypedDict, total=False):
    role: Role
    content: str | None
    reasoning_content: str | None
    reasoning: str | None


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    finish_reason: str | None
    logprobs: dict[str, Any] | None


class ChatChunk(TypedDict):
    """`choices` is empty in the chunk with the usage."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: ChatUsage | None


def output_text(response: Response) -> str:
    """All text of a response's messages."""
    messages = [item for item in response["output"] if item["type"] == "message"]
    return "".join(part["text"] for message in messages for part in message["content"])
