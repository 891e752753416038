"""Converts input items to those that are stored and listed, and back for the chat template.

    {"id": "msg_…", "type": "message", "role", "status", "content": [{"type": "input_text", …}]}

Assistant messages have `output_text` parts, all others `input_text`. Lists are paged as OpenAI's
clients expect: `{"object": "list", "data", "first_id", …}`.
"""

from __future__ import annotations

import dataclasses
import secrets
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import ConfigDict, Field
from starlette.datastructures import QueryParams

from penstock.engine.vision.image_file import LoadedImage
from penstock.gateway.api.schema.fields import Includes
from penstock.gateway.api.schema.messages import (
    CallOutput,
    Compaction,
    CompactionTrigger,
    FunctionCall,
    ImagePart,
    InputItem,
    ItemReference,
    Message,
    Reasoning,
    custom_arguments,
    template_call,
    template_message,
)
from penstock.gateway.api.schema.model import Model
from penstock.gateway.api.schema.parsing import parse_fields
from penstock.gateway.api.schema.tools import seen_name
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.images.loader import shown_url, stored_image, stored_url
from penstock.gateway.storage.conversations.records import Item, StoredTurn
from penstock.gateway.storage.response_log.record import COMPACTION_TRIGGER
from penstock.gateway.storage.sealed_text import sealed, unsealed

MAX_LISTED = 100  # OpenAI's limit
CALLS = ("function_call", "custom_tool_call")
_IMAGE_TYPE = "input_image"
_IMAGE = ImagePart("")  # of a stored item, in a template
OUTPUTS = ("function_call_output", "custom_tool_call_output")
_ID_PREFIXES = {
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "function_call_output": "fco_",
    "custom_tool_call_output": "ctco_",
    "reasoning": "rs_",
    "compaction": "cmp_",
    COMPACTION_TRIGGER: "cmpt_",
}
# What the model is told to make of a conversation that is to be compacted. The same for all, so
# that it is known what an answer depends on.
INSTRUCTION = """\
Now summarise this conversation for yourself. It will be removed, and you will go on with nothing \
but the user's messages and your summary. Say what was asked for and what you have found out, \
decided and done: which files, commands and results matter, and what they were. Then say what is \
left to be done, and the next step. Copy names, paths, numbers and code exactly where they will be \
needed. Write only the summary, and call no tool."""
_SUMMARY = "What was said and done so far was removed. Its summary:\n\n"

_Asked = TypeVar("_Asked", bound=Model)


class Query(Model):
    """A query string. Its numbers are strings, so types are not strict."""

    model_config = ConfigDict(strict=False)


class PageQuery(Query):
    """A page of a list."""

    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class IncludeQuery(Query):
    """Which optional fields of items to show."""

    include: Includes = Field(default_factory=list)

    @property
    def has_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include


class ItemsQuery(PageQuery, IncludeQuery):
    """A page of items."""


def new_item_id(prefix: str = "msg_") -> str:
    return f"{prefix}{secrets.token_hex(16)}"


def item_objects(
    items: Iterable[InputItem], images: Iterable[LoadedImage] = ()
) -> tuple[Item, ...]:
    """Items as they are stored, with new ids. An item's own id is dropped, so that an id always
    names one item of a conversation.

    Args:
        images: those of the items, in order.

    Raises:
        RequestRefusedError: one is a reference, which has no meaning here.
    """
    left = iter(images)
    return tuple(item_object(item, index, left) for index, item in enumerate(items))


def item_object(item: InputItem, index: int, images: Iterator[LoadedImage]) -> Item:
    """One item as it is stored. Raises as `item_objects`.

    Args:
        images: of this item and those after it.
    """
    if isinstance(item, ItemReference):
        raise RequestRefusedError(
            "a conversation's items cannot be references",
            code="unsupported_parameter",
            param=f"items[{index}]",
        )
    if isinstance(item, Message):
        return _message(item, images)
    stored: dict[str, Any] = {
        "id": new_item_id(_ID_PREFIXES[item.type]),
        "type": item.type,
        "status": item.status or "completed",
    }
    if isinstance(item, Reasoning):
        thoughts = [{"type": "reasoning_text", "text": each.text} for each in item.content]
        summary = [{"type": "summary_text", "text": each.text} for each in item.summary]
        sealed = item.encrypted_content
        stored |= {} if sealed is None else {"encrypted_content": sealed}
        return stored | {"summary": summary, "content": thoughts}
    if isinstance(item, Compaction):
        return stored | {"encrypted_content": item.encrypted_content}
    if isinstance(item, CompactionTrigger):
        return stored
    stored["call_id"] = item.call_id
    if isinstance(item, CallOutput):
        return stored | {"output": "\n".join(item.output)}
    said = (
        {"arguments": item.arguments} if isinstance(item, FunctionCall) else {"input": item.input}
    )
    space = {} if item.namespace is None else {"namespace": item.namespace}
    return stored | {"name": item.name, **said, **space}


def _message(message: Message, images: Iterator[LoadedImage]) -> Item:
    text_part = _output_part if message.role == "assistant" else _input_part

    def part(given: str | ImagePart) -> dict[str, Any]:
        return text_part(given) if isinstance(given, str) else _image_part(stored_url(next(images)))

    item = {
        "id": new_item_id(),
        "type": "message",
        "role": message.role,
        "status": message.status or "completed",
        "content": [part(each) for each in message.content],
    }
    given = {"name": message.name, "phase": message.phase}
    return item | {name: value for name, value in given.items() if value is not None}


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """Items as chat templates expect them: what the assistant thought, said and called in one go
    is one message. What was compacted is left out."""
    messages: list[dict[str, Any]] = []
    done: set[str] | None = None  # what the last message has, if it is the assistant's
    for item in since_compaction(list(items)):
        kind = item["type"]
        if kind in ("compaction", COMPACTION_TRIGGER):
            text = summary_of(item) if kind == "compaction" else INSTRUCTION
            messages.append(template_message("user", [text]))
            done = None
            continue
        if kind == "message" and item["role"] != "assistant":
            parts = [part.get("text", _IMAGE) for part in item["content"]]
            messages.append(template_message(item["role"], parts, item.get("name")))
            done = None
            continue
        if kind in OUTPUTS:
            message = template_message("tool", [item["output"]])
            messages.append(message | {"tool_call_id": item["call_id"]})
            done = None
            continue
        if done is None or (kind not in CALLS and done - {"reasoning"} | done & {kind}):
            messages.append({"role": "assistant", "content": ""})
            done = set()
        _add(item, messages[-1])
        done.add(kind)
    return messages


def since_compaction(items: Sequence[Item]) -> Sequence[Item]:
    """Items without those that the newest compaction stands for: of those before it, only what
    users and the system have said is left. One that was cut off stands for nothing. A trigger is
    left only where it is the last."""
    items = [item for item in items if not _is_cut_off(item)]
    newest = max((at for at, item in enumerate(items) if item["type"] == "compaction"), default=0)
    rest = [item for item in items[newest:-1] if item["type"] != COMPACTION_TRIGGER]
    return [*(item for item in items[:newest] if _is_kept(item)), *rest, *items[-1:]]


def _is_cut_off(item: Item) -> bool:
    return bool(item["type"] == "compaction" and item.get("status", "completed") != "completed")


def _is_kept(item: Item) -> bool:
    return item.get("role") in ("user", "system", "developer")


def compaction_item(summary: str) -> Item:
    """What stands for a conversation's items before it."""
    return {
        "id": new_item_id("cmp_"),
        "type": "compaction",
        "status": "completed",
        "encrypted_content": sealed(summary),
    }


def summary_of(compaction: Item) -> str:
    """What a template shows of a compaction."""
    return _SUMMARY + unsealed(compaction["encrypted_content"])


def _add(item: Item, message: dict[str, Any]) -> None:
    """Add an item to the assistant's message."""
    kind = item["type"]
    if kind == "message":
        message["content"] = "\n".join(part["text"] for part in item["content"])
        if "name" in item:
            message["name"] = item["name"]
    elif kind == "reasoning":
        parts = item["content"] or item["summary"]
        if parts:
            message["reasoning_content"] = "\n".join(part["text"] for part in parts)
    else:
        arguments = item.get("arguments")
        if arguments is None:
            arguments = custom_arguments(item["input"])
        name = seen_name(item["name"], item.get("namespace"))
        calls = message.setdefault("tool_calls", [])
        calls.append(template_call(item["call_id"], name, arguments))


def without_logprobs(item: Item) -> Item:
    """An item as it is listed unless log-probabilities were asked for."""
    content: Sequence[Mapping[str, Any]] = item.get("content", ())
    if not any(part.get("logprobs") for part in content):
        return item
    return {
        **item,
        "content": [{**part, "logprobs": []} if "logprobs" in part else part for part in content],
    }


def stored_images(items: Iterable[Item], files: Mapping[str, bytes]) -> list[LoadedImage]:
    """The images of stored items, in order.

    Args:
        files: by digest.
    """
    parts = (part for item in items for part in item.get("content", ()))
    return [stored_image(part["image_url"], files) for part in parts if part["type"] == _IMAGE_TYPE]


def shown_items(turn: StoredTurn) -> tuple[Item, ...]:
    """A turn's input items as they are listed: with their images."""
    return tuple(shown_item(item, turn.images) for item in turn.items)


def without_item(turn: StoredTurn, item_id: str) -> StoredTurn:
    """A turn without an item, in its Response object too."""
    response = turn.response
    if response:
        shown = orjson.loads(response)
        shown["output"] = [item for item in shown["output"] if item["id"] != item_id]
        response = orjson.dumps(shown)
    return dataclasses.replace(
        turn,
        items=tuple(item for item in turn.items if item["id"] != item_id),
        output=tuple(item for item in turn.output if item["id"] != item_id),
        response=response,
    )


def without_ids(turn: StoredTurn) -> StoredTurn:
    """A turn without the token ids of the conversation up to it, and without images of others."""
    own = {image.digest for image in stored_images(turn.items, turn.images)}
    return dataclasses.replace(
        turn,
        prompt_token_ids=array("I"),
        output_token_ids=array("I"),
        prompt=None,
        whole=None,
        prefix_id=None,
        images={digest: file for digest, file in turn.images.items() if digest in own},
        places=(),
    )


def shown_item(item: Item, files: Mapping[str, bytes]) -> Item:
    """A stored item as it is listed.

    Args:
        files: its images, by digest.
    """
    parts: Sequence[Mapping[str, Any]] = item.get("content", ())
    if all(part["type"] != _IMAGE_TYPE for part in parts):
        return item
    shown = [
        _image_part(shown_url(part["image_url"], files)) if part["type"] == _IMAGE_TYPE else part
        for part in parts
    ]
    return {**item, "content": shown}


def _image_part(url: str) -> dict[str, Any]:
    return {"type": _IMAGE_TYPE, "detail": "auto", "file_id": None, "image_url": url}


def _input_part(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def _output_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def read_query(kind: type[_Asked], params: QueryParams) -> _Asked:
    """A query string, parsed by its schema.

    Raises:
        RequestRefusedError: a parameter is unknown or wrong.
    """
    values: dict[str, Any] = {}
    for name in params:
        if name in ("include", "include[]"):  # clients write lists in both ways
            values["include"] = [*values.get("include", ()), *params.getlist(name)]
        else:
            values[name] = params[name]
    return parse_fields(kind, values)


def item_page(items: Sequence[Item], params: QueryParams) -> dict[str, Any]:
    """The page of items that a query asks for.

    Args:
        items: all of them, oldest first.

    Raises:
        RequestRefusedError: a parameter is wrong, or `after` is not one of the items.
    """
    query = read_query(ItemsQuery, params)
    ordered = items if query.order == "asc" else items[::-1]
    start = 0 if query.after is None else _index(ordered, query.after) + 1
    page = ordered[start : start + query.limit]
    shown = page if query.has_logprobs else [without_logprobs(item) for item in page]
    return list_object(shown, has_more=start + len(page) < len(items))


def list_object(data: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page in the API's format; on an empty page the ids are empty strings."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else "",
        "last_id": data[-1]["id"] if data else "",
        "has_more": has_more,
    }


def _index(items: Sequence[Item], item_id: str) -> int:
    for index, item in enumerate(items):
        if item["id"] == item_id:
            return index
    raise RequestRefusedError(
        f"after: there is no item {item_id!r}", code="item_not_found", param="after", status=404
    )
