"""The requests of `/v1/conversations`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from penstock.gateway.api.schema.fields import Metadata
from penstock.gateway.api.schema.messages import InputItem
from penstock.gateway.api.schema.model import Model
from penstock.gateway.api.shared.items import MAX_LISTED, PageQuery, Query

_MAX_ADDED = 20  # OpenAI's limit
_MAX_ID_CHARS = 128
_MAX_QUERY_CHARS = 1000
_MAX_OFFSET = 1_000_000


class ListQuery(PageQuery):
    """A page of conversations; `pinned`: only those that are pinned, or that are not."""

    pinned: bool | None = None


class SearchQuery(Query):
    """A page of what a search finds."""

    query: Annotated[str, Field(min_length=1, max_length=_MAX_QUERY_CHARS)]
    limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = 20
    offset: Annotated[int, Field(ge=0, le=_MAX_OFFSET)] = 0


class TreeQuery(Query):
    """A tree; with `items`, the turns on the path to its head, or all, include their messages."""

    items: bool | Literal["all"] = False


_Added = Annotated[list[InputItem], Field(max_length=_MAX_ADDED, fail_fast=True)]
_TurnId = Annotated[str, Field(max_length=_MAX_ID_CHARS)]


class NewConversation(Model):
    items: _Added | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Model):
    """`metadata` may be left out with `pinned`, and stays as it is then."""

    metadata: Metadata | None = None
    pinned: bool | None = None


class NewItems(Model):
    items: Annotated[_Added, Field(min_length=1)]


class NewHead(Model):
    """Compare and set: `expected` must be the current head; null stands for no turn."""

    turn: _TurnId | None
    expected: _TurnId | None
