"""Conversations in Redis, shared by all gateways and kept when they end.

    penstock:{<tree>}:conversation           hash: tenant, created_at, metadata, head, running, …
    penstock:{<tree>}:links                  hash: turn → order, parent, status, created at, lease
    penstock:{<tree>}:turns                  hash: turn → `turn_codec`
    penstock:{<tree>}:token_ids              hash: its chunks of token ids
    penstock:{<tenant's digest>}:conversations   sorted set: listed conversation → last turn

All keys of a conversation are in one slot, expire together some time after their last use, and are
changed atomically by one script (`conversation.lua`). The index is in another slot: a listing
removes entries whose conversation no longer exists.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import msgpack

from penstock.gateway.storage.conversations.ids import conversation_of, tree_of
from penstock.gateway.storage.conversations.records import Conversation, StoredTurn, TurnSummary
from penstock.gateway.storage.conversations.store import (
    DEFAULT_LEASE_S,
    DEFAULT_TTL_S,
    MAX_ADDED_BYTES,
    ConversationLockedError,
    NotFoundError,
    StoreUnavailableError,
    UnreadableDataError,
    head_locked,
    no_conversation,
    no_turn,
)
from penstock.gateway.storage.conversations.turn_codec import TreeNode, chunk_names, pack, unpack
from penstock.gateway.storage.redis.link import RedisLink, Script
from penstock.gateway.storage.redis.shares import RedisShares
from penstock.gateway.storage.tenant_shares import StoreLimitError

_FOLDER = files("penstock.gateway.storage.conversations")
_CONVERSATION = Script(_FOLDER.joinpath("conversation.lua").read_text("utf-8"))
_LISTING = Script(_FOLDER.joinpath("listing.lua").read_text("utf-8"))
_KEYS = ("conversation", "links", "turns", "token_ids")
# What stores without the engine waits until what had to go for it is gone. A turn, which admission
# has let in, does not wait for a round trip more.
_UNADMITTED = ("set_metadata", "add_items")
_NUM_AT_ONCE = 16  # lookups of a listing
# What decoding raises for bytes that are not ours.
_UNREADABLE = (
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
    struct.error,
    msgpack.UnpackException,
)
_NUM_CLEANED = 256  # ids read at once after some turned out to be gone


class RedisConversationStore:
    """A `ConversationStore`.

    Args:
        ttl_s: how long a conversation is kept after its last use.
        lease_s: how long a turn may run without being touched.
        shares: the account of what tenants keep in this Redis; None: nobody counts it.
    """

    is_durable = True

    def __init__(
        self,
        link: RedisLink,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        lease_s: float = DEFAULT_LEASE_S,
        shares: RedisShares | None = None,
    ) -> None:
        self._link = link
        self._shares = shares
        if shares is not None:
            shares.add_kind("conv_", self._evict)
        self._ttl_s = ttl_s
        self._ttl_ms = round(ttl_s * 1000)
        self._lease_ms = round(lease_s * 1000)

    async def create(self, conversation: Conversation) -> None:
        conversation_id, tenant = conversation.conversation_id, conversation.tenant
        await self._run(
            "create",
            tenant,
            conversation_id,
            conversation.created_at,
            int(conversation.is_listed),
            _pack_metadata(conversation.metadata),
        )
        await self._list(conversation)

    async def get(self, tenant: str, conversation_id: str) -> Conversation:
        fields = await self._run("get", tenant, conversation_id)
        return self._conversation(tenant, conversation_id, fields)

    async def list_page(
        self, tenant: str, *, limit: int, after: str | None = None, newest_first: bool = True
    ) -> tuple[list[Conversation], bool]:
        page: list[Conversation] = []
        num_looked_at = limit + 1
        while True:
            wanted = (after or "", num_looked_at, int(newest_first))
            reply = await self._run_listing("page", tenant, *wanted)
            if reply[0] != b"ok":
                assert after is not None
                raise no_conversation(after, param="after")
            ids = reply[1:]
            found = await self._peek(tenant, [id_.decode(errors="replace") for id_ in ids])
            page += found
            gone = set(ids) - {conversation.conversation_id.encode() for conversation in found}
            if gone:
                await self._run_listing("remove", tenant, *gone)
            if len(page) > limit or len(ids) < num_looked_at:
                return page[:limit], len(page) > limit
            # Some were gone: continue after the last existing one.
            after = page[-1].conversation_id if page else after
            num_looked_at = _NUM_CLEANED

    async def set_metadata(
        self, tenant: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> Conversation:
        packed = _pack_metadata(metadata)
        fields = await self._run("set_metadata", tenant, conversation_id, packed)
        conversation = self._conversation(tenant, conversation_id, fields)
        await self._list(conversation)
        return conversation

    async def delete(self, tenant: str, conversation_id: str) -> None:
        await self._run("delete", tenant, conversation_id)
        with contextlib.suppress(UnreadableDataError):  # the link has logged it
            await self._run_listing("remove", tenant, conversation_id)

    async def begin_turn(self, turn: StoredTurn, *, takes_head: bool) -> None:
        await self._run(
            "begin_turn",
            turn.tenant,
            turn.conversation_id,
            turn.turn_id,
            turn.parent_id or "",
            turn.created_at,
            int(takes_head),
            *_packed(turn),
            turn_id=turn.parent_id,
        )

    async def touch_turn(self, tenant: str, turn_id: str) -> None:
        try:
            await self._run_on_turn("touch_turn", tenant, turn_id)
        except NotFoundError:
            return

    async def finish_turn(self, turn: StoredTurn) -> None:
        arguments = (turn.turn_id, turn.status, *_packed(turn))
        try:
            fields = await self._run("finish_turn", turn.tenant, turn.conversation_id, *arguments)
        except NotFoundError:  # deleted meanwhile
            return
        conversation = self._conversation(turn.tenant, turn.conversation_id, fields)
        await self._list(conversation, turn.created_at)

    async def add_items(self, turn: StoredTurn) -> None:
        shares = self._shares
        max_bytes = None if shares is None else shares.max_bytes_of(turn.tenant)
        bounds = ("" if max_bytes is None else max_bytes, MAX_ADDED_BYTES)
        arguments = (turn.turn_id, turn.created_at, *bounds, *_packed(turn))
        fields = await self._run("add_items", turn.tenant, turn.conversation_id, *arguments)
        conversation = self._conversation(turn.tenant, turn.conversation_id, fields)
        await self._list(conversation, turn.created_at)

    async def replace_items(self, turn: StoredTurn) -> None:
        await self._run_on_turn("replace_items", turn.tenant, turn.turn_id, *_packed(turn))

    async def turn(self, tenant: str, turn_id: str) -> StoredTurn:
        values = await self._run_on_turn("turn", tenant, turn_id)
        return (await self._unpacked(tenant, turn_id, values))[0]

    async def path(self, tenant: str, turn_id: str) -> list[StoredTurn]:
        values = await self._run_on_turn("path", tenant, turn_id)
        return (await self._unpacked(tenant, turn_id, values))[::-1]

    async def tree(self, tenant: str, conversation_id: str) -> Sequence[TurnSummary]:
        values = await self._run("tree", tenant, conversation_id)
        with self._reading(conversation_id):
            nodes = sorted(_fives(values), key=lambda node: int(node[4]))
            return [
                TurnSummary(
                    turn_id=turn.decode(),
                    parent_id=parent.decode() or None,
                    status=status.decode(),
                    created_at=int(created_at),
                )
                for turn, parent, status, created_at, _ in nodes
            ]

    async def set_head(
        self, tenant: str, conversation_id: str, turn_id: str | None, *, expected: str | None
    ) -> None:
        wanted = (turn_id or "", expected or "")
        await self._run("set_head", tenant, conversation_id, *wanted, turn_id=turn_id)

    async def delete_turn(self, tenant: str, turn_id: str) -> None:
        await self._run_on_turn("delete_turn", tenant, turn_id)

    # -- scripts -----------------------------------------------------------------------------

    async def _run_on_turn(self, operation: str, tenant: str, turn_id: str, *args: Any) -> Any:
        conversation_id = conversation_of(turn_id)
        if conversation_id is None:
            raise no_turn(turn_id)
        try:
            return await self._run(
                operation, tenant, conversation_id, turn_id, *args, turn_id=turn_id
            )
        except NotFoundError:
            raise no_turn(turn_id) from None

    async def _run(
        self,
        operation: str,
        tenant: str,
        conversation_id: str,
        *args: Any,
        turn_id: str | None = None,
    ) -> list[Any]:
        """Run an operation of `conversation.lua`; returns its reply without the first word.
        `turn_id` is the turn to name in an error if it does not exist."""
        tree = tree_of(conversation_id)
        if tree is None:
            raise no_conversation(conversation_id)
        keys = [f"penstock:{{{tree}}}:{name}" for name in _KEYS]
        arguments = [operation, tenant, self._ttl_ms, self._lease_ms, *args]
        reply = await self._run_or_make_room(tenant, keys, arguments)
        word, *values = reply
        if word == b"locked":
            raise head_locked(conversation_id)
        if word == b"no conversation":
            raise no_conversation(conversation_id)
        if word == b"no turn":
            assert turn_id is not None
            raise no_turn(turn_id)
        if word == b"too large":
            raise StoreLimitError(conversation_id, int(values[0]))
        num_bytes, *values = values
        if self._shares is not None:
            if operation in _UNADMITTED:
                await self._shares.tell(tenant, conversation_id, num_bytes, ttl_s=self._ttl_s)
            elif operation not in ("peek", "evict"):
                self._shares.tell_soon(tenant, conversation_id, num_bytes, ttl_s=self._ttl_s)
        return values

    async def _run_or_make_room(
        self, tenant: str, keys: Sequence[str], arguments: Sequence[Any]
    ) -> list[Any]:
        try:
            reply: list[Any] = await self._link.run(_CONVERSATION, keys, arguments)
        except StoreUnavailableError as error:
            num_bytes = sum(len(each) for each in arguments if isinstance(each, bytes))
            shares = self._shares
            if shares is None or not await shares.make_room(tenant, num_bytes, error.__cause__):
                raise
            reply = await self._link.run(_CONVERSATION, keys, arguments)
        return reply

    async def _evict(self, tenant: str, conversation_id: str) -> bool:
        """Delete a conversation to make room; False: a turn runs."""
        try:
            await self._run("evict", tenant, conversation_id)
        except NotFoundError:
            return True
        except ConversationLockedError:
            return False
        with contextlib.suppress(UnreadableDataError):
            await self._run_listing("remove", tenant, conversation_id)
        return True

    async def _unpacked(self, tenant: str, turn_id: str, values: Sequence[Any]) -> list[StoredTurn]:
        """The turns of a reply, with the token ids that they share."""
        conversation_id = conversation_of(turn_id)
        assert conversation_id is not None
        bodies = {}
        with self._reading(conversation_id):
            for found_id, parent, status, created_at, body in _fives(values):
                node = TreeNode(
                    turn_id=found_id.decode(),
                    conversation_id=conversation_id,
                    tenant=tenant,
                    parent_id=parent.decode() or None,
                    status=status.decode(),
                    created_at=int(created_at),
                )
                bodies[node] = body
        if None in bodies.values():  # a full Redis has evicted the key
            raise no_turn(turn_id)
        with self._reading(conversation_id):
            names = list({name: None for body in bodies.values() for name in chunk_names(body)})
        chunks: list[Any] = []
        if names:
            key = f"penstock:{{{tree_of(turn_id)}}}:token_ids"
            with self._link.answering(key):
                chunks = await self._link.client.hmget(key, names)
        if None in chunks:  # deleted meanwhile
            raise no_turn(turn_id)
        by_name = dict(zip(names, chunks, strict=True))
        with self._reading(conversation_id):
            return [unpack(node, body, by_name) for node, body in bodies.items()]

    def _conversation(
        self, tenant: str, conversation_id: str, fields: Sequence[bytes]
    ) -> Conversation:
        with self._reading(conversation_id):
            created_at, is_listed, metadata, head, running = fields
            return Conversation(
                conversation_id=conversation_id,
                tenant=tenant,
                created_at=int(created_at),
                metadata=msgpack.unpackb(metadata),
                head=head.decode() or None,
                running=running.decode() or None,
                is_listed=is_listed == b"1",
            )

    @contextlib.contextmanager
    def _reading(self, conversation_id: str) -> Iterator[None]:
        """A context for decoding what a conversation's keys hold.

        Raises:
            UnreadableDataError: it is not what this store writes.
        """
        try:
            yield
        except _UNREADABLE as error:
            key = f"penstock:{{{tree_of(conversation_id)}}}:conversation"
            raise self._link.unreadable(key, error) from error

    async def _run_listing(self, operation: str, tenant: str, *args: Any) -> list[Any]:
        digest = hashlib.sha256(tenant.encode()).hexdigest()[:32]
        key = f"penstock:{{{digest}}}:conversations"
        # Reading a conversation does not touch the index, so the index is kept longer.
        reply: list[Any] = await self._link.run(
            _LISTING, [key], [operation, 2 * self._ttl_ms, *args]
        )
        return reply

    async def _list(self, conversation: Conversation, used_at: int = 0) -> None:
        if conversation.is_listed:
            added = (max(used_at, conversation.created_at), conversation.conversation_id)
            with contextlib.suppress(UnreadableDataError):  # it can be used without the list
                await self._run_listing("add", conversation.tenant, *added)

    async def _peek(self, tenant: str, ids: Sequence[str]) -> list[Conversation]:
        """The existing, readable ones of some conversations; this does not count as use."""

        async def peek(conversation_id: str) -> Conversation | None:
            try:
                fields = await self._run("peek", tenant, conversation_id)
                return self._conversation(tenant, conversation_id, fields)
            except (NotFoundError, UnreadableDataError):
                return None

        found: list[Conversation | None] = []
        for start in range(0, len(ids), _NUM_AT_ONCE):
            found += await asyncio.gather(*map(peek, ids[start : start + _NUM_AT_ONCE]))
        return [conversation for conversation in found if conversation is not None]


def _fives(values: Sequence[Any]) -> list[Sequence[Any]]:
    return [values[start : start + 5] for start in range(0, len(values), 5)]


def _packed(turn: StoredTurn) -> list[bytes]:
    """Arguments for `conversation.lua`: the body, and name and bytes of each chunk."""
    packed = pack(turn)
    return [packed.body, *(part for chunk in packed.chunks.items() for part in chunk)]


def _pack_metadata(metadata: Mapping[str, str]) -> bytes:
    packed: bytes = msgpack.packb(dict(metadata))
    return packed
