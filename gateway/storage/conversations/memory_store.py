"""Conversations in this process's memory, bounded in bytes and age.

Whose are dropped first is in `tenant_shares`: the least recently used, whole; one with a running
turn stays. Turns are kept as bytes (`turn_codec`), as in Redis, and share token ids within their
conversation.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.gateway.storage.conversations import texts, tree
from penstock.gateway.storage.conversations.ids import conversation_of
from penstock.gateway.storage.conversations.records import (
    Conversation,
    Holdings,
    SearchHit,
    StoredTurn,
    TurnSummary,
)
from penstock.gateway.storage.conversations.store import (
    DEFAULT_TTL_S,
    STARTS_S,
    StoreKind,
    no_conversation,
    no_turn,
)
from penstock.gateway.storage.conversations.tree import Change, Operation, Tree, Uses
from penstock.gateway.storage.conversations.turn_codec import chunk_names, pack, unpack
from penstock.gateway.storage.tenant_shares import TenantShares

_NUM_SCANNED = 16  # conversations, between two turns of the event loop


@dataclass(slots=True)
class _Kept:
    """A conversation: its tree, and the content of its turns."""

    tree: Tree
    used_s: float
    bodies: dict[str, bytes] = field(default_factory=dict)
    chunks: dict[bytes, bytes] = field(default_factory=dict)

    def apply(self, change: Change) -> None:
        assert change.tree is not None
        self.tree = change.tree
        for turn_id in change.dropped:
            del self.bodies[turn_id]
        for name in change.dropped_chunks:
            del self.chunks[name]
        self.chunks.update(change.chunks)
        if change.body is not None:
            turn_id, self.bodies[turn_id] = change.body

    @property
    def uses(self) -> Uses:
        return {turn_id: chunk_names(body) for turn_id, body in self.bodies.items()}


class MemoryConversationStore:
    """A `ConversationStore`.

    Args:
        max_bytes: total size, not counting conversations with running turns.
        ttl_s: how long a conversation is kept after its last use.
        running: ids of the responses that run.
        starts_s: see `STARTS_S`.
        shares: of the tenants in all stores of this process; None: there is only this store.
        clock: monotonic seconds.
    """

    kind: StoreKind = "memory"
    is_durable = False

    def __init__(
        self,
        max_bytes: int,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        running: Collection[str] = (),
        starts_s: float = STARTS_S,
        shares: TenantShares | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shelf = (shares or TenantShares()).shelf(
            max_bytes, drop=self._drop_for_room, is_in_use=self._is_in_use
        )
        self._ttl_s = ttl_s
        self._running = running
        self._starts_ms = round(starts_s * 1000)
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # used least recently first
        self._dropped: dict[str, tuple[int, int]] = {}  # by tenant: how many, and when the last

    @property
    def num_bytes(self) -> int:
        return self._shelf.num_bytes

    async def create(self, conversation: Conversation) -> None:
        if conversation.conversation_id not in self._kept:
            made = tree.create(conversation)
            self._kept[conversation.conversation_id] = _Kept(made, self._clock())
            self._account(made)

    async def get(self, tenant: str, conversation_id: str) -> Conversation:
        return self._use(tenant, conversation_id).tree.conversation(self._now_ms)

    async def list_page(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None = None,
        newest_first: bool = True,
        pinned: bool | None = None,
    ) -> tuple[list[Conversation], bool]:
        listed = self._listed(tenant, newest_first=newest_first)
        start = 0
        if after is not None:
            ids = [each.conversation_id for each in listed]
            if after not in ids:
                raise no_conversation(after, param="after")
            start = ids.index(after) + 1
        wanted = (each for each in listed[start:] if pinned in (None, each.is_pinned))
        page = list(itertools.islice(wanted, limit + 1))
        return [each.conversation(self._now_ms) for each in page[:limit]], len(page) > limit

    async def search(
        self, tenant: str, query: str, *, limit: int, offset: int = 0
    ) -> tuple[list[SearchHit], bool]:
        phrases = texts.phrases_of(query)
        found: list[tuple[int, SearchHit]] = []
        for index, listed in enumerate(self._listed(tenant) if phrases else ()):
            if index % _NUM_SCANNED == 0:
                await asyncio.sleep(0)
            kept = self._kept.get(listed.conversation_id)
            hit = None if kept is None else self._searched(kept, phrases)
            if hit is not None:
                found.append(hit)
        found.sort(key=lambda each: each[0], reverse=True)
        hits = [hit for _, hit in found[offset : offset + limit]]
        return hits, len(found) > offset + limit

    async def holdings(self, tenant: str) -> Holdings:
        num_dropped, dropped_at = self._dropped.get(tenant, (0, None))
        return Holdings(
            num_conversations=sum(1 for _ in self._all_listed(tenant)),
            num_bytes=self._shelf.held_by(tenant)[0],
            num_dropped=num_dropped,
            dropped_at=dropped_at,
        )

    async def update(
        self,
        tenant: str,
        conversation_id: str,
        *,
        metadata: Mapping[str, str] | None = None,
        is_pinned: bool | None = None,
    ) -> Conversation:
        kept = self._use(tenant, conversation_id)
        self._apply(kept, partial(tree.update, metadata=metadata, is_pinned=is_pinned))
        return kept.tree.conversation(self._now_ms)

    async def delete(self, tenant: str, conversation_id: str) -> None:
        self._use(tenant, conversation_id)
        self._drop(conversation_id)

    async def begin_turn(self, turn: StoredTurn, *, takes_head: bool) -> None:
        kept = self._use(turn.tenant, turn.conversation_id)
        operation = partial(
            tree.begin_turn,
            turn=turn,
            packed=pack(turn),
            takes_head=takes_head,
            starts_ms=self._starts_ms,
        )
        self._apply(kept, operation)

    async def finish_turn(self, turn: StoredTurn) -> None:
        kept = self._find(turn.tenant, turn.conversation_id)
        if kept is not None:
            self._use(turn.tenant, turn.conversation_id)
            self._apply(kept, partial(tree.finish_turn, turn=turn, packed=pack(turn)))

    async def add_items(self, turn: StoredTurn) -> None:
        kept = self._use(turn.tenant, turn.conversation_id)
        max_bytes = self._shelf.max_bytes_of(turn.tenant)
        operation = partial(tree.add_items, turn=turn, packed=pack(turn), max_bytes=max_bytes)
        self._apply(kept, operation)

    async def replace_items(self, turn: StoredTurn) -> None:
        kept = self._with_turn(turn.tenant, turn.turn_id)
        operation = partial(tree.replace_items, turn=turn, packed=pack(turn))
        self._apply(kept, operation, needs_uses=True)

    async def turn(self, tenant: str, turn_id: str) -> StoredTurn:
        return self._unpacked(self._with_turn(tenant, turn_id), turn_id)

    async def path(self, tenant: str, turn_id: str) -> list[StoredTurn]:
        kept = self._with_turn(tenant, turn_id)
        return [self._unpacked(kept, each) for each in kept.tree.path(turn_id)]

    async def tree(self, tenant: str, conversation_id: str) -> Sequence[TurnSummary]:
        return self._use(tenant, conversation_id).tree.summaries(self._now_ms)

    async def set_head(
        self, tenant: str, conversation_id: str, turn_id: str | None, *, expected: str | None
    ) -> None:
        kept = self._use(tenant, conversation_id)
        self._apply(kept, partial(tree.set_head, turn_id=turn_id, expected=expected))

    async def delete_turn(self, tenant: str, turn_id: str, *, joins: bool = False) -> None:
        kept = self._with_turn(tenant, turn_id)
        operation = partial(tree.delete_turn, turn_id=turn_id, joins=joins)
        self._apply(kept, operation, needs_uses=True)

    # -- look-up -----------------------------------------------------------------------------

    @property
    def _now_ms(self) -> int:
        return round(self._clock() * 1000)

    def _find(self, tenant: str, conversation_id: str | None) -> _Kept | None:
        self._drop_old()
        kept = None if conversation_id is None else self._kept.get(conversation_id)
        if kept is None or kept.tree.tenant != tenant:
            return None
        kept.tree = self._renewed(kept)
        return kept

    def _renewed(self, kept: _Kept) -> Tree:
        return tree.renewed(kept.tree, self._now_ms, self._running)

    def _use(self, tenant: str, conversation_id: str) -> _Kept:
        kept = self._find(tenant, conversation_id)
        if kept is None:
            raise no_conversation(conversation_id)
        kept.used_s = self._clock()
        self._kept.move_to_end(conversation_id)
        self._shelf.use(tenant, conversation_id)
        return kept

    def _with_turn(self, tenant: str, turn_id: str) -> _Kept:
        kept = self._find(tenant, conversation_of(turn_id))
        if kept is None or turn_id not in kept.tree.nodes:
            raise no_turn(turn_id)
        return self._use(tenant, kept.tree.conversation_id)

    def _all_listed(self, tenant: str) -> Iterator[Tree]:
        self._drop_old()
        trees = (self._renewed(kept) for kept in self._kept.values())
        return (each for each in trees if each.tenant == tenant and each.is_listed)

    def _listed(self, tenant: str, *, newest_first: bool = True) -> list[Tree]:
        return sorted(
            self._all_listed(tenant),
            key=lambda each: (each.used_at, each.conversation_id),
            reverse=newest_first,
        )

    def _unpacked(self, kept: _Kept, turn_id: str) -> StoredTurn:
        info = kept.tree.info(turn_id, self._now_ms)
        return unpack(info, kept.bodies[turn_id], kept.chunks)

    def _searched(
        self, kept: _Kept, phrases: Sequence[Sequence[str]]
    ) -> tuple[int, SearchHit] | None:
        """The newest hit of a conversation, and its time."""
        conversation = self._renewed(kept).conversation(self._now_ms)
        for turn_id, node in sorted(kept.tree.nodes.items(), key=lambda each: -each[1].order):
            if node.status == "in_progress":
                continue
            text = texts.text_of(self._unpacked(kept, turn_id).all_items)
            if texts.matches(text, phrases):
                shown = texts.excerpt(text, phrases)
                hit = SearchHit(conversation=conversation, turn_id=turn_id, excerpt=shown)
                return node.created_at, hit
        title = conversation.title
        if not texts.matches(title, phrases):
            return None
        shown = texts.excerpt(title, phrases)
        hit = SearchHit(conversation=conversation, turn_id=None, excerpt=shown)
        return conversation.created_at, hit

    # -- storage -----------------------------------------------------------------------------

    def _apply(self, kept: _Kept, operation: Operation, *, needs_uses: bool = False) -> None:
        uses = kept.uses if needs_uses else tree.NO_USES
        change = operation(kept.tree, self._now_ms, uses)
        if change is None:
            return
        if change.tree is None:
            self._drop(kept.tree.conversation_id)
            return
        kept.apply(change)
        self._account(kept.tree)

    def _account(self, made: Tree) -> None:
        self._shelf.put(made.tenant, made.conversation_id, made.num_bytes)
        self._drop_old()

    def _is_in_use(self, conversation_id: str) -> bool:
        kept = self._kept[conversation_id]
        if not (kept.tree.nodes or kept.tree.is_listed):  # its first turn is about to begin
            return kept.used_s * 1000 + self._starts_ms > self._now_ms
        return self._renewed(kept).has_running(self._now_ms)

    def _drop_old(self) -> None:
        horizon_s = self._clock() - self._ttl_s
        expired = itertools.takewhile(lambda each: each[1].used_s <= horizon_s, self._kept.items())
        for conversation_id in [key for key, _ in expired if not self._is_in_use(key)]:
            self._drop(conversation_id)
        self._shelf.make_room()  # what ran before may not run any longer

    def _drop_for_room(self, conversation_id: str) -> None:
        kept = self._kept[conversation_id]
        if kept.tree.is_listed:
            num, _ = self._dropped.get(kept.tree.tenant, (0, 0))
            self._dropped[kept.tree.tenant] = num + 1, int(time.time())
        self._drop(conversation_id)

    def _drop(self, conversation_id: str) -> None:
        kept = self._kept.pop(conversation_id, None)
        if kept is not None:
            self._shelf.remove(kept.tree.tenant, conversation_id)
