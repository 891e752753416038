"""`/v1/conversations`: OpenAI's, and penstock's list, tree and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal

from ..objects import (
    Conversation,
    ConversationHead,
    ConversationPage,
    ConversationTree,
    Deleted,
    FoundConversations,
    Item,
    ItemPage,
)
from ..operation import R, Resource, operation
from ..parameters import Message
from ..server import Server
from ..steps import Steps

Order = Literal["asc", "desc"]


class Conversations(Resource[R], Generic[R]):
    """Conversations, which the server keeps as trees of turns."""

    def __init__(self, runner: R, server: Server) -> None:
        super().__init__(runner)
        self._server = server
        self.items = ConversationItems(runner, server)

    @operation
    def create(
        self,
        *,
        items: Sequence[Message] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> Steps[Conversation]:
        body = _given(items=items, metadata=metadata)
        answer: Conversation = yield from _call(self._server, "POST", "", body=body)
        return answer

    @operation
    def list(
        self,
        *,
        limit: int | None = None,
        after: str | None = None,
        order: Order | None = None,
        pinned: bool | None = None,
    ) -> Steps[ConversationPage]:
        """A page of the caller's conversations, the last used first; `pinned`: only those that are
        pinned, or that are not."""
        query = {"limit": limit, "after": after, "order": order}
        if pinned is not None:
            query["pinned"] = str(pinned).lower()
        answer: ConversationPage = yield from _call(self._server, "GET", "", query=query)
        return answer

    @operation
    def search(
        self, query: str, *, limit: int | None = None, offset: int | None = None
    ) -> Steps[FoundConversations]:
        """Where words are, the newest first: in titles, and in the messages of one turn.

        Raises:
            ServerError: 501 `search_not_supported`: the server keeps conversations in Redis.
        """
        asked = {"query": query, "limit": limit, "offset": offset}
        answer: FoundConversations = yield from _call(self._server, "GET", "/search", query=asked)
        return answer

    @operation
    def retrieve(self, conversation_id: str) -> Steps[Conversation]:
        answer: Conversation = yield from _call(self._server, "GET", f"/{conversation_id}")
        return answer

    @operation
    def update(
        self,
        conversation_id: str,
        *,
        metadata: Mapping[str, str] | None = None,
        pinned: bool | None = None,
    ) -> Steps[Conversation]:
        """Replace its metadata; keep it above the others in the page's list, or no longer."""
        body = _given(metadata=metadata, pinned=pinned)
        answer: Conversation = yield from _call(
            self._server, "POST", f"/{conversation_id}", body=body
        )
        return answer

    @operation
    def delete(self, conversation_id: str) -> Steps[Deleted]:
        answer: Deleted = yield from _call(self._server, "DELETE", f"/{conversation_id}")
        return answer

    @operation
    def tree(
        self, conversation_id: str, *, items: Literal["path", "all"] | None = None
    ) -> Steps[ConversationTree]:
        """Every turn, the head, and the turn that runs on it.

        Args:
            items: which turns have `items` and `output`: those on the path to the head, or all.
        """
        query = {"items": "true" if items == "path" else items}
        answer: ConversationTree = yield from _call(
            self._server, "GET", f"/{conversation_id}/tree", query=query
        )
        return answer

    @operation
    def set_head(
        self, conversation_id: str, turn: str | None, *, expected: str | None
    ) -> Steps[ConversationHead]:
        """Move the head to a turn (None: to before the first).

        Raises:
            ConflictError: the head is no longer `expected`, or a turn is running on it.
        """
        body = {"turn": turn, "expected": expected}
        answer: ConversationHead = yield from _call(
            self._server, "POST", f"/{conversation_id}/head", body=body
        )
        return answer

    @operation
    def delete_turn(self, conversation_id: str, turn: str) -> Steps[Conversation]:
        """Delete a turn; those after it then continue the one before it.

        Raises:
            ConflictError: a turn of the conversation is running.
        """
        answer: Conversation = yield from _call(
            self._server, "DELETE", f"/{conversation_id}/turns/{turn}"
        )
        return answer


class ConversationItems(Resource[R], Generic[R]):
    """The items of a conversation, from its root to its head."""

    def __init__(self, runner: R, server: Server) -> None:
        super().__init__(runner)
        self._server = server

    @operation
    def create(self, conversation_id: str, *, items: Sequence[Message]) -> Steps[ItemPage]:
        answer: ItemPage = yield from _call(
            self._server, "POST", f"/{conversation_id}/items", body={"items": items}
        )
        return answer

    @operation
    def list(
        self,
        conversation_id: str,
        *,
        limit: int | None = None,
        after: str | None = None,
        order: Order | None = None,
    ) -> Steps[ItemPage]:
        query = {"limit": limit, "after": after, "order": order}
        answer: ItemPage = yield from _call(
            self._server, "GET", f"/{conversation_id}/items", query=query
        )
        return answer

    @operation
    def retrieve(self, conversation_id: str, item_id: str) -> Steps[Item]:
        answer: Item = yield from _call(self._server, "GET", f"/{conversation_id}/items/{item_id}")
        return answer

    @operation
    def delete(self, conversation_id: str, item_id: str) -> Steps[Conversation]:
        answer: Conversation = yield from _call(
            self._server, "DELETE", f"/{conversation_id}/items/{item_id}"
        )
        return answer


def _given(**values: object) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _call(
    server: Server,
    method: str,
    path: str,
    *,
    body: Mapping[str, Any] | None = None,
    query: Mapping[str, str | int | None] | None = None,
) -> Steps[Any]:
    """Only requests that change nothing are sent again if they may have arrived."""
    request = server.request(
        method, f"/conversations{path}", body=body, query=query, is_repeatable=method == "GET"
    )
    return (yield from server.call(request))
