"""Models in the form of Anthropic's API."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.datastructures import QueryParams

from penstock.gateway.api.shared.items import Query, read_query
from penstock.gateway.errors import RequestRefusedError

_MAX_LISTED = 1000  # Anthropic's limit


class ModelsQuery(Query):
    model_config = ConfigDict(extra="ignore")

    limit: Annotated[int, Field(ge=1, le=_MAX_LISTED)] = 20
    after_id: str | None = None
    before_id: str | None = None


def model_page(models: Sequence[dict[str, Any]], params: QueryParams) -> dict[str, Any]:
    """The page that a query asks for.

    Raises:
        RequestRefusedError: a parameter is wrong, or one of the ids is not a model's.
    """
    query = read_query(ModelsQuery, params)
    names = [model["id"] for model in models]
    begin, end = 0, len(models)
    if query.after_id is not None:
        begin = _index(names, query.after_id, "after_id") + 1
    if query.before_id is not None:
        end = _index(names, query.before_id, "before_id")
        begin = max(begin, end - query.limit)
    page = models[begin : min(end, begin + query.limit)]
    has_more = begin > 0 if query.before_id is not None else begin + len(page) < end
    return {
        "data": page,
        "has_more": has_more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def model_object(name: str, *, created: int, max_model_len: int) -> dict[str, Any]:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": max_model_len,
        "max_tokens": max_model_len,
    }


def _index(names: Sequence[str], name: str, param: str) -> int:
    if name not in names:
        raise RequestRefusedError(
            f"{param}: there is no model {name!r}", code="model_not_found", param=param, status=404
        )
    return names.index(name)
