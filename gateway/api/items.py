"""Converts messages to the items that are stored and listed, and back for the chat template.

    {"id": "msg_…", "type": "message", "role", "status", "content": [{"type": "input_text", …}]}

Assistant messages have `output_text` parts, all others `input_text`. Lists are paged as OpenAI's
clients expect: `{"object": "list", "data", "first_id", …}`.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field
from starlette.datastructures import QueryParams

from penstock.gateway.api.schema.fields import Includes, Message, template_message
from penstock.gateway.api.schema.model import Model
from penstock.gateway.api.schema.parsing import parse_fields
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.records import Item

_MAX_LISTED = 100  # OpenAI's limit

_Asked = TypeVar("_Asked", bound=Model)


class Query(Model):
    """A query string. Its numbers are strings, so types are not strict."""

    model_config = ConfigDict(strict=False)


class PageQuery(Query):
    """A page of a list."""

    limit: Annotated[int, Field(ge=1, le=_MAX_LISTED)] = 20
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


def new_item_id() -> str:
    return f"msg_{secrets.token_hex(16)}"


def item_objects(messages: Iterable[Message]) -> tuple[Item, ...]:
    """Messages as items with new ids. A message's own id is dropped, so that an id always names one
    item of a conversation."""
    return tuple(_item(message) for message in messages)


def _item(message: Message) -> Item:
    part = _output_part if message.role == "assistant" else _input_part
    item = {
        "id": new_item_id(),
        "type": "message",
        "role": message.role,
        "status": message.status or "completed",
        "content": [part(text) for text in message.content],
    }
    given = {"name": message.name, "phase": message.phase}
    return item | {name: value for name, value in given.items() if value is not None}


def for_template(item: Item) -> dict[str, str]:
    """An item as chat templates expect it."""
    return template_message(
        item["role"], [part["text"] for part in item["content"]], item.get("name")
    )


def without_logprobs(item: Item) -> Item:
    """An item as it is listed unless log-probabilities were asked for."""
    content: Sequence[Mapping[str, Any]] = item["content"]
    if not any(part.get("logprobs") for part in content):
        return item
    return {
        **item,
        "content": [{**part, "logprobs": []} if "logprobs" in part else part for part in content],
    }


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
