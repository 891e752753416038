"""Lists as OpenAI's clients page through them: `{"object": "list", "data", "first_id", …}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from starlette.datastructures import QueryParams

from penstock.gateway.conversations.records import Item
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.schemas import parse_fields
from penstock.gateway.schemas.fields import Model
from penstock.gateway.schemas.items import without_logprobs
from penstock.gateway.schemas.listing import ItemsQuery

_Query = TypeVar("_Query", bound=Model)


def read_query(kind: type[_Query], params: QueryParams) -> _Query:
    """A query string as its schema has it.

    Raises:
        RequestRefusedError: a parameter is unknown or wrong.
    """
    values: dict[str, Any] = {}
    for name in params:
        if name in ("include", "include[]"):  # clients write a list either way
            values["include"] = [*values.get("include", ()), *params.getlist(name)]
        else:
            values[name] = params[name]
    return parse_fields(kind, values)


def item_page(items: Sequence[Item], params: QueryParams) -> dict[str, Any]:
    """The page of items that a query asks for.

    Args:
        items: all of them, oldest first.

    Raises:
        RequestRefusedError: a parameter is wrong, or `after` is none of the items.
    """
    query = read_query(ItemsQuery, params)
    ordered = items if query.order == "asc" else items[::-1]
    start = 0 if query.after is None else _index(ordered, query.after) + 1
    page = ordered[start : start + query.limit]
    shown = page if query.has_logprobs else [without_logprobs(item) for item in page]
    return list_object(shown, has_more=start + len(page) < len(items))


def list_object(data: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page as the API shows it; of an empty one the ids are empty."""
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
        f"no item {item_id!r} to list after", code="item_not_found", param="after", status=404
    )
