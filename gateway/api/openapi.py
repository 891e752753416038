"""The project's own OpenAPI document: the operations that are declared beside their handlers, the
schemas that parse requests, and exact schemas of answers, which a test checks answers against.

It describes parameters as the server accepts them: null for all of them, and for refused ones only
the values without effect (`parameters`). It leaves out the WebSocket at `/v1/responses`
(PROTOCOL.md) and the events of streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from penstock.engine.request import SAMPLING_PARAMETERS, FinishReason
from penstock.gateway.api.responses.item_kinds import MESSAGE
from penstock.gateway.api.schema.fields import SamplingRequest
from penstock.gateway.api.schema.model import Model
from penstock.gateway.api.schema.parameters import ALIASES, UNREAD, Unread, Use
from penstock.gateway.api.shared.operations import Operation
from penstock.gateway.config import ANY_NAME
from penstock.gateway.generation.cache_history import REASONS

_STATUSES = {
    400: "A parameter is unknown, unsupported, missing or invalid, or the HTTP is malformed.",
    401: "The API key is missing or invalid.",
    403: "Requests with this Host or Origin are not allowed.",
    404: "The resource does not exist, has expired, or belongs to another tenant.",
    405: "This path does not support the method.",
    408: "The request's header or body took too long to arrive.",
    409: "Another turn is running on the conversation's head, or the head has moved.",
    413: "The request body is too large.",
    415: "The body's Content-Encoding is not supported; Accept-Encoding says which are.",
    429: "The tenant's rate limit is reached; Retry-After says when to retry.",
    431: "The request header is too large.",
    500: "The engine failed on this request, or the server has a bug.",
    501: "This store of conversations cannot do that.",
    503: "The queue is full, or the engine or the session store is unavailable; Retry-After says "
    "when to retry.",
}
_ALWAYS = (400, 403, 405, 408, 431, 503)
_KEYED = (401, 500)  # paths that need an API key
_WITH_BODY = (413, 415)
Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}
_NULL: Schema = {"type": "null"}
_ANYTHING: Schema = {}


_EVENT: Schema = {
    "type": "object",
    "description": "One event of many. Streams of chat completions and completions end with "
    "`[DONE]` as data.",
    "properties": {"event": STRING, "data": STRING},
    "required": ["data"],
}
_STREAMING_QUERY: tuple[tuple[str, Schema, str], ...] = (
    ("stream", {"enum": ["true", "false"]}, "Stream events instead of the whole response."),
    (
        "starting_after",
        {"type": "integer", "minimum": -1},
        "Only events with a higher sequence number, which the response must reach; needs stream.",
    ),
)


def document(
    model_names: Sequence[str], operations: Iterable[Operation], *, root_path: str = ""
) -> dict[str, Any]:
    """The document, as JSON.

    Args:
        model_names: accepted values of a request's `model`.
        operations: what the server serves.
        root_path: under which it is reached.
    """
    by_id = {f"{each.method.lower()} {_path(each)}": each for each in operations}
    paths: dict[str, dict[str, Any]] = {}
    for name, operation in by_id.items():
        described = {"operationId": name, **_described(operation, by_id)}
        paths.setdefault(_path(operation), {})[operation.method.lower()] = described
    schemas = _request_schemas(by_id.values(), model_names)
    return {
        "openapi": "3.1.0",
        "info": {"title": "penstock", "version": "1", "description": _ABOUT},
        **({"servers": [{"url": root_path}]} if root_path else {}),
        "paths": paths,
        "components": {
            "schemas": {**ANSWERS, "Document": {"type": "object"}, **schemas},
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


_ABOUT = (
    "The part of OpenAI's API that this server supports, and penstock's additions. Every answer "
    "has an `x-request-id` header, which repeats the request's own if it has one. A server that "
    "was started without API keys requires none."
)


def _path(operation: Operation) -> str:
    return operation.path.replace(":path}", "}")


def _described(operation: Operation, by_id: Mapping[str, Operation]) -> dict[str, Any]:
    statuses = {*_ALWAYS, *operation.statuses}
    statuses |= {404} if _path_names(operation) else set()
    statuses |= {*_KEYED} if operation.needs_key else set()
    statuses |= {*_WITH_BODY} if operation.body else set()
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [*_path_parameters(operation), *_query_parameters(operation)],
        "responses": {
            "200": {
                "description": "Success.",
                "content": _content(operation),
                "links": _links(operation, by_id),
            },
            **{str(each): _failure(each, operation.failure) for each in sorted(statuses)},
        },
    }
    if operation.body:
        schemas = [ref(body.__name__) for body in operation.body]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        content: dict[str, Any] = {"schema": schema}
        if operation.example is not None:
            content["examples"] = {"whole": {"value": operation.example}}
        if operation.example is not None and operation.streams:
            content["examples"]["stream"] = {"value": {**operation.example, "stream": True}}
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": content},
        }
    if operation.needs_key:
        described["security"] = [{"key": []}, {"x-api-key": []}, {}]
    return described


def _links(operation: Operation, by_id: Mapping[str, Operation]) -> dict[str, Any]:
    known = operation.links
    links: dict[str, Any] = {}
    for name, other in by_id.items():
        link: dict[str, Any] = {"operationId": name}
        if known and set(_path_names(other)) == known.keys():
            link["parameters"] = known
        body = operation.next_bodies.get(f"{other.method} {_path(other)}")
        if body is not None:
            link["requestBody"] = dict(body)
        if len(link) > 1:
            links[re.sub("[^a-z]+", ".", name.replace(" ", "", 1)).rstrip(".")] = link
    return links


def _content(operation: Operation) -> dict[str, Any]:
    if not operation.answer:
        return {"text/plain": {"schema": STRING}}
    content: dict[str, Any] = {"application/json": {"schema": ref(operation.answer)}}
    if operation.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    return content


def _failure(status: int, schema: str) -> dict[str, Any]:
    return {
        "description": _STATUSES[status],
        "content": {"application/json": {"schema": ref(schema)}},
    }


def _path_parameters(operation: Operation) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": STRING}
        for name in _path_names(operation)
    ]


def _path_names(operation: Operation) -> list[str]:
    return [part[1:-1] for part in _path(operation).split("/") if part.startswith("{")]


def _query_parameters(operation: Operation) -> list[dict[str, Any]]:
    if operation.query is None:
        rows: Iterable[tuple[str, Schema, str]] = (
            _STREAMING_QUERY if operation.streams and operation.method == "GET" else ()
        )
        return [
            {"name": name, "in": "query", "schema": schema, "description": text}
            for name, schema, text in rows
        ]
    properties = operation.query.model_json_schema()["properties"]
    return [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]


# -- requests ---------------------------------------------------------------------------------


def _request_schemas(
    operations: Iterable[Operation], model_names: Sequence[str]
) -> dict[str, Schema]:
    models = {body for operation in operations for body in operation.body}
    named: Sequence[type[Model]] = sorted(models, key=lambda model: model.__name__)
    _, found = models_json_schema(
        [(model, "validation") for model in named],
        ref_template="#/components/schemas/{model}",
    )
    schemas: dict[str, Schema] = found["$defs"]
    for schema in schemas.values():
        if "model" in schema["properties"]:
            takes_any = ANY_NAME in model_names
            schema["properties"]["model"] = (
                nullable({"type": "string"}) if takes_any else {"enum": [*model_names, None]}
            )
    for model in named:
        if issubclass(model, SamplingRequest):
            properties = schemas[model.__name__]["properties"]
            honoured = {name: _or_null(schema) for name, schema in properties.items()}
            unread = {name: _as_accepted(each) for name, each in UNREAD[model.endpoint].items()}
            others = {
                name: {"description": each.meaning}
                for name, each in ALIASES[model.endpoint].items()
            }
            schemas[model.__name__]["properties"] = {**honoured, **others, **unread}
    return schemas


def _or_null(schema: Schema) -> Schema:
    has_null = {"type": "null"} in schema.get("anyOf", ()) or None in schema.get("enum", ())
    return schema if has_null else nullable(schema)


def _as_accepted(parameter: Unread) -> Schema:
    if parameter.use is not Use.REFUSED:
        because = f": {parameter.reason}" if parameter.reason else ""
        return {"description": f"Accepted without effect{because}."}
    if parameter.switch:
        return {"description": f"Not supported; without effect where `{parameter.switch}` is 0."}
    return {"description": "Not supported.", "enum": [*parameter.defaults, None, []]}


def ref(name: str) -> Schema:
    """A named schema of the document."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _one_of(*values: str | bool) -> Schema:
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


def _page(items: Schema, **more: Schema) -> Schema:
    return _object(
        object=_one_of("list"),
        data=_list(items),
        first_id=STRING,
        last_id=STRING,
        has_more=_BOOLEAN,
        **more,
    )


_FINISH_REASONS = dict.fromkeys(reason.told for reason in FinishReason)
_FINISH_REASON = _one_of(*_FINISH_REASONS)
_CHAT_FINISH_REASON = _one_of(*_FINISH_REASONS, "tool_calls")
_STOP_REASON = {"stop_reason": _one_of(FinishReason.REPETITION.value)}
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
    "system_fingerprint": STRING,
}

_RESPONSE_USAGE = _object(
    # Absent unless an engine had drafts for it.
    {"penstock": _object(draft_tokens=INTEGER, accepted_draft_tokens=INTEGER)},
    input_tokens=INTEGER,
    input_tokens_details=_object(cached_tokens=INTEGER, cache_write_tokens=INTEGER),
    output_tokens=INTEGER,
    output_tokens_details=_object(reasoning_tokens=INTEGER),
    total_tokens=INTEGER,
)
_ITEM = {"id": STRING, "status": _one_of("in_progress", "completed", "incomplete")}
_CALL = {**_ITEM, "call_id": STRING, "name": STRING}
_SPACE = {"namespace": STRING}

_SPENT = _object(
    prompt_tokens=INTEGER,
    cached_tokens=_object(device=INTEGER, host=INTEGER),
    output_tokens=INTEGER,
    thinking_tokens=INTEGER,
    compute_seconds=_NUMBER,
    kv_block_seconds=_NUMBER,
)
_CACHE = _object(
    predecessor=nullable(STRING),
    reason=_one_of(*REASONS),
    cached_tokens=_object(device=INTEGER, host=INTEGER),
    reusable_tokens=INTEGER,
    missed_tokens=INTEGER,
    message=nullable(INTEGER),
    field=nullable(STRING),
    seconds_lost=nullable(_NUMBER),
    dropped=_map(INTEGER),
)
_PENSTOCK = _object({"cache": _CACHE}, usage=_SPENT)
_USED_BY_KEY = _object(
    object=_one_of("organization.usage.completions.result"),
    project_id=STRING,
    api_key_id=STRING,
    num_model_requests=INTEGER,
    input_tokens=INTEGER,
    input_cached_tokens=INTEGER,
    input_uncached_tokens=INTEGER,
    output_tokens=INTEGER,
    penstock=_object(
        cached_tokens=_object(device=INTEGER, host=INTEGER),
        thinking_tokens=INTEGER,
        compute_seconds=_NUMBER,
        kv_block_seconds=_NUMBER,
    ),
)
_RUNNING = _object(
    id=STRING,
    object=_one_of("penstock.request"),
    created_at=INTEGER,
    tenant=STRING,
    status=_one_of("waiting", "running"),
    prompt_tokens=INTEGER,
    output_tokens=INTEGER,
)
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
    "AnthropicError": _object(
        type=_one_of("error"), error=_object(type=STRING, message=STRING), request_id=STRING
    ),
    # generated
    "Message": _object(
        {
            "diagnostics": nullable(
                _object(
                    cache_miss_reason=_object({"cache_missed_input_tokens": INTEGER}, type=STRING)
                )
            )
        },
        id=STRING,
        type=_one_of("message"),
        role=_one_of("assistant"),
        model=STRING,
        content=_list(
            {
                "oneOf": [
                    _object(type=_one_of("text"), text=STRING),
                    _object(type=_one_of("thinking"), thinking=STRING, signature=STRING),
                    _object(type=_one_of("tool_use"), id=STRING, name=STRING, input=_map({})),
                ]
            }
        ),
        stop_reason=STRING,
        stop_sequence=nullable(STRING),
        usage=_object(
            {"output_tokens_details": _object(thinking_tokens=INTEGER)},
            input_tokens=INTEGER,
            cache_creation_input_tokens=INTEGER,
            cache_read_input_tokens=INTEGER,
            output_tokens=INTEGER,
        ),
        penstock=_PENSTOCK,
    ),
    "MessageTokens": _object(input_tokens=INTEGER),
    "TokenLogprob": _object(**_TOKEN, top_logprobs=_list(_object(**_TOKEN))),
    "Usage": _object(
        {
            "completion_tokens_details": _object(
                {
                    "reasoning_tokens": INTEGER,
                    "accepted_prediction_tokens": INTEGER,
                    "rejected_prediction_tokens": INTEGER,
                }
            )
        },
        prompt_tokens=INTEGER,
        completion_tokens=INTEGER,
        total_tokens=INTEGER,
        prompt_tokens_details=_object(cached_tokens=INTEGER),
    ),
    "PoolingUsage": _object(prompt_tokens=INTEGER, total_tokens=INTEGER),
    "Embeddings": _object(
        object=_one_of("list"),
        data=_list(
            _object(
                object=_one_of("embedding"),
                index=INTEGER,
                embedding={"anyOf": [_list(_NUMBER), STRING]},
            )
        ),
        model=STRING,
        usage=ref("PoolingUsage"),
    ),
    "Ranking": {
        "oneOf": [
            _object(
                id=STRING,
                model=STRING,
                usage=ref("PoolingUsage"),
                results=_list(
                    _object(
                        {"document": _object(text=STRING)}, index=INTEGER, relevance_score=_NUMBER
                    )
                ),
            ),
            _list(_object({"text": STRING}, index=INTEGER, score=_NUMBER)),  # of `texts`
        ]
    },
    "Classes": _object(
        id=STRING,
        object=_one_of("list"),
        created=INTEGER,
        model=STRING,
        data=_list(_object(index=INTEGER, label=STRING, probs=_list(_NUMBER), num_classes=INTEGER)),
        usage=ref("PoolingUsage"),
    ),
    "Scores": _object(
        id=STRING,
        object=_one_of("list"),
        created=INTEGER,
        model=STRING,
        data=_list(_object(index=INTEGER, object=_one_of("score"), score=_NUMBER)),
        usage=ref("PoolingUsage"),
    ),
    "ToolCall": {
        "oneOf": [
            _object(
                id=STRING,
                type=_one_of("function"),
                function=_object(name=STRING, arguments=STRING),
            ),
            _object(id=STRING, type=_one_of("custom"), custom=_object(name=STRING, input=STRING)),
        ]
    },
    "ChatCompletion": _object(
        {"prompt_token_ids": _list(INTEGER), "prompt_logprobs": _PROMPT_LOGPROBS},
        **_HEAD,
        object=_one_of("chat.completion"),
        choices=_list(
            _object(
                {"token_ids": _list(INTEGER), **_STOP_REASON},
                index=INTEGER,
                message=_object(
                    {
                        "tool_calls": _list(ref("ToolCall")),
                        "reasoning_content": nullable(STRING),
                        "reasoning": nullable(STRING),
                    },
                    role=_one_of("assistant"),
                    content=nullable(STRING),
                    refusal=_NULL,
                ),
                logprobs=nullable(_object(content=_list(ref("TokenLogprob")), refusal=_NULL)),
                finish_reason=_CHAT_FINISH_REASON,
            )
        ),
        usage=ref("Usage"),
        penstock=_PENSTOCK,
    ),
    "Completion": _object(
        **_HEAD,
        object=_one_of("text_completion"),
        choices=_list(
            _object(
                {"prompt_logprobs": _PROMPT_LOGPROBS, **_TOKEN_IDS, **_STOP_REASON},
                index=INTEGER,
                text=STRING,
                logprobs=nullable(_COMPLETION_LOGPROBS),
                finish_reason=_FINISH_REASON,
            )
        ),
        usage=ref("Usage"),
        penstock=_PENSTOCK,
    ),
    "Infill": {
        **_object(
            index=INTEGER,
            content=STRING,
            tokens=_list(INTEGER),
            stop=_BOOLEAN,
            model=STRING,
            tokens_predicted=INTEGER,
            tokens_evaluated=INTEGER,
            tokens_cached=INTEGER,
            truncated=_BOOLEAN,
            stop_type=_one_of("none", "eos", "limit", "word"),
            stopping_word=STRING,
            timings=_map(_NUMBER),
            penstock=_PENSTOCK,
        ),
        "required": [],  # `response_fields` asks for some of them, or of their fields
        "additionalProperties": _ANYTHING,
    },
    # responses and conversations
    "Part": {
        "oneOf": [
            _object(type=_one_of("input_text"), text=STRING),
            _object(
                type=_one_of("input_image"),
                detail=STRING,
                file_id=nullable(STRING),
                image_url=STRING,
            ),
            _object(
                type=_one_of("output_text"),
                text=STRING,
                annotations=_list(_ANYTHING),
                logprobs=_list(ref("TokenLogprob")),
            ),
        ]
    },
    "Item": {
        "oneOf": [
            ref("MessageItem"),
            _object(
                {"encrypted_content": STRING},
                **_ITEM,
                type=_one_of("reasoning"),
                summary=_list(_object(type=_one_of("summary_text"), text=STRING)),
                content=_list(_object(type=_one_of("reasoning_text"), text=STRING)),
            ),
            _object(**_ITEM, type=_one_of("compaction"), encrypted_content=STRING),
            _object(**_ITEM, type=_one_of("compaction_trigger")),
            _object(_SPACE, **_CALL, type=_one_of("function_call"), arguments=STRING),
            _object(_SPACE, **_CALL, type=_one_of("custom_tool_call"), input=STRING),
            _object(
                **_ITEM,
                type=_one_of("function_call_output", "custom_tool_call_output"),
                call_id=STRING,
                output=STRING,
            ),
        ],
    },
    "MessageItem": _object(
        {"name": STRING, "phase": _one_of("commentary", "final_answer")},
        id=STRING,
        type=_one_of(MESSAGE.type),
        role=_one_of("system", "developer", "user", "assistant"),
        status=_one_of("in_progress", "completed", "incomplete"),
        content=_list(ref("Part")),
    ),
    "Response": _object(
        # `usage` once it has ended; `resumable` only if storing a response with `store` failed: its
        # stream cannot be resumed.
        {
            "penstock": _object({"usage": _SPENT, "cache": _CACHE, "resumable": _one_of(False)}),
            "prompt_cache_options": _map(STRING),
            "prompt_cache_diagnostics": _object(
                {
                    "reason": STRING,
                    "cache_missed_tokens": INTEGER,
                    "comparison_reusable_tokens": INTEGER,
                },
                type=_one_of(
                    "cache_hit", "cache_miss", "comparison_response_not_found", "unavailable"
                ),
            ),
        },
        id=STRING,
        object=_one_of("response"),
        created_at=INTEGER,
        completed_at=nullable(INTEGER),
        status=_one_of("queued", "in_progress", "completed", "incomplete", "cancelled", "failed"),
        model=STRING,
        output=_list(ref("Item")),
        usage=nullable(_RESPONSE_USAGE),
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
        presence_penalty=_NUMBER,
        frequency_penalty=_NUMBER,
        max_tool_calls=nullable(INTEGER),
        reasoning=_object(effort=nullable(STRING), summary=nullable(STRING)),
        safety_identifier=nullable(STRING),
        prompt_cache_key=nullable(STRING),
        tool_choice=_ANYTHING,
        tools=_list(_ANYTHING),
        text=_map(_ANYTHING),
        truncation=STRING,
        service_tier=STRING,
    ),
    "CompactedResponse": _object(
        id=STRING,
        object=_one_of("response.compaction"),
        created_at=INTEGER,
        output=_list(ref("Item")),
        usage=_RESPONSE_USAGE,
        penstock=_PENSTOCK,
    ),
    "InputTokens": _object(object=_one_of("response.input_tokens"), input_tokens=INTEGER),
    "Items": _page(ref("Item")),
    "Conversation": _object(
        {"pinned": _BOOLEAN, "used_at": INTEGER},
        id=STRING,
        object=_one_of("conversation"),
        created_at=INTEGER,
        metadata=_map(STRING),
    ),
    "Conversations": _page(
        ref("Conversation"),
        penstock=_object(
            {"num_dropped": INTEGER, "dropped_at": INTEGER},
            store=_one_of("memory", "disk", "redis"),
            durable=_BOOLEAN,
        ),
    ),
    "UsageByDay": _object(
        object=_one_of("page"),
        data=_list(
            _object(
                object=_one_of("bucket"),
                date=STRING,
                start_time=INTEGER,
                end_time=INTEGER,
                results=_list(_USED_BY_KEY),
            )
        ),
        has_more=_BOOLEAN,
        next_page=_NULL,
    ),
    "FoundConversations": _object(
        object=_one_of("list"),
        data=_list(
            _object(conversation=ref("Conversation"), turn=nullable(STRING), excerpt=STRING)
        ),
        has_more=_BOOLEAN,
    ),
    "Tree": _object(
        object=_one_of("conversation.tree"),
        conversation_id=STRING,
        head=nullable(STRING),
        running=nullable(STRING),
        data=_list(
            _object(
                {
                    "items": _list(ref("Item")),
                    "output": {"anyOf": [ref("Item"), _list(ref("Item")), _NULL]},
                    "incomplete_details": nullable(_map(STRING)),
                },
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
    "Steer": _object(
        id=STRING, object=STRING, previous_response_id=STRING, status=STRING, successor_id=STRING
    ),
    # the rest
    "Model": _object(
        {"parent": STRING},
        id=STRING,
        object=_one_of("model"),
        created=INTEGER,
        owned_by=STRING,
        root=STRING,
        max_model_len=INTEGER,
        input_modalities=_list(_one_of("text", "image")),
        quantization=STRING,
        weight_bytes=INTEGER,
        chat_sampling=_object(
            {
                name: _NUMBER
                for name, parameter in SAMPLING_PARAMETERS.items()
                if parameter.declared.has_model_default
            }
        ),
    ),
    "Models": _object(object=_one_of("list"), data=_list(ref("Model"))),
    "Ticket": _object(ticket=STRING, expires_in=_NUMBER),
    "Tokens": _object(
        count=INTEGER,
        max_model_len=INTEGER,
        tokens=_list(INTEGER),
        token_strs=nullable(_list(nullable(STRING))),
    ),
    "Text": _object(prompt=STRING),
    "Status": _object(
        {name: _object(state=STRING, message=STRING) for name in ("redis", "disk")}, status=STRING
    ),
    "Version": _object(version=STRING),
    "StatsHistory": _object(times=_list(_NUMBER), series=_map(_ANYTHING)),
    "RunningRequest": _RUNNING,
    "RunningRequests": _object(object=_one_of("list"), data=_list(ref("RunningRequest"))),
    "Load": _object(server_load=INTEGER),
    "TokenizerInfo": {**_object(tokenizer_class=STRING), "additionalProperties": _ANYTHING},
}
