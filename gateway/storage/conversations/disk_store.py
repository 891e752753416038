"""Conversations in the database of `disk`, for the one gateway that has its folder.

An operation is a job on the writer thread: the tree is loaded from rows, `tree` says what becomes
of it, and the changed rows are written, in one transaction. So are reads of one conversation, which
must not wait for a search or a checkpoint; lists and searches are done on the reader thread.

Leases are in memory: when a server starts, no turn of an earlier one runs, unless its log is taken
over and touches it. The order of use, by which conversations are dropped to make room
(`tenant_shares`), is in memory too, and stored with what is written.

What is deleted is also erased from the files: the index of texts is merged (`disk_texts`) and
SQLite's log emptied, in the background.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from penstock.gateway.storage.conversations import disk_rows as rows
from penstock.gateway.storage.conversations import disk_texts, texts, tree
from penstock.gateway.storage.conversations.ids import conversation_of, tree_of
from penstock.gateway.storage.conversations.records import (
    Conversation,
    Holdings,
    SearchHit,
    StoredTurn,
    TurnSummary,
)
from penstock.gateway.storage.conversations.store import (
    STARTS_S,
    NotFoundError,
    StoreKind,
    no_conversation,
    no_turn,
    store_unavailable,
)
from penstock.gateway.storage.conversations.tree import Node, Operation, Tree
from penstock.gateway.storage.conversations.turn_codec import pack, unpack
from penstock.gateway.storage.disk import Disk, DiskError
from penstock.gateway.storage.tenant_shares import TenantShares

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
DEFAULT_MAX_BYTES = 4 << 30
_MAX_UNSTORED_USES = 64
_CLOSE_S = 5.0  # for which the end of a server waits for erasing
_ERASE_DROPPED_S = 10.0  # how long what was dropped to make room may wait for more of it
_MAX_MENDED = 8  # shards, in a search


@dataclass(slots=True)
class _Leases:
    """Which turns run. Used on both threads.

    Attributes:
        running: ids of the responses that run.
        until_ms: until when turns start, and new conversations wait for their first turn, by id.
    """

    running: Collection[str]
    until_ms: dict[str, int] = field(default_factory=dict)

    def runs(self, turn_id: str | None, now_ms: int) -> bool:
        return turn_id in self.running or self.until_ms.get(turn_id or "", 0) > now_ms

    def runs_in(self, conversation_id: str, now_ms: int) -> bool:
        digits = tree_of(conversation_id)
        names = [*self.running, *self.until_ms]
        return any(tree_of(name) == digits and self.runs(name, now_ms) for name in names)

    def forget_old(self, now_ms: int) -> None:
        for name, until_ms in list(self.until_ms.items()):
            if until_ms <= now_ms:
                self.until_ms.pop(name, None)


class DiskConversationStore:
    """A `ConversationStore`.

    Args:
        max_bytes: total size, not counting conversations with running turns.
        running: ids of the responses that run.
        starts_s: see `STARTS_S`.
        shares: of the tenants in all stores of this process; None: there is only this store.
        clock: monotonic seconds.
    """

    kind: StoreKind = "disk"
    is_durable = True

    def __init__(
        self,
        disk: Disk,
        max_bytes: int = DEFAULT_MAX_BYTES,
        *,
        running: Collection[str] = (),
        starts_s: float = STARTS_S,
        shares: TenantShares | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._disk = disk
        self._shelf = (shares or TenantShares()).shelf(
            max_bytes, drop=self._drop_for_room, is_in_use=self._is_in_use
        )
        self._starts_ms = round(starts_s * 1000)
        self._clock = clock
        self._leases = _Leases(running)
        self._unstored_uses: dict[str, int] = {}  # by conversation: when it was last read
        self._dropping: set[str] = set()
        self._merger: asyncio.Task[None] | None = None
        self._is_merging_due = False
        self._erasing_later: asyncio.TimerHandle | None = None

    @property
    def num_bytes(self) -> int:
        return self._shelf.num_bytes

    async def start(self) -> None:
        """Learn what is stored."""
        try:
            for tenant, conversation_id, num_bytes in await self._disk.run(rows.all_by_use):
                self._shelf.put(tenant, conversation_id, num_bytes)
        except DiskError as error:  # if it was damaged, an empty one has taken its place
            _LOG.warning("cannot read which conversations there are: %s", error)
        self._erase_soon()

    async def close(self) -> None:
        """Store what waits. What could not be erased yet is erased by the next server."""
        self._erase_now_if_later()
        if self._merger is not None:
            await asyncio.wait({self._merger}, timeout=_CLOSE_S)
            self._merger.cancel()
        self._store_uses()

    async def erased(self) -> None:
        """Returns when all that was deleted is in no file any longer."""
        self._erase_now_if_later()
        while self._merger is not None and not self._merger.done():
            await asyncio.wait({self._merger})
        await self._disk.erased()

    def forget_all(self) -> None:
        """The database was damaged, and an empty one has taken its place."""
        self._leases.until_ms.clear()
        self._shelf.clear()

    # -- conversations -----------------------------------------------------------------------

    async def create(self, conversation: Conversation) -> None:
        made = tree.create(conversation)
        if not made.is_listed:
            until_ms = self._now_ms + self._starts_ms
            self._leases.until_ms[made.conversation_id] = until_ms
        await self._run(partial(rows.insert, made=made, last_use=rows.wall_us()))
        self._account(made)

    async def get(self, tenant: str, conversation_id: str) -> Conversation:
        row = await self._loaded(tenant, conversation_id)
        return row.tree.conversation(self._now_ms)

    async def list_page(
        self,
        tenant: str,
        *,
        limit: int,
        after: str | None = None,
        newest_first: bool = True,
        pinned: bool | None = None,
    ) -> tuple[list[Conversation], bool]:
        page = await self._look(
            partial(
                self._page,
                tenant=tenant,
                limit=limit + 1,
                after=after,
                newest_first=newest_first,
                pinned=pinned,
            )
        )
        return page[:limit], len(page) > limit

    async def search(
        self, tenant: str, query: str, *, limit: int, offset: int = 0
    ) -> tuple[list[SearchHit], bool]:
        phrases = texts.phrases_of(query)
        if not phrases:
            return [], False
        wanted = partial(
            self._search, tenant=tenant, phrases=phrases, limit=limit + 1, offset=offset
        )
        for _ in range(_MAX_MENDED):
            try:
                hits = await self._look(wanted)
                break
            except disk_texts.DamagedIndexError as error:
                _LOG.warning("%s; making it again", error)
                await self._run(partial(disk_texts.rebuild, shard=error.shard))
        else:
            raise store_unavailable("the index of texts is damaged")
        return hits[:limit], len(hits) > limit

    async def holdings(self, tenant: str) -> Holdings:
        found = await self._look(partial(rows.holdings, tenant=tenant))
        num_conversations, num_dropped, dropped_at = found
        return Holdings(
            num_conversations=num_conversations,
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
        operation = partial(tree.update, metadata=metadata, is_pinned=is_pinned)
        deletes = metadata is not None
        after = await self._operate(tenant, conversation_id, operation, deletes=deletes)
        return after.conversation(self._now_ms)

    async def delete(self, tenant: str, conversation_id: str) -> None:
        await self._operate(tenant, conversation_id, tree.delete, deletes=True)

    async def set_head(
        self, tenant: str, conversation_id: str, turn_id: str | None, *, expected: str | None
    ) -> None:
        operation = partial(tree.set_head, turn_id=turn_id, expected=expected)
        await self._operate(tenant, conversation_id, operation)

    async def tree(self, tenant: str, conversation_id: str) -> Sequence[TurnSummary]:
        row = await self._loaded(tenant, conversation_id)
        return row.tree.summaries(self._now_ms)

    # -- turns -------------------------------------------------------------------------------

    async def begin_turn(self, turn: StoredTurn, *, takes_head: bool) -> None:
        operation = partial(
            tree.begin_turn,
            turn=turn,
            packed=pack(turn),
            takes_head=takes_head,
            starts_ms=self._starts_ms,
        )
        await self._operate(turn.tenant, turn.conversation_id, operation)
        self._leases.until_ms.pop(turn.conversation_id, None)

    async def finish_turn(self, turn: StoredTurn) -> None:
        operation = partial(tree.finish_turn, turn=turn, packed=pack(turn))
        try:
            await self._operate(turn.tenant, turn.conversation_id, operation, text=_text_of(turn))
        except NotFoundError:  # deleted meanwhile
            return

    async def add_items(self, turn: StoredTurn) -> None:
        max_bytes = self._shelf.max_bytes_of(turn.tenant)
        operation = partial(tree.add_items, turn=turn, packed=pack(turn), max_bytes=max_bytes)
        await self._operate(turn.tenant, turn.conversation_id, operation, text=_text_of(turn))

    async def replace_items(self, turn: StoredTurn) -> None:
        operation = partial(tree.replace_items, turn=turn, packed=pack(turn))
        await self._operate_on_turn(
            turn.tenant,
            turn.turn_id,
            operation,
            text=_text_of(turn),
            needs_uses=True,
            deletes=True,
        )

    async def delete_turn(self, tenant: str, turn_id: str, *, joins: bool = False) -> None:
        operation = partial(tree.delete_turn, turn_id=turn_id, joins=joins)
        await self._operate_on_turn(tenant, turn_id, operation, needs_uses=True, deletes=True)

    async def turn(self, tenant: str, turn_id: str) -> StoredTurn:
        return (await self._turns(tenant, turn_id, lambda _: [turn_id]))[0]

    async def path(self, tenant: str, turn_id: str) -> list[StoredTurn]:
        return await self._turns(tenant, turn_id, lambda now: now.path(turn_id))

    # -- operations --------------------------------------------------------------------------

    async def _operate(
        self,
        tenant: str,
        conversation_id: str,
        operation: Operation,
        *,
        text: rows.Text | None = None,
        needs_uses: bool = False,
        deletes: bool = False,
    ) -> Tree:
        """Do an operation; the tree after it.

        Args:
            text: of the turn that is written, as it is searched.
            needs_uses: the operation needs to know what chunks are used by which turns.
            deletes: what was there before is erased from the files.
        """
        if tree_of(conversation_id) is None:
            raise no_conversation(conversation_id)
        now, is_gone = await self._run(
            partial(
                self._job,
                tenant=tenant,
                conversation_id=conversation_id,
                operation=operation,
                text=text,
                needs_uses=needs_uses,
            )
        )
        self._unstored_uses.pop(conversation_id, None)
        if is_gone:
            self._shelf.discard(tenant, conversation_id)
        else:
            self._account(now)
        if deletes:
            self._erase_soon()
        return now

    async def _operate_on_turn(
        self, tenant: str, turn_id: str, operation: Operation, **options: Any
    ) -> None:
        conversation_id = conversation_of(turn_id)
        if conversation_id is None:
            raise no_turn(turn_id)
        try:
            await self._operate(tenant, conversation_id, operation, **options)
        except NotFoundError:
            raise no_turn(turn_id) from None

    def _job(
        self,
        connection: sqlite3.Connection,
        *,
        tenant: str,
        conversation_id: str,
        operation: Operation,
        text: rows.Text | None,
        needs_uses: bool,
    ) -> tuple[Tree, bool]:
        """An operation; the tree after it, and whether it is deleted."""
        row = self._row(connection, tenant, conversation_id)
        uses = rows.uses(connection, row.number) if needs_uses else tree.NO_USES
        change = operation(row.tree, self._now_ms, uses)
        if change is None:
            return row.tree, False
        if change.tree is None:
            rows.delete(connection, row.number)
            self._let_go(row.tree.nodes)
            return row.tree, True
        rows.write(connection, row, change)
        if change.tree.is_listed:
            rows.index(connection, row, change, text)
        self._let_go(change.dropped)
        for turn_id, node in tree.changed_nodes(row.tree, change.tree).items():
            if node.status == "in_progress":
                self._leases.until_ms[turn_id] = node.lease_ms
            else:
                self._let_go((turn_id,))
        return change.tree, False

    def _let_go(self, turn_ids: Sequence[str] | Mapping[str, Node]) -> None:
        for turn_id in turn_ids:
            self._leases.until_ms.pop(turn_id, None)

    # -- reading -----------------------------------------------------------------------------

    async def _loaded(self, tenant: str, conversation_id: str) -> rows.Row:
        """A conversation that is being used."""
        if tree_of(conversation_id) is None:
            raise no_conversation(conversation_id)
        row = await self._run(partial(self._row, tenant=tenant, conversation_id=conversation_id))
        self._note_use(row.tree)
        return row

    async def _turns(
        self, tenant: str, turn_id: str, path_of: Callable[[Tree], Sequence[str]]
    ) -> list[StoredTurn]:
        conversation_id = conversation_of(turn_id)
        if conversation_id is None:
            raise no_turn(turn_id)

        def read(
            connection: sqlite3.Connection,
        ) -> tuple[Tree, Sequence[str], list[bytes], dict[bytes, bytes]]:
            row = self._row(connection, tenant, conversation_id)
            row.tree.node(turn_id)
            path = path_of(row.tree)
            return row.tree, path, *rows.content(connection, row.number, path)

        try:
            now, path, bodies, chunks = await self._run(read)
        except NotFoundError:
            raise no_turn(turn_id) from None
        self._note_use(now)
        return [
            unpack(now.info(each, self._now_ms), body, chunks)
            for each, body in zip(path, bodies, strict=True)
        ]

    def _row(self, connection: sqlite3.Connection, tenant: str, conversation_id: str) -> rows.Row:
        """Raises: NotFoundError."""
        leases = self._leases
        row = rows.load(connection, tenant, conversation_id, leases=leases.until_ms)
        return replace(row, tree=tree.renewed(row.tree, self._now_ms, leases.running))

    def _page(
        self, connection: sqlite3.Connection, *, tenant: str, **options: Any
    ) -> list[Conversation]:
        return [self._shown(each) for each in rows.page(connection, tenant, **options)]

    def _search(
        self,
        connection: sqlite3.Connection,
        *,
        tenant: str,
        phrases: Sequence[Sequence[str]],
        limit: int,
        offset: int,
    ) -> list[SearchHit]:
        number = rows.tenant_number(connection, tenant)
        if number is None:
            return []
        connection.execute("BEGIN")  # shards come and go meanwhile
        try:
            newest: dict[int, disk_texts.Document] = {}
            for document in disk_texts.search(connection, phrases, tenant=number):
                newest.setdefault(document.conversation, document)
                if len(newest) == offset + limit:
                    break
            wanted = list(newest.values())[offset:]
            return [self._hit(connection, each, phrases) for each in wanted]
        finally:
            connection.execute("ROLLBACK")

    def _hit(
        self,
        connection: sqlite3.Connection,
        document: disk_texts.Document,
        phrases: Sequence[Sequence[str]],
    ) -> SearchHit:
        found = rows.listed(connection, document.conversation)
        text = disk_texts.text_of(connection, document)
        return SearchHit(
            conversation=self._shown(found),
            turn_id=document.turn or None,
            excerpt=texts.excerpt(text, phrases),
        )

    def _shown(self, listed: Tree) -> Conversation:
        """A conversation whose turns are not loaded."""
        shown = listed.conversation(self._now_ms)
        runs = self._leases.runs(listed.running, self._now_ms)
        return replace(shown, running=listed.running if runs else None)

    # -- use and room ------------------------------------------------------------------------

    @property
    def _now_ms(self) -> int:
        return round(self._clock() * 1000)

    def _note_use(self, now: Tree) -> None:
        self._account(now)
        self._unstored_uses[now.conversation_id] = rows.wall_us()
        if len(self._unstored_uses) >= _MAX_UNSTORED_USES:
            self._store_uses()

    def _store_uses(self) -> None:
        if self._unstored_uses:
            uses, self._unstored_uses = list(self._unstored_uses.items()), {}
            self._disk.submit(partial(rows.store_uses, uses=uses), _log_failure)

    def _account(self, now: Tree) -> None:
        if now.conversation_id not in self._dropping:
            self._shelf.put(now.tenant, now.conversation_id, now.num_bytes)

    def _is_in_use(self, conversation_id: str) -> bool:
        return self._leases.runs_in(conversation_id, self._now_ms)

    def _drop_for_room(self, conversation_id: str) -> None:
        tenant = self._shelf.tenant_of(conversation_id)
        self._shelf.remove(tenant, conversation_id)
        self._leases.forget_old(self._now_ms)
        self._dropping.add(conversation_id)

        def done(_: None, error: Exception | None) -> None:
            self._dropping.discard(conversation_id)
            _log_failure(None, error)
            if self._erasing_later is None:
                loop = asyncio.get_running_loop()
                self._erasing_later = loop.call_later(_ERASE_DROPPED_S, self._erase_now_if_later)

        self._disk.submit(partial(rows.drop, conversation_id=conversation_id), done)

    # -- erasing -----------------------------------------------------------------------------

    def _erase_soon(self) -> None:
        """Merge the texts' index, if something was deleted from it, then empty SQLite's log."""
        self._is_merging_due = True
        if self._merger is None or self._merger.done():
            self._merger = asyncio.create_task(self._erase(), name="erase texts")

    def _erase_now_if_later(self) -> None:
        if self._erasing_later is not None:
            self._erasing_later.cancel()
            self._erasing_later = None
            self._erase_soon()

    async def _erase(self) -> None:
        try:
            while self._is_merging_due:
                self._is_merging_due = False
                while await self._disk.run(disk_texts.merge_step):
                    pass
                self._disk.erase_soon()
        except DiskError as error:  # the next deletion, or the next server, tries again
            _LOG.warning("what was deleted is still in the index of texts: %s", error)

    # -- jobs --------------------------------------------------------------------------------

    async def _run(self, job: Callable[[sqlite3.Connection], _T]) -> _T:
        """Raises: StoreUnavailableError."""
        try:
            return await self._disk.run(job)
        except DiskError as error:
            raise store_unavailable(str(error)) from error

    async def _look(self, job: Callable[[sqlite3.Connection], _T]) -> _T:
        try:
            return await self._disk.look(job)
        except DiskError as error:
            raise store_unavailable(str(error)) from error


def _text_of(turn: StoredTurn) -> rows.Text:
    return turn.turn_id, texts.text_of(turn.all_items)


def _log_failure(_: None, error: Exception | None) -> None:
    if error is not None:
        _LOG.warning("conversations on disk: %s", error)
