"""The shapes of answers, as JSON Schema: exact, so that a test can hold answers against them."""

from __future__ import annotations

from typing import Any

from penstock.engine.request import FinishReason

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
_NUMBER: Schema = {"type": "number"}
_BOOLEAN: Schema = {"type": "boolean"}
_NULL: Schema = {"type": "null"}
_ANYTHING: Schema = {}


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
    """These fields and no others; all are always there but the optional ones."""
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
