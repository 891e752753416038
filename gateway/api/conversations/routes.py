"""`/v1/conversations`: OpenAI's Conversations API, and our additions: the list of a tenant's
conversations, a conversation's tree, and moving its head.

The items of a conversation are those from the root of its tree to its head.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.admission.admission import Admission
from penstock.gateway.api.conversations.schema import (
    ConversationUpdate,
    ListQuery,
    NewConversation,
    NewHead,
    NewItems,
    SearchQuery,
    TreeQuery,
)
from penstock.gateway.api.responses.prompt import image_sources
from penstock.gateway.api.responses.service import ResponseService
from penstock.gateway.api.schema.messages import InputItem
from penstock.gateway.api.schema.parsing import parse_fields
from penstock.gateway.api.shared.items import (
    IncludeQuery,
    ItemsQuery,
    item_objects,
    item_page,
    list_object,
    read_query,
    shown_item,
    shown_items,
    without_logprobs,
)
from penstock.gateway.api.shared.json_api import json_response, read_json
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations.ids import new_conversation_id, new_turn_id
from penstock.gateway.storage.conversations.records import (
    Conversation,
    Item,
    StoredTurn,
    TurnSummary,
)
from penstock.gateway.storage.conversations.store import ConversationStore, no_turn
from penstock.gateway.storage.tenant_shares import StoreLimitError

_ONE = "/v1/conversations/{conversation_id}"
_ITEMS = f"{_ONE}/items"


class _Endpoints:
    """Shared by both classes of endpoints: reading bodies, finding a conversation, adding items."""

    def __init__(
        self,
        store: ConversationStore,
        admission: Admission,
        service: ResponseService,
        *,
        max_body_bytes: int,
    ) -> None:
        self._store = store
        self._admission = admission
        self._service = service
        self._max_body_bytes = max_body_bytes

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_json(request, max_bytes=self._max_body_bytes)

    async def _body_to_store(self, request: Request) -> dict[str, Any]:
        """The body of a request that counts against the tenant's limits, because it stores."""
        await self._admission.count(caller_of(request.scope))
        return await self._body(request)

    async def _conversation(self, request: Request) -> Conversation:
        """The conversation in the path. Raises: NotFoundError."""
        return await self._store.get(_tenant(request), request.path_params["conversation_id"])

    async def _add(
        self, conversation: Conversation, given: Sequence[InputItem], *, created_at: int
    ) -> tuple[Item, ...]:
        """Add items as a turn; returns them as they are listed."""
        loaded = await self._service.images.load(image_sources(given, param="items"))
        files = {image.digest: image.data for image in loaded}
        items = item_objects(given, loaded)
        await self._store.add_items(
            StoredTurn(
                turn_id=new_turn_id(conversation.conversation_id),
                conversation_id=conversation.conversation_id,
                tenant=conversation.tenant,
                parent_id=None,  # the store sets it to the current head
                status="completed",
                created_at=created_at,
                items=items,
                images=files,
            )
        )
        return tuple(shown_item(item, files) for item in items)


class Conversations(_Endpoints):
    """Endpoints of conversations."""

    @operation(
        "POST /v1/conversations",
        "Create a conversation.",
        "Conversation",
        body=(NewConversation,),
        links={"conversation_id": "$response.body#/id"},
        next_bodies={
            "POST /v1/responses": {"input": "Hello", "conversation": "$response.body#/id"},
        },
    )
    async def create(self, request: Request) -> Response:
        asked = parse_fields(NewConversation, await self._body_to_store(request))
        conversation = Conversation(
            conversation_id=new_conversation_id(),
            tenant=_tenant(request),
            created_at=int(time.time()),
            metadata=asked.metadata or {},
        )
        await self._store.create(conversation)
        try:
            if asked.items:
                await self._add(conversation, asked.items, created_at=conversation.created_at)
        except StoreLimitError:
            await self._store.delete(conversation.tenant, conversation.conversation_id)
            raise
        return json_response(_conversation_object(conversation))

    @operation(
        "GET /v1/conversations",
        "List the tenant's conversations.",
        "Conversations",
        query=ListQuery,
        statuses=(404,),
    )
    async def list(self, request: Request) -> Response:
        query, tenant = read_query(ListQuery, request.query_params), _tenant(request)
        page, has_more = await self._store.list_page(
            tenant,
            limit=query.limit,
            after=query.after,
            newest_first=query.order == "desc",
            pinned=query.pinned,
        )
        listed = list_object([_conversation_object(c) for c in page], has_more=has_more)
        kept: dict[str, Any] = {"store": self._store.kind, "durable": self._store.is_durable}
        if query.after is None:
            holdings = await self._store.holdings(tenant)
            if holdings.num_dropped:
                kept |= {"num_dropped": holdings.num_dropped, "dropped_at": holdings.dropped_at}
        return json_response(listed | {"penstock": kept})

    @operation(
        "GET /v1/conversations/search",
        "Find words in the tenant's conversations.",
        "FoundConversations",
        query=SearchQuery,
        statuses=(501,),
    )
    async def search(self, request: Request) -> Response:
        query = read_query(SearchQuery, request.query_params)
        hits, has_more = await self._store.search(
            _tenant(request), query.query, limit=query.limit, offset=query.offset
        )
        found = [
            {
                "conversation": _conversation_object(hit.conversation),
                "turn": hit.turn_id,
                "excerpt": hit.excerpt,
            }
            for hit in hits
        ]
        return json_response({"object": "list", "data": found, "has_more": has_more})

    @operation(f"GET {_ONE}", "Retrieve a conversation.", "Conversation")
    async def retrieve(self, request: Request) -> Response:
        return json_response(_conversation_object(await self._conversation(request)))

    @operation(
        f"POST {_ONE}",
        "Update a conversation's metadata, pin or unpin it.",
        "Conversation",
        body=(ConversationUpdate,),
    )
    async def update(self, request: Request) -> Response:
        asked = parse_fields(ConversationUpdate, await self._body_to_store(request))
        has_metadata = "metadata" in asked.model_fields_set
        if not has_metadata and asked.pinned is None:
            raise RequestRefusedError(
                "metadata is required",
                code="missing_required_parameter",
                param="metadata",
                status=400,
            )
        conversation = await self._store.update(
            _tenant(request),
            request.path_params["conversation_id"],
            metadata=asked.metadata or {} if has_metadata else None,
            is_pinned=asked.pinned,
        )
        return json_response(_conversation_object(conversation))

    @operation(f"DELETE {_ONE}", "Delete a conversation.", "Deleted", statuses=(409,))
    async def delete(self, request: Request) -> Response:
        conversation_id = request.path_params["conversation_id"]
        await self._service.delete_conversation(caller_of(request.scope), conversation_id)
        return json_response(
            {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
        )

    @operation(
        f"GET {_ONE}/tree",
        "List a conversation's turns.",
        "Tree",
        query=TreeQuery,
        links={
            "conversation_id": "$request.path.conversation_id",
            "turn": "$response.body#/head",
        },
    )
    async def tree(self, request: Request) -> Response:
        query = read_query(TreeQuery, request.query_params)
        conversation = await self._conversation(request)
        turns = await self._store.tree(conversation.tenant, conversation.conversation_id)
        end = conversation.running or conversation.head
        ends = {end} if query.items and end else set()
        if query.items == "all":
            parents = {turn.parent_id for turn in turns}
            ends = {turn.turn_id for turn in turns if turn.turn_id not in parents}
        said: dict[str, StoredTurn] = {}
        for leaf in ends:
            said |= {turn.turn_id: turn for turn in await self._path_to(leaf, turns, conversation)}
        return json_response(
            {
                "object": "conversation.tree",
                "conversation_id": conversation.conversation_id,
                "head": conversation.head,
                "running": conversation.running,
                "data": [_turn_object(turn, said.get(turn.turn_id)) for turn in turns],
            }
        )

    async def _path_to(
        self, leaf: str, turns: Sequence[TurnSummary], conversation: Conversation
    ) -> Sequence[StoredTurn]:
        """The turns up to one, from the root or from where a response was deleted."""
        parents = {turn.turn_id: turn.parent_id for turn in turns}
        path: list[str] = []
        at: str | None = leaf
        while at in parents:
            path.append(at)
            at = parents[at]
        if at is None:
            return await self._store.path(conversation.tenant, leaf)
        return [await self._store.turn(conversation.tenant, each) for each in path]

    @operation(
        f"DELETE {_ONE}/turns/{{turn}}",
        "Delete a turn; those after it then continue the one before it.",
        "Conversation",
        statuses=(409,),
    )
    async def delete_turn(self, request: Request) -> Response:
        conversation, turn_id = await self._conversation(request), request.path_params["turn"]
        turn = await self._store.turn(conversation.tenant, turn_id)
        if turn.conversation_id != conversation.conversation_id:
            raise no_turn(turn_id)
        await self._service.delete_turn(caller_of(request.scope), turn)
        return json_response(_conversation_object(conversation))

    @operation(
        f"POST {_ONE}/head",
        "Move a conversation's head to another turn.",
        "Head",
        body=(NewHead,),
        statuses=(409,),
    )
    async def set_head(self, request: Request) -> Response:
        asked = parse_fields(NewHead, await self._body(request))
        conversation_id = request.path_params["conversation_id"]
        await self._store.set_head(
            _tenant(request), conversation_id, asked.turn, expected=asked.expected
        )
        return json_response(
            {
                "object": "conversation.head",
                "conversation_id": conversation_id,
                "turn": asked.turn,
            }
        )


class ConversationItems(_Endpoints):
    """Endpoints of a conversation's items."""

    @operation(
        f"POST {_ITEMS}",
        "Add items to a conversation.",
        "Items",
        body=(NewItems,),
        query=IncludeQuery,
        statuses=(409,),
        links={
            "conversation_id": "$request.path.conversation_id",
            "item_id": "$response.body#/first_id",
        },
    )
    async def create(self, request: Request) -> Response:
        query = read_query(IncludeQuery, request.query_params)
        asked = parse_fields(NewItems, await self._body_to_store(request))
        conversation = await self._conversation(request)
        items = await self._add(conversation, asked.items, created_at=int(time.time()))
        return json_response(list_object([_shown(item, query) for item in items], has_more=False))

    @operation(f"GET {_ITEMS}", "List a conversation's items.", "Items", query=ItemsQuery)
    async def list(self, request: Request) -> Response:
        path = await self._path(await self._conversation(request))
        items = [item for turn in path for item in (*shown_items(turn), *turn.output)]
        return json_response(item_page(items, request.query_params))

    @operation(f"GET {_ITEMS}/{{item_id}}", "Retrieve an item.", "Item", query=IncludeQuery)
    async def retrieve(self, request: Request) -> Response:
        query = read_query(IncludeQuery, request.query_params)
        turn, item = await self._find(request, await self._conversation(request))
        item = next((each for each in shown_items(turn) if each["id"] == item["id"]), item)
        return json_response(_shown(item, query))

    @operation(f"DELETE {_ITEMS}/{{item_id}}", "Delete an item.", "Conversation", statuses=(409,))
    async def delete(self, request: Request) -> Response:
        conversation = await self._conversation(request)
        turn, item = await self._find(request, conversation)
        await self._service.delete_item(caller_of(request.scope), turn, item["id"])
        return json_response(_conversation_object(conversation))

    async def _path(self, conversation: Conversation) -> Sequence[StoredTurn]:
        if conversation.head is None:
            return []
        return await self._store.path(conversation.tenant, conversation.head)

    async def _find(self, request: Request, conversation: Conversation) -> tuple[StoredTurn, Item]:
        """The item in the path, and its turn."""
        item_id = request.path_params["item_id"]
        for turn in await self._path(conversation):
            for item in turn.all_items:
                if item["id"] == item_id:
                    return turn, item
        raise RequestRefusedError(
            f"the conversation has no item {item_id!r}",
            code="item_not_found",
            param="item_id",
            status=404,
        )


def _tenant(request: Request) -> str:
    return caller_of(request.scope).tenant


def _shown(item: Item, query: IncludeQuery) -> Item:
    return item if query.has_logprobs else without_logprobs(item)


def _conversation_object(conversation: Conversation) -> dict[str, Any]:
    shown = {
        "id": conversation.conversation_id,
        "object": "conversation",
        "created_at": conversation.created_at,
        "metadata": dict(conversation.metadata),
        "used_at": max(conversation.used_at, conversation.created_at),
    }
    return shown | {"pinned": True} if conversation.is_pinned else shown


def _turn_object(turn: TurnSummary, said: StoredTurn | None) -> dict[str, Any]:
    is_response = turn.turn_id.startswith("resp_")
    items: dict[str, Any] = {}
    if said is not None:
        output = said.output if len(said.output) > 1 else next(iter(said.output), None)
        items = {"items": shown_items(said), "output": output}
        if said.status == "incomplete" and said.response:
            items["incomplete_details"] = orjson.loads(said.response)["incomplete_details"]
    return {
        "turn": turn.turn_id,
        "parent": turn.parent_id,
        "status": turn.status,
        "response_id": turn.turn_id if is_response else None,
        "created_at": turn.created_at,
        **items,
    }
