"""The kinds of output items: how an item looks, and the events that it arrives in.

    output_item.added · those of `opening`     before its first delta
    `delta` …
    those of `closing` · output_item.done      before the next item's first delta, or before the end

To add a kind, add it to `KINDS`, and the number of its events to `record.ITEM_EVENTS`;
`chat_formats.output_format` finds its text in an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.chat_formats import NAMESPACE_END
from penstock.gateway.storage.response_log.record import LogHeader
from penstock.gateway.storage.sealed_text import sealed

JsonObject = dict[str, Any]
Fields = Callable[[JsonObject], JsonObject]


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemContent:
    """What an item is made of.

    Attributes:
        id: of the item.
        number: tells it apart from all other items; its `call_id` is made from it.
        text: of all its deltas.
        logprobs: of all its deltas.
        name: of the tool that it calls, after its namespace and `NAMESPACE_END` if it has one.
    """

    id: str
    number: str
    status: str
    text: str
    logprobs: Sequence[Mapping[str, Any]] = ()
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemKind:
    """Items of one type.

    Attributes:
        type: of the item.
        id_prefix: of the item's id.
        item: makes an item of its content.
        begun: fields that are empty in `output_item.added`.
        part_index: which part the events are about, by the field's name.
        delta: type of a delta event.
        delta_end: the end of a delta event without logprobs.
        opening, closing: types of events, and what makes their fields of the item.
        is_silent: its delta events do not tell the text.
    """

    type: str
    id_prefix: str
    item: Callable[[ItemContent], JsonObject]
    begun: JsonObject
    part_index: Mapping[str, int]
    delta: str
    delta_end: bytes
    opening: Mapping[str, Fields]
    closing: Mapping[str, Fields]
    is_silent: bool = False


def _message(content: ItemContent) -> JsonObject:
    part = {
        "type": "output_text",
        "text": content.text,
        "annotations": [],
        "logprobs": list(content.logprobs),
    }
    return {
        "id": content.id,
        "type": "message",
        "role": "assistant",
        "status": content.status,
        "content": [part],
    }


def _reasoning(content: ItemContent) -> JsonObject:
    return {
        "id": content.id,
        "type": "reasoning",
        "status": content.status,
        "summary": [],
        "content": [{"type": "reasoning_text", "text": content.text}],
    }


def _summarised(content: ItemContent) -> JsonObject:
    summary = [{"type": "summary_text", "text": content.text}]
    return _reasoning(content) | {"summary": summary, "content": []}


def _function_call(content: ItemContent) -> JsonObject:
    return _call(content, "function_call") | {"arguments": content.text}


def _custom_tool_call(content: ItemContent) -> JsonObject:
    return _call(content, "custom_tool_call") | {"input": content.text}


def _call(content: ItemContent, kind: str) -> JsonObject:
    namespace, _, name = content.name.rpartition(NAMESPACE_END)
    item = {
        "id": content.id,
        "type": kind,
        "status": content.status,
        "call_id": f"call_{content.number}",
        "name": name,
    }
    return item | {"namespace": namespace} if namespace else item


def _compaction(content: ItemContent) -> JsonObject:
    return {
        "id": content.id,
        "type": "compaction",
        "status": content.status,
        "encrypted_content": sealed(content.text.strip()) if content.text else "",
    }


def _part(item: JsonObject) -> JsonObject:
    return {"part": item["content"][0]}


def _text(item: JsonObject) -> JsonObject:
    part = item["content"][0]
    return {"text": part["text"], "logprobs": part["logprobs"]}


def _thought(item: JsonObject) -> JsonObject:
    return {"text": item["content"][0]["text"]}


def _summary_part(item: JsonObject) -> JsonObject:
    return {"part": item["summary"][0]}


def _summary(item: JsonObject) -> JsonObject:
    return {"text": item["summary"][0]["text"]}


def _arguments(item: JsonObject) -> JsonObject:
    return {"name": item["name"], "arguments": item["arguments"]}


def _input(item: JsonObject) -> JsonObject:
    return {"input": item["input"]}


MESSAGE = ItemKind(
    type="message",
    id_prefix="msg_",
    item=_message,
    begun={"content": []},
    part_index={"content_index": 0},
    delta="response.output_text.delta",
    delta_end=b',"logprobs":[]}',
    opening={"response.content_part.added": _part},
    closing={"response.output_text.done": _text, "response.content_part.done": _part},
)
REASONING = ItemKind(
    type="reasoning",
    id_prefix="rs_",
    item=_reasoning,
    begun={"content": []},
    part_index={"content_index": 0},
    delta="response.reasoning_text.delta",
    delta_end=b"}",
    opening={"response.content_part.added": _part},
    closing={"response.reasoning_text.done": _thought, "response.content_part.done": _part},
)
# Where a summary was asked for. None is made: it is the whole thought, which many clients show only
# there. It has as many events, so a log need not know which of the two it is.
SUMMARY = ItemKind(
    type="reasoning",
    id_prefix="rs_",
    item=_summarised,
    begun={"summary": []},
    part_index={"summary_index": 0},
    delta="response.reasoning_summary_text.delta",
    delta_end=b"}",
    opening={"response.reasoning_summary_part.added": _summary_part},
    closing={
        "response.reasoning_summary_text.done": _summary,
        "response.reasoning_summary_part.done": _summary_part,
    },
)
FUNCTION_CALL = ItemKind(
    type="function_call",
    id_prefix="fc_",
    item=_function_call,
    begun={"arguments": ""},
    part_index={},
    delta="response.function_call_arguments.delta",
    delta_end=b"}",
    opening={},
    closing={"response.function_call_arguments.done": _arguments},
)
CUSTOM_TOOL_CALL = ItemKind(
    type="custom_tool_call",
    id_prefix="ctc_",
    item=_custom_tool_call,
    begun={"input": ""},
    part_index={},
    delta="response.custom_tool_call_input.delta",
    delta_end=b"}",
    opening={},
    closing={"response.custom_tool_call_input.done": _input},
)
# What a message is where the conversation was to be compacted: it is the summary. Before an answer
# it is an item of its own.
COMPACTION = ItemKind(
    type="compaction",
    id_prefix="cmp_",
    item=_compaction,
    begun={},
    part_index={},
    delta="response.compaction.compacting",
    delta_end=b"}",
    opening={},
    closing={},
    is_silent=True,
)
KINDS: Mapping[str, ItemKind] = {
    kind.type: kind for kind in (MESSAGE, REASONING, FUNCTION_CALL, CUSTOM_TOOL_CALL, COMPACTION)
}


def kind_of(header: LogHeader, kind: str) -> ItemKind:
    """How items of this type look in a response.

    Args:
        kind: a key of `KINDS`, or of the item that it has become there.
    """
    if kind in (MESSAGE.type, COMPACTION.type) and header.compacts:
        return COMPACTION
    is_summary = kind == REASONING.type and (header.echo.get("reasoning") or {}).get("summary")
    return SUMMARY if is_summary else KINDS[kind]


def item_number(header: LogHeader, output_index: int) -> str:
    """What an item's id and its `call_id` are made from."""
    return f"{header.nonce}_{output_index}" if output_index else header.nonce
