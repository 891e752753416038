"""Conversations in Redis, shared by all gateways and kept when they end.

    penstock:{<tree>}:…                      see `redis_format`
    penstock:{<tenant's digest>}:conversations   sorted set: listed conversation → last turn
    penstock:{<tenant's digest>}:pinned          the same of those that are pinned

All keys of a conversation are in one slot and expire together some time after their last use. The
index is in another slot: a listing removes entries whose conversation no longer exists.

A gateway keeps the tree that it saw last, and `conversation.lua` stores what an operation makes of
it only if nobody has changed it meanwhile; otherwise it returns the present one, and the operation
is repeated. So the usual operation is one round trip. A gateway does one operation at a time on a
conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import re
import struct
import time
from collections import OrderedDict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from typing import Any
from weakref import WeakValueDictionary

import msgpack

from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.storage.conversations import tree
from penstock.gateway.storage.conversations.ids import conversation_of, tree_of
from penstock.gateway.storage.conversations.records import (
    Conversation,
    Holdings,
    SearchHit,
    StoredTurn,
    TurnSummary,
)
from penstock.gateway.storage.conversations.redis_format import keys_of, read_tree, writes_of
from penstock.gateway.storage.conversations.store import (
    DEFAULT_TTL_S,
    STARTS_S,
    ConversationLockedError,
    NotFoundError,
    StoreKind,
    StoreUnavailableError,
    UnreadableDataError,
    head_locked,
    no_conversation,
    no_turn,
    search_not_supported,
    store_unavailable,
)
from penstock.gateway.storage.conversations.tree import Change, Operation, Tree, Uses
from penstock.gateway.storage.conversations.turn_codec import chunk_names, pack, unpack
from penstock.gateway.storage.redis.link import RedisLink, Script
from penstock.gateway.storage.redis.shares import RedisShares

_FOLDER = files("penstock.gateway.storage.conversations")
_CONVERSATION = Script(_FOLDER.joinpath("conversation.lua").read_text("utf-8"))
_LISTING = Script(_FOLDER.joinpath("listing.lua").read_text("utf-8"))
_TREE_IN_KEY = re.compile(rb"\{([0-9a-f]{24})\}")
_NEW, _UNSEEN = b"new", b""  # states
_MAX_TRIES = 64  # of an operation; each other one was another gateway's success
_MAX_CACHED = 100_000  # turns and chunks of the trees that are kept, about 40 MB
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


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tree as Redis has told it.

    Attributes:
        clock_ms: what Redis' clock is ahead of this process's.
    """

    state: bytes
    tree: Tree
    clock_ms: int

    @property
    def now_ms(self) -> int:
        return _monotonic_ms() + self.clock_ms

    @property
    def size(self) -> int:
        return 1 + len(self.tree.nodes) + len(self.tree.chunks)


Running = Callable[[Collection[str]], Awaitable[Collection[str]]]


async def _none_runs(_: Collection[str]) -> Collection[str]:
    return ()


@dataclass(frozen=True, slots=True)
class _Found:
    """A reply: whether the writes are done, the tree after that, and bodies by turn."""

    is_done: bool
    seen: _Seen
    bodies: Mapping[str, bytes | None]


class RedisConversationStore:
    """A `ConversationStore`.

    Args:
        ttl_s: how long a conversation is kept after its last use.
        running: tells which of some responses run at any gateway.
        starts_s: see `STARTS_S`.
        shares: the account of what tenants keep in this Redis; None: nobody counts it.
    """

    kind: StoreKind = "redis"
    is_durable = True

    def __init__(
        self,
        link: RedisLink,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        running: Running = _none_runs,
        starts_s: float = STARTS_S,
        shares: RedisShares | None = None,
    ) -> None:
        self._link = link
        self._shares = shares
        if shares is not None:
            shares.add_kind("conv_", self._evict)
        self._ttl_s = ttl_s
        self._ttl_ms = round(ttl_s * 1000)
        self._running = running
        self._starts_ms = round(starts_s * 1000)
        self._cache: OrderedDict[str, _Seen] = OrderedDict()  # used least recently first
        self._num_cached = 0
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def create(self, conversation: Conversation) -> None:
        made = tree.create(conversation)
        writes = writes_of(None, Change(tree=made))
        found = await self._call(made.tenant, made.conversation_id, _NEW, writes, after=made)
        if found is not None:
            self._tell(made.tenant, made.conversation_id, found.seen.tree)
        await self._list(conversation)

    async def all(self) -> AsyncIterator[tuple[str, str]]:
        """Tenant and id of every conversation in this Redis, in no order."""
        pattern = "penstock:{*}:conversation"
        with self._link.answering(pattern):
            async for key in self._link.client.scan_iter(pattern):
                found = _TREE_IN_KEY.search(key)
                tenant: Any = found and await self._link.client.hget(key, "tenant")
                if found and tenant is not None:
                    yield tenant.decode(), f"conv_{found[1].decode()}"

    async def get(self, tenant: str, conversation_id: str) -> Conversation:
        seen = (await self._read(tenant, conversation_id)).seen
        self._tell(tenant, conversation_id, seen.tree)
        return self._conversation(seen)

    async def list_page(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None = None,
        newest_first: bool = True,
        pinned: bool | None = None,
    ) -> tuple[list[Conversation], bool]:
        page: list[Conversation] = []
        num_looked_at = limit + 1
        index = "pinned" if pinned else "conversations"
        while True:
            wanted = (after or "", num_looked_at, int(newest_first))
            reply = await self._run_listing("page", tenant, *wanted, index=index)
            if reply[0] != b"ok":
                assert after is not None
                raise no_conversation(after, param="after")
            used_at = {
                id_.decode(errors="replace"): int(float(score))
                for id_, score in zip(reply[1::2], reply[2::2], strict=True)
            }
            found = await self._peek(tenant, used_at)
            page += [each for each in found if pinned in (None, each.is_pinned)]
            gone = used_at.keys() - {each.conversation_id for each in found}
            if gone:
                await self._run_listing("remove", tenant, *gone, index=index)
            if len(page) > limit or len(used_at) < num_looked_at:
                return page[:limit], len(page) > limit
            # Some were gone or are not wanted: continue after the last existing one.
            after = found[-1].conversation_id if found else after
            num_looked_at = _NUM_CLEANED

    async def search(
        self,
        tenant: str,  # noqa: ARG002
        query: str,  # noqa: ARG002
        *,
        limit: int,  # noqa: ARG002
        offset: int = 0,  # noqa: ARG002
    ) -> tuple[list[SearchHit], bool]:
        raise search_not_supported()

    async def holdings(self, tenant: str) -> Holdings:
        """A conversation that has expired counts until a listing has met it."""
        key = _index_key(tenant, "conversations")
        with self._link.answering(key):
            return Holdings(num_conversations=int(await self._link.client.zcard(key)))

    async def update(
        self,
        tenant: str,
        conversation_id: str,
        *,
        metadata: Mapping[str, str] | None = None,
        is_pinned: bool | None = None,
    ) -> Conversation:
        operation = partial(tree.update, metadata=metadata, is_pinned=is_pinned)
        seen = await self._operate(tenant, conversation_id, operation, is_admitted=False)
        conversation = self._conversation(seen)
        await self._list(conversation)
        if is_pinned is False:
            await self._unlist(tenant, conversation_id, index="pinned")
        return conversation

    async def delete(self, tenant: str, conversation_id: str) -> None:
        await self._operate(tenant, conversation_id, tree.delete)
        await self._unlist(tenant, conversation_id)

    async def begin_turn(self, turn: StoredTurn, *, takes_head: bool) -> None:
        operation = partial(
            tree.begin_turn,
            turn=turn,
            packed=pack(turn),
            takes_head=takes_head,
            starts_ms=self._starts_ms,
        )
        await self._operate(turn.tenant, turn.conversation_id, operation)

    async def finish_turn(self, turn: StoredTurn) -> None:
        operation = partial(tree.finish_turn, turn=turn, packed=pack(turn))
        try:
            seen = await self._operate(turn.tenant, turn.conversation_id, operation)
        except NotFoundError:  # deleted meanwhile
            return
        await self._list(self._conversation(seen))

    async def add_items(self, turn: StoredTurn) -> None:
        shares = self._shares
        max_bytes = None if shares is None else shares.max_bytes_of(turn.tenant)
        operation = partial(tree.add_items, turn=turn, packed=pack(turn), max_bytes=max_bytes)
        seen = await self._operate(turn.tenant, turn.conversation_id, operation, is_admitted=False)
        await self._list(self._conversation(seen))

    async def replace_items(self, turn: StoredTurn) -> None:
        operation = partial(tree.replace_items, turn=turn, packed=pack(turn))
        await self._operate_on_turn(turn.tenant, turn.turn_id, operation, needs_uses=True)

    async def turn(self, tenant: str, turn_id: str) -> StoredTurn:
        return (await self._turns(tenant, turn_id, "turn"))[0]

    async def path(self, tenant: str, turn_id: str) -> list[StoredTurn]:
        return await self._turns(tenant, turn_id, "path")

    async def tree(self, tenant: str, conversation_id: str) -> Sequence[TurnSummary]:
        seen = (await self._read(tenant, conversation_id)).seen
        self._tell(tenant, conversation_id, seen.tree)
        return seen.tree.summaries(seen.now_ms)

    async def set_head(
        self, tenant: str, conversation_id: str, turn_id: str | None, *, expected: str | None
    ) -> None:
        operation = partial(tree.set_head, turn_id=turn_id, expected=expected)
        await self._operate(tenant, conversation_id, operation)

    async def delete_turn(self, tenant: str, turn_id: str, *, joins: bool = False) -> None:
        operation = partial(tree.delete_turn, turn_id=turn_id, joins=joins)
        await self._operate_on_turn(tenant, turn_id, operation, needs_uses=True)

    # -- operations --------------------------------------------------------------------------

    async def _operate_on_turn(
        self, tenant: str, turn_id: str, operation: Operation, *, needs_uses: bool = False
    ) -> None:
        conversation_id = conversation_of(turn_id)
        if conversation_id is None:
            raise no_turn(turn_id)
        try:
            await self._operate(tenant, conversation_id, operation, needs_uses=needs_uses)
        except NotFoundError:
            raise no_turn(turn_id) from None

    async def _operate(
        self,
        tenant: str,
        conversation_id: str,
        operation: Operation,
        *,
        needs_uses: bool = False,
        is_admitted: bool = True,
    ) -> _Seen:
        """Do an operation; the tree after it, which is also told to the account.

        Args:
            needs_uses: the operation needs to know what chunks are used by which turns.
            is_admitted: what stores without the engine waits until what had to go for it is gone. A
                turn, which admission has let in, does not wait for a round trip more.
        """
        async with self._locks.setdefault(conversation_id, asyncio.Lock()):
            seen, is_gone = await self._changed(
                tenant, conversation_id, operation, needs_uses=needs_uses
            )
        if self._shares is not None and not is_admitted:
            num_bytes = seen.tree.num_bytes
            await self._shares.tell(tenant, conversation_id, num_bytes, ttl_s=self._ttl_s)
        else:
            self._tell(tenant, conversation_id, None if is_gone else seen.tree)
        return seen

    async def _changed(
        self, tenant: str, conversation_id: str, operation: Operation, *, needs_uses: bool
    ) -> tuple[_Seen, bool]:
        """Do an operation; the tree after it, and whether it is deleted."""
        what = "all" if needs_uses else ""
        found = None
        known = self._cache.get(conversation_id)
        if known is None or known.tree.tenant != tenant or needs_uses:
            found = await self._read(tenant, conversation_id, what)
        for _ in range(_MAX_TRIES):
            seen = known if found is None else found.seen
            assert seen is not None
            seen = await self._renewed(seen)
            uses = tree.NO_USES
            if needs_uses and found is not None:
                uses = self._uses(conversation_id, found)
            try:
                change = operation(seen.tree, seen.now_ms, uses)
            except RequestRefusedError:
                if found is not None:  # as it is now
                    raise
                change = None
            if change is None or (change.tree == seen.tree and change.body is None):
                if found is not None:
                    return seen, False
                found = await self._read(tenant, conversation_id, what)
                continue
            writes = writes_of(seen.tree, change)
            after = change.tree or seen.tree
            found = await self._call(tenant, conversation_id, seen.state, writes, what, after=after)
            if found is None:
                raise no_conversation(conversation_id)
            if found.is_done:
                if change.tree is None:
                    self._forget(conversation_id)
                return found.seen, change.tree is None
        raise store_unavailable("many gateways change this conversation at the same time")

    async def _read(
        self, tenant: str, conversation_id: str, what: str = "", turn_id: str = ""
    ) -> _Found:
        """The tree as it is now. Raises: NotFoundError."""
        known = self._cache.get(conversation_id)
        state, after = (_UNSEEN, None) if known is None else (known.state, known.tree)
        found = await self._call(tenant, conversation_id, state, (), what, turn_id, after=after)
        if found is None:
            self._forget(conversation_id)
            raise no_conversation(conversation_id)
        return replace(found, seen=await self._renewed(found.seen))

    async def _renewed(self, seen: _Seen) -> _Seen:
        names = tree.overdue(seen.tree, seen.now_ms)
        if not names:
            return seen
        now = tree.renewed(seen.tree, seen.now_ms, await self._running(names))
        renewed = replace(seen, tree=now)
        if self._cache.get(now.conversation_id) is seen:
            self._keep(renewed)
        return renewed

    async def _call(
        self,
        tenant: str,
        conversation_id: str,
        state: bytes,
        writes: Sequence[Any],
        what: str = "",
        turn_id: str = "",
        *,
        after: Tree | None,
    ) -> _Found | None:
        """Run `conversation.lua`; None: there is no such conversation of this tenant.

        Args:
            after: the tree after the writes, if the state is still the one seen.
        """
        tree_id = tree_of(conversation_id)
        if tree_id is None:
            raise no_conversation(conversation_id)
        keys = keys_of(tree_id)
        arguments = [state, tenant, self._ttl_ms, what, turn_id, *writes]
        reply = await self._run_or_make_room(tenant, keys, arguments)
        if not reply:
            return None
        is_done, now_state, now_ms, bodies, *rest = reply
        with self._reading(conversation_id):
            found = rest and read_tree(conversation_id, *rest)
            now = found or after
            assert now
            seen = _Seen(now_state, now, int(now_ms) - _monotonic_ms())
            by_turn = {
                name.decode(): body for name, body in zip(bodies[::2], bodies[1::2], strict=True)
            }
        self._keep(seen)
        return _Found(bool(is_done), seen, by_turn)

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

        def operation(before: Tree, now_ms: int, _: Uses) -> Change:
            if before.has_running(now_ms):
                raise head_locked(conversation_id)
            return Change(tree=None)

        try:
            await self._changed(tenant, conversation_id, operation, needs_uses=False)
        except NotFoundError:
            return True
        except ConversationLockedError:
            return False
        await self._unlist(tenant, conversation_id)
        return True

    # -- what is known here ------------------------------------------------------------------

    def _keep(self, seen: _Seen) -> None:
        conversation_id = seen.tree.conversation_id
        self._forget(conversation_id)
        self._cache[conversation_id] = seen
        self._num_cached += seen.size
        while self._num_cached > _MAX_CACHED:
            self._forget(next(iter(self._cache)))

    def _forget(self, conversation_id: str) -> None:
        known = self._cache.pop(conversation_id, None)
        if known is not None:
            self._num_cached -= known.size

    def _tell(self, tenant: str, conversation_id: str, now: Tree | None) -> None:
        """Tell the account how large a conversation is by now; None: it is gone."""
        if self._shares is not None:
            num_bytes = 0 if now is None else now.num_bytes
            self._shares.tell_soon(tenant, conversation_id, num_bytes, ttl_s=self._ttl_s)

    # -- reading -----------------------------------------------------------------------------

    async def _turns(self, tenant: str, turn_id: str, what: str) -> list[StoredTurn]:
        """A turn, or those from the root to it, with the token ids that they share."""
        conversation_id = conversation_of(turn_id)
        if conversation_id is None:
            raise no_turn(turn_id)
        try:
            found = await self._read(tenant, conversation_id, what, turn_id)
        except NotFoundError:
            raise no_turn(turn_id) from None
        self._tell(tenant, conversation_id, found.seen.tree)
        now, now_ms = found.seen.tree, found.seen.now_ms
        wanted = now.path(turn_id) if what == "path" else [turn_id]
        infos = [now.info(each, now_ms) for each in wanted]
        bodies = [found.bodies.get(each) for each in wanted]
        if None in bodies:  # a full Redis has evicted the key
            raise no_turn(turn_id)
        with self._reading(conversation_id):
            names = list({name: None for body in bodies for name in chunk_names(body or b"")})
        chunks: list[Any] = []
        if names:
            key = f"penstock:{{{tree_of(turn_id)}}}:token_ids"
            with self._link.answering(key):
                chunks = await self._link.client.hmget(key, names)
        if None in chunks:  # deleted meanwhile
            raise no_turn(turn_id)
        by_name = dict(zip(names, chunks, strict=True))
        with self._reading(conversation_id):
            return [
                unpack(info, body or b"", by_name) for info, body in zip(infos, bodies, strict=True)
            ]

    def _uses(self, conversation_id: str, found: _Found) -> Uses:
        with self._reading(conversation_id):
            return {
                turn_id: chunk_names(body)
                for turn_id, body in found.bodies.items()
                if body is not None
            }

    def _conversation(self, seen: _Seen) -> Conversation:
        with self._reading(seen.tree.conversation_id):
            return seen.tree.conversation(seen.now_ms)

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

    # -- listing -----------------------------------------------------------------------------

    async def _run_listing(
        self, operation: str, tenant: str, *args: Any, index: str = "conversations"
    ) -> list[Any]:
        # Reading a conversation does not touch the index, so the index is kept longer.
        reply: list[Any] = await self._link.run(
            _LISTING, [_index_key(tenant, index)], [operation, 2 * self._ttl_ms, *args]
        )
        return reply

    async def _list(self, conversation: Conversation) -> None:
        if conversation.is_listed:
            added = (conversation.used_at or conversation.created_at, conversation.conversation_id)
            for index in ("conversations", *["pinned"] * conversation.is_pinned):
                with contextlib.suppress(UnreadableDataError):  # it can be used without the list
                    await self._run_listing("add", conversation.tenant, *added, index=index)

    async def _unlist(self, tenant: str, conversation_id: str, index: str = "") -> None:
        for each in (index,) if index else ("conversations", "pinned"):
            with contextlib.suppress(UnreadableDataError):  # the link has logged it
                await self._run_listing("remove", tenant, conversation_id, index=each)

    async def _peek(self, tenant: str, used_at: Mapping[str, int]) -> list[Conversation]:
        """The existing, readable ones of some conversations; this does not count as use."""

        async def peek(conversation_id: str) -> Conversation | None:
            tree_id = tree_of(conversation_id)
            if tree_id is None:
                return None
            try:
                arguments = [_UNSEEN, tenant, "", "brief", ""]
                reply = await self._link.run(_CONVERSATION, keys_of(tree_id), arguments)
                if not reply:
                    return None
                with self._reading(conversation_id):
                    found = read_tree(conversation_id, *reply[4:])
                    seen = _Seen(b"", found, int(reply[2]) - _monotonic_ms())
                    found = (await self._renewed(seen)).tree
                    found = tree.with_use(found, used_at[conversation_id])
                    return found.conversation(seen.now_ms)
            except UnreadableDataError:
                return None

        found: list[Conversation | None] = []
        ids = list(used_at)
        for start in range(0, len(ids), _NUM_AT_ONCE):
            found += await asyncio.gather(*map(peek, ids[start : start + _NUM_AT_ONCE]))
        return [conversation for conversation in found if conversation is not None]


def _index_key(tenant: str, index: str) -> str:
    digest = hashlib.sha256(tenant.encode()).hexdigest()[:32]
    return f"penstock:{{{digest}}}:{index}"


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000
