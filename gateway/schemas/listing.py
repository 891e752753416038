"""What is asked of a list: OpenAI's paging, and the conversations' own requests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from penstock.gateway.schemas.fields import Includes, Message, Metadata, Model

_MAX_LISTED = 100  # OpenAI's limits
_MAX_ADDED = 20
_MAX_ID_CHARS = 128


class _Query(Model):
    """In a query string numbers are texts, so types are not strict."""

    model_config = ConfigDict(strict=False)


class PageQuery(_Query):
    """A page of a list."""

    limit: Annotated[int, Field(ge=1, le=_MAX_LISTED)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


class IncludeQuery(_Query):
    """What more to show of items."""

    include: Includes = Field(default_factory=list)

    @property
    def has_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include


class TreeQuery(_Query):
    """A tree, with what was said on the path to its head if `items` is set."""

    items: bool = False


class ItemsQuery(PageQuery, IncludeQuery):
    """A page of items."""


_Added = Annotated[list[Message], Field(max_length=_MAX_ADDED, fail_fast=True)]
_TurnId = Annotated[str, Field(max_length=_MAX_ID_CHARS)]


class NewConversation(Model):
    items: _Added | None = None
    metadata: Metadata | None = None


class ConversationUpdate(Model):
    metadata: Metadata | None


class NewItems(Model):
    items: Annotated[_Added, Field(min_length=1)]


class NewHead(Model):
    """Compare and set: `expected` is what the head is believed to be; null is no turn at all."""

    turn: _TurnId | None
    expected: _TurnId | None
