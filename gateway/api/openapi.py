"""The project's own OpenAPI document: a table of operations, the schemas that parse requests, and
exact schemas of answers, which a test checks answers against.

It describes parameters as the server accepts them: null for all of them, and for refused ones only
the values without effect (`parameters`). It leaves out the WebSocket at `/v1/responses`
(PROTOCOL.md) and the events of streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.json_schema import models_json_schema

from penstock.engine.request import FinishReason
from penstock.gateway.api.chat.schema import ChatRequest
from penstock.gateway.api.completions.schema import CompletionRequest
from penstock.gateway.api.conversations.schema import (
    ConversationUpdate,
    NewConversation,
    NewHead,
    NewItems,
)
from penstock.gateway.api.items import IncludeQuery, ItemsQuery, PageQuery
from penstock.gateway.api.responses.schema import ResponsesRequest
from penstock.gateway.api.schema.fields import Model, SamplingRequest
from penstock.gateway.api.schema.parameters import UNREAD, Unread, Use
from penstock.gateway.api.tokens.schema import Detokenize, TokenizeChat, TokenizePrompt

_STATUSES = {
    400: "A parameter is unknown, unsupported, missing or invalid, or the HTTP is malformed.",
    401: "The API key is missing or invalid.",
    403: "Requests with this Host or Origin are not allowed.",
    404: "The resource does not exist, has expired, or belongs to another tenant.",
    405: "This path does not support the method.",
    408: "The request's header or body took too long to arrive.",
    409: "Another turn is running on the conversation's head, or the head has moved.",
    413: "The request body is too large.",
    429: "The tenant's rate limit is reached; Retry-After says when to retry.",
    431: "The request header is too large.",
    500: "The engine failed on this request, or the server has a bug.",
    503: "The queue is full, or the engine or the session store is unavailable; Retry-After says "
    "when to retry.",
}
_ALWAYS = (400, 403, 405, 408, 431, 503)
_KEYED = (401, 500)  # paths that need an API key
_WITH_BODY = (413,)
Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}
_NULL: Schema = {"type": "null"}
_ANYTHING: Schema = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """One method of one path.

    Attributes:
        answer: name of the schema of a 200; empty: plain text.
        body: schemas of the request body, of which one applies.
        query: schema of the query string.
        statuses: failures beside those that every operation has.
        streams: whether it may answer with server-sent events.
        example: an example of a body.
    """

    summary: str
    answer: str = ""
    body: tuple[type[Model], ...] = ()
    query: type[Model] | None = None
    statuses: tuple[int, ...] = ()
    streams: bool = False
    example: dict[str, Any] | None = None


def _one(summary: str, answer: str, *statuses: int, **more: Any) -> _Operation:
    """An operation on a resource that may not exist."""
    return _Operation(summary=summary, answer=answer, statuses=(404, *statuses), **more)


def _generate(summary: str, answer: str, body: type[Model], example: dict[str, Any]) -> _Operation:
    return _Operation(
        summary=summary,
        answer=answer,
        body=(body,),
        statuses=(404, 409, 429),
        streams=True,
        example=example,
    )


_RESPONSE, _CONVERSATION = "/v1/responses/{response_id}", "/v1/conversations/{conversation_id}"
_ITEMS = f"{_CONVERSATION}/items"
_OPERATIONS: dict[tuple[str, str], _Operation] = {
    ("post", "/v1/chat/completions"): _generate(
        "Create a chat completion.",
        "ChatCompletion",
        ChatRequest,
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
    ),
    ("post", "/v1/completions"): _generate(
        "Create a completion of one or several prompts.",
        "Completion",
        CompletionRequest,
        {"prompt": ["Once upon", "There was"], "max_tokens": 16, "logprobs": 1},
    ),
    ("post", "/v1/responses"): _generate(
        "Create a response.",
        "Response",
        ResponsesRequest,
        {"input": "Hello", "max_output_tokens": 16},
    ),
    ("get", _RESPONSE): _one(
        "Retrieve a response, or stream its events.", "Response", streams=True
    ),
    ("delete", _RESPONSE): _one("Delete a response.", "Deleted", 409),
    ("post", f"{_RESPONSE}/cancel"): _one("Cancel a response.", "Response"),
    ("get", f"{_RESPONSE}/input_items"): _one(
        "List the input items of a response.", "Items", query=ItemsQuery
    ),
    ("post", "/v1/conversations"): _Operation(
        summary="Create a conversation.", answer="Conversation", body=(NewConversation,)
    ),
    ("get", "/v1/conversations"): _one(
        "List the tenant's conversations.", "Conversations", query=PageQuery
    ),
    ("get", _CONVERSATION): _one("Retrieve a conversation.", "Conversation"),
    ("post", _CONVERSATION): _one(
        "Update a conversation's metadata.", "Conversation", body=(ConversationUpdate,)
    ),
    ("delete", _CONVERSATION): _one("Delete a conversation.", "Deleted", 409),
    ("get", f"{_CONVERSATION}/tree"): _one("List a conversation's turns.", "Tree"),
    ("post", f"{_CONVERSATION}/head"): _one(
        "Move a conversation's head to another turn.", "Head", 409, body=(NewHead,)
    ),
    ("get", _ITEMS): _one("List a conversation's items.", "Items", query=ItemsQuery),
    ("post", _ITEMS): _one(
        "Add items to a conversation.", "Items", 409, body=(NewItems,), query=IncludeQuery
    ),
    ("get", f"{_ITEMS}/{{item_id}}"): _one("Retrieve an item.", "Item", query=IncludeQuery),
    ("delete", f"{_ITEMS}/{{item_id}}"): _one("Delete an item.", "Conversation", 409),
    ("post", "/v1/tickets"): _Operation(
        summary="Create a ticket that opens one WebSocket.", answer="Ticket"
    ),
    ("get", "/v1/models"): _Operation(summary="List the model's names.", answer="Models"),
    ("get", "/v1/models/{model}"): _one("Retrieve the model.", "Model"),
    ("post", "/tokenize"): _one(
        "Tokenize a text or a chat.", "Tokens", body=(TokenizePrompt, TokenizeChat)
    ),
    ("post", "/detokenize"): _one("Convert token ids to text.", "Text", body=(Detokenize,)),
    ("get", "/health"): _Operation(summary="Check whether the engine is up.", answer="Status"),
    ("get", "/ready"): _Operation(
        summary="Check whether requests would be served.", answer="Status"
    ),
    ("get", "/metrics"): _Operation(summary="Metrics for Prometheus."),
    ("get", "/openapi.json"): _Operation(summary="This document.", answer="Document"),
}
# OpenAPI links: which parameters of other paths an operation's answer supplies.
_LINKS = {
    ("post", "/v1/responses"): {"response_id": "$response.body#/id"},
    ("post", "/v1/conversations"): {"conversation_id": "$response.body#/id"},
    ("post", _ITEMS): {
        "conversation_id": "$request.path.conversation_id",
        "item_id": "$response.body#/first_id",
    },
}
_EVENT: Schema = {
    "type": "object",
    "description": "One event of many. Streams of chat completions and completions end with "
    "`[DONE]` as data.",
    "properties": {"event": STRING, "data": STRING},
    "required": ["data"],
}
_STREAMING_QUERY: tuple[tuple[str, Schema, str], ...] = (
    ("stream", {"enum": ["true", "false"]}, "Stream events instead of the whole response."),
    ("starting_after", INTEGER, "Only events with a higher sequence number; needs stream."),
)


def document(model_names: Sequence[str]) -> dict[str, Any]:
    """The document, as JSON.

    Args:
        model_names: accepted values of a request's `model`.
    """
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in _OPERATIONS.items():
        paths.setdefault(path, {})[method] = _operation(method, path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "penstock", "version": "1", "description": _ABOUT},
        "paths": paths,
        "components": {
            "schemas": {**ANSWERS, "Document": {"type": "object"}, **_request_schemas(model_names)},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


_ABOUT = (
    "The part of OpenAI's API that this server supports, and penstock's additions. Every answer "
    "has an `x-request-id` header, which repeats the request's own if it has one. A server that "
    "was started without API keys requires none."
)


def _operation(method: str, path: str, operation: _Operation) -> dict[str, Any]:
    is_keyed = path.startswith(("/v1/", "/tokenize", "/detokenize"))
    statuses = {*_ALWAYS, *operation.statuses}
    statuses |= {*_KEYED} if is_keyed else set()
    statuses |= {*_WITH_BODY} if operation.body else set()
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{method} {path}",
        "parameters": [*_path_parameters(path), *_query_parameters(method, operation)],
        "responses": {
            "200": {
                "description": "Success.",
                "content": _content(operation),
                "links": _links(method, path),
            },
            **{str(status): _failure(status) for status in sorted(statuses)},
        },
    }
    if operation.body:
        schemas = [ref(body.__name__) for body in operation.body]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        content: dict[str, Any] = {"schema": schema}
        if operation.example is not None:
            content["examples"] = {
                "whole": {"value": operation.example},
                "stream": {"value": operation.example | {"stream": True}},
            }
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": content},
        }
    if is_keyed:
        described["security"] = [{"key": []}, {}]
    return described


def _links(method: str, path: str) -> dict[str, Any]:
    known = _LINKS.get((method, path), {})
    return {
        f"{method}{re.sub('[^a-z]+', '.', other)}".rstrip("."): {
            "operationId": f"{method} {other}",
            "parameters": known,
        }
        for method, other in _OPERATIONS
        if known and set(_path_names(other)) == known.keys()
    }


def _content(operation: _Operation) -> dict[str, Any]:
    if not operation.answer:
        return {"text/plain": {"schema": STRING}}
    content: dict[str, Any] = {"application/json": {"schema": ref(operation.answer)}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    return content


def _failure(status: int) -> dict[str, Any]:
    return {
        "description": _STATUSES[status],
        "content": {"application/json": {"schema": ref("Error")}},
    }


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": STRING}
        for name in _path_names(path)
    ]


def _path_names(path: str) -> list[str]:
    return [part[1:-1] for part in path.split("/") if part.startswith("{")]


def _query_parameters(method: str, operation: _Operation) -> list[dict[str, Any]]:
    if operation.query is None:
        rows: Iterable[tuple[str, Schema, str]] = (
            _STREAMING_QUERY if operation.streams and method == "get" else ()
        )
        return [
            {"name": name, "in": "query", "schema": schema, "description": text}
            for name, schema, text in rows
        ]
    properties = operation.query.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]


# -- requests ---------------------------------------------------------------------------------


def _request_schemas(model_names: Sequence[str]) -> dict[str, Schema]:
    models = {body for operation in _OPERATIONS.values() for body in operation.body}
    named: Sequence[type[Model]] = sorted(models, key=lambda model: model.__name__)
    _, found = models_json_schema(
        [(model, "validation") for model in named],
        ref_template="#/components/schemas/{model}",
    )
    schemas: dict[str, Schema] = found["$defs"]
    for schema in schemas.values():
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": [*model_names, None]}
    for model in named:
        if issubclass(model, SamplingRequest):
            properties = schemas[model.__name__]["properties"]
            honoured = {name: _or_null(schema) for name, schema in properties.items()}
            unread = {name: _as_accepted(each) for name, each in UNREAD[model.endpoint].items()}
            schemas[model.__name__]["properties"] = {**honoured, **unread}
    return schemas


def _or_null(schema: Schema) -> Schema:
    has_null = {"type": "null"} in schema.get("anyOf", ()) or None in schema.get("enum", ())
    return schema if has_null else nullable(schema)


def _as_accepted(parameter: Unread) -> Schema:
    if parameter.use is Use.NEUTRAL:
        return {"description": "Accepted without effect."}
    return {"description": "Not supported.", "enum": [*parameter.defaults, None, []]}


def ref(name: str) -> Schema:
    """A named schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _object(optional: dict[str, Schema] | None = None, /, **fields: Schema) -> Schema:
    """An object with exactly these fields, all required except the optional ones."""
    return {
        "type": "object",
        "properties": fields | (optional or {}),
        "required": list(fields),
        "additionalProperties": False,
    }


def _page(items: Schema) -> Schema:
    return _object(
        object=_one_of("list"),
        data=_list(items),
        first_id=STRING,
        last_id=STRING,
        has_more=_BOOLEAN,
    )


_FINISH_REASON = _one_of(*(reason.value for reason in FinishReason))
_TURN_STATUS = _one_of("in_progress", "completed", "incomplete", "cancelled", "failed")
_TOKEN = {"token": STRING, "logprob": _NUMBER, "bytes": _list(INTEGER)}
_COMPLETION_LOGPROBS = _object(
    tokens=_list(STRING),
    token_logprobs=_list(nullable(_NUMBER)),
    top_logprobs=_list(nullable(_map(_NUMBER))),
    text_offset=_list(INTEGER),
)
_PROMPT_LOGPROBS = _list(
    nullable(_map(_object(logprob=_NUMBER, rank=INTEGER, decoded_token=STRING)))
)
_TOKEN_IDS = {"token_ids": _list(INTEGER), "prompt_token_ids": _list(INTEGER)}
_HEAD = {
    "id": STRING,
    "created": INTEGER,
    "model": STRING,
    "system_fingerprint": _NULL,
}

ANSWERS: dict[str, Schema] = {
    "Error": _object(
        error=_object(
            {"penstock": _map(_ANYTHING)},
            message=STRING,
            type=STRING,
            param=nullable(STRING),
            code=STRING,
        )
    ),
    # generated
    "TokenLogprob": _object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN))),
    "Usage": _object(
        prompt_tokens=INTEGER,
        completion_tokens=INTEGER,
        total_tokens=INTEGER,
        prompt_tokens_details=_object(cached_tokens=INTEGER),
    ),
    "ChatCompletion": _object(
        {"prompt_token_ids": _list(INTEGER), "prompt_logprobs": _PROMPT_LOGPROBS},
        **_HEAD,
        object=_one_of("chat.completion"),
        choices=_list(
            _object(
                {"token_ids": _list(INTEGER)},
                index=INTEGER,
                message=_object(role=_one_of("assistant"), content=STRING, refusal=_NULL),
                logprobs=nullable(_object(content=_list(ref("TokenLogprob")), refusal=_NULL)),
                finish_reason=_FINISH_REASON,
            )
        ),
        usage=ref("Usage"),
    ),
    "Completion": _object(
        **_HEAD,
        object=_one_of("text_completion"),
        choices=_list(
            _object(
                {"prompt_logprobs": _PROMPT_LOGPROBS, **_TOKEN_IDS},
                index=INTEGER,
                text=STRING,
                logprobs=nullable(_COMPLETION_LOGPROBS),
                finish_reason=_FINISH_REASON,
            )
        ),
        usage=ref("Usage"),
    ),
    # responses and conversations
    "Part": {
        "oneOf": [
            _object(type=_one_of("input_text"), text=STRING),
            _object(
                type=_one_of("output_text"),
                text=STRING,
                annotations=_list(_ANYTHING),
                logprobs=_list(ref("TokenLogprob")),
            ),
        ]
    },
    "Item": _object(
        {"name": STRING, "phase": _one_of("commentary", "final_answer")},
        id=STRING,
        type=_one_of("message"),
        role=_one_of("system", "developer", "user", "assistant"),
        status=_one_of("in_progress", "completed", "incomplete"),
        content=_list(ref("Part")),
    ),
    "Response": _object(
        id=STRING,
        object=_one_of("response"),
        created_at=INTEGER,
        completed_at=nullable(INTEGER),
        status=_one_of("queued", "in_progress", "completed", "incomplete", "cancelled", "failed"),
        model=STRING,
        output=_list(ref("Item")),
        usage=nullable(
            _object(
                input_tokens=INTEGER,
                input_tokens_details=_object(cached_tokens=INTEGER, cache_write_tokens=INTEGER),
                output_tokens=INTEGER,
                output_tokens_details=_object(reasoning_tokens=INTEGER),
                total_tokens=INTEGER,
            )
        ),
        error=nullable(_object(code=STRING, message=STRING)),
        incomplete_details=nullable(_object(reason=STRING)),
        instructions=nullable(STRING),
        metadata=_map(STRING),
        previous_response_id=nullable(STRING),
        conversation=nullable(_object(id=STRING)),
        max_output_tokens=nullable(INTEGER),
        temperature=_NUMBER,
        top_p=_NUMBER,
        top_logprobs=INTEGER,
        store=_BOOLEAN,
        background=_BOOLEAN,
        parallel_tool_calls=_BOOLEAN,
        tool_choice=STRING,
        tools=_list(_ANYTHING),
        text=_map(_ANYTHING),
        truncation=STRING,
        service_tier=STRING,
    ),
    "Items": _page(ref("Item")),
    "Conversation": _object(
        id=STRING, object=_one_of("conversation"), created_at=INTEGER, metadata=_map(STRING)
    ),
    "Conversations": _page(ref("Conversation")),
    "Tree": _object(
        object=_one_of("conversation.tree"),
        conversation_id=STRING,
        head=nullable(STRING),
        running=nullable(STRING),
        data=_list(
            _object(
                turn=STRING,
                parent=nullable(STRING),
                status=_TURN_STATUS,
                response_id=nullable(STRING),
                created_at=INTEGER,
            )
        ),
    ),
    "Head": _object(
        object=_one_of("conversation.head"), conversation_id=STRING, turn=nullable(STRING)
    ),
    "Deleted": _object(id=STRING, object=STRING, deleted=_BOOLEAN),
    # the rest
    "Model": _object(
        id=STRING,
        object=_one_of("model"),
        created=INTEGER,
        owned_by=STRING,
        root=STRING,
        max_model_len=nullable(INTEGER),
    ),
    "Models": _object(object=_one_of("list"), data=_list(ref("Model"))),
    "Ticket": _object(ticket=STRING, expires_in=_NUMBER),
    "Tokens": _object(
        count=INTEGER,
        max_model_len=nullable(INTEGER),
        tokens=_list(INTEGER),
        token_strs=nullable(_list(nullable(STRING))),
    ),
    "Text": _object(prompt=STRING),
    "Status": _object(status=STRING),
}
