"""Conversations in this process's memory, bounded in bytes and age.

Whose are dropped first is in `tenant_shares`: the least recently used, whole; one with a running
turn stays. Turns are kept as bytes (`turn_codec`), as in Redis, and share token ids within their
conversation.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.gateway.storage.conversations.ids import conversation_of, is_added
from penstock.gateway.storage.conversations.records import (
    Conversation,
    StoredTurn,
    TurnStatus,
    TurnSummary,
)
from penstock.gateway.storage.conversations.store import (
    DEFAULT_LEASE_S,
    DEFAULT_TTL_S,
    MAX_ADDED_BYTES,
    head_locked,
    no_conversation,
    no_turn,
)
from penstock.gateway.storage.conversations.turn_codec import (
    Packed,
    TreeNode,
    chunk_names,
    node_of,
    pack,
    unpack,
)
from penstock.gateway.storage.tenant_shares import StoreLimitError, TenantShares

_TREE_BYTES = 1024  # objects and dictionary slots, without their content
_TURN_BYTES = 512
_CHUNK_BYTES = 128


@dataclass(slots=True)
class _Node:
    """A turn: its data in the tree, its content as bytes, and when its lease ends."""

    info: TreeNode
    body: bytes
    lease_s: float = 0.0


@dataclass(slots=True)
class _Tree:
    """A conversation and its turns, parents before children."""

    conversation: Conversation
    used_s: float
    last_turn_at: int  # seconds of the epoch; without turns, its creation
    nodes: dict[str, _Node] = field(default_factory=dict)
    chunks: dict[bytes, bytes] = field(default_factory=dict)
    num_bytes: int = _TREE_BYTES

    def is_running(self, turn_id: str | None, now_s: float) -> bool:
        node = self.nodes.get(turn_id) if turn_id is not None else None
        return node is not None and node.info.status == "in_progress" and node.lease_s > now_s

    def is_whole(self, turn_id: str | None) -> bool:
        """Whether all turns from this one to the root exist."""
        while turn_id is not None:
            node = self.nodes.get(turn_id)
            if node is None:
                return False
            turn_id = node.info.parent_id
        return True


class MemoryConversationStore:
    """A `ConversationStore`.

    Args:
        max_bytes: total size, not counting conversations with running turns.
        ttl_s: how long a conversation is kept after its last use.
        lease_s: how long a turn may run without being touched.
        shares: of the tenants in all stores of this process; None: there is only this store.
        clock: monotonic seconds.
    """

    is_durable = False

    def __init__(
        self,
        max_bytes: int,
        *,
        ttl_s: float = DEFAULT_TTL_S,
        lease_s: float = DEFAULT_LEASE_S,
        shares: TenantShares | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shelf = (shares or TenantShares()).shelf(
            max_bytes, drop=self._drop, is_in_use=self._is_in_use
        )
        self._ttl_s = ttl_s
        self._lease_s = lease_s
        self._clock = clock
        self._trees: OrderedDict[str, _Tree] = OrderedDict()  # used least recently first

    @property
    def num_bytes(self) -> int:
        return self._shelf.num_bytes

    async def create(self, conversation: Conversation) -> None:
        if conversation.conversation_id not in self._trees:
            conversation = replace(conversation, metadata=dict(conversation.metadata))
            tree = _Tree(conversation, self._clock(), conversation.created_at)
            tree.num_bytes += _num_bytes_of(conversation)
            self._trees[conversation.conversation_id] = tree
            self._account(tree, 0)

    async def get(self, tenant: str, conversation_id: str) -> Conversation:
        return self._shown(self._use(tenant, conversation_id))

    async def list_page(
        self, tenant: str, *, limit: int, after: str | None = None, newest_first: bool = True
    ) -> tuple[list[Conversation], bool]:
        self._drop_old()
        trees = [
            tree
            for tree in self._trees.values()
            if tree.conversation.tenant == tenant and tree.conversation.is_listed
        ]
        trees.sort(
            key=lambda tree: (tree.last_turn_at, tree.conversation.conversation_id),
            reverse=newest_first,
        )
        listed = [self._shown(tree) for tree in trees]
        start = 0
        if after is not None:
            ids = [conversation.conversation_id for conversation in listed]
            if after not in ids:
                raise no_conversation(after, param="after")
            start = ids.index(after) + 1
        return listed[start : start + limit], len(listed) > start + limit

    async def set_metadata(
        self, tenant: str, conversation_id: str, metadata: Mapping[str, str]
    ) -> Conversation:
        tree = self._use(tenant, conversation_id)
        num_bytes_before = _num_bytes_of(tree.conversation)
        tree.conversation = replace(tree.conversation, metadata=dict(metadata))
        self._account(tree, _num_bytes_of(tree.conversation) - num_bytes_before)
        return self._shown(tree)

    async def delete(self, tenant: str, conversation_id: str) -> None:
        self._use(tenant, conversation_id)
        self._drop(conversation_id)

    async def begin_turn(self, turn: StoredTurn, *, takes_head: bool) -> None:
        tree = self._use(turn.tenant, turn.conversation_id)
        if turn.turn_id in tree.nodes:  # idempotent, as in Redis after a lost reply
            return
        if turn.parent_id is not None and turn.parent_id not in tree.nodes:
            raise no_turn(turn.parent_id)
        if takes_head:
            if turn.parent_id != tree.conversation.head or self._is_held(tree):
                raise head_locked(turn.conversation_id)
            tree.conversation = replace(tree.conversation, running=turn.turn_id)
        until_s = self._clock() + self._lease_s
        self._add(tree, replace(turn, status="in_progress"), pack(turn), until_s)

    async def touch_turn(self, tenant: str, turn_id: str) -> None:
        tree = self._tree(tenant, conversation_of(turn_id))
        if tree is not None and turn_id in tree.nodes:
            self._use(tenant, tree.conversation.conversation_id)
            tree.nodes[turn_id].lease_s = self._clock() + self._lease_s

    async def finish_turn(self, turn: StoredTurn) -> None:
        tree = self._tree(turn.tenant, turn.conversation_id)
        if tree is None:
            return
        tree.last_turn_at = max(tree.last_turn_at, turn.created_at)
        node = tree.nodes.get(turn.turn_id)
        if node is None or node.info.status != "in_progress":
            return
        if tree.conversation.running == turn.turn_id:
            moves = turn.status != "failed" and tree.is_whole(turn.turn_id)
            head = turn.turn_id if moves else tree.conversation.head
            tree.conversation = replace(tree.conversation, head=head, running=None)
        self._use(turn.tenant, turn.conversation_id)
        node.info = replace(node.info, status=turn.status)
        self._write(tree, node, pack(turn))

    async def add_items(self, turn: StoredTurn) -> None:
        tree = self._use(turn.tenant, turn.conversation_id)
        if turn.turn_id in tree.nodes:
            return
        if self._is_held(tree):
            raise head_locked(turn.conversation_id)
        packed = pack(turn)
        self._check_size(tree, len(packed.body))
        tree.last_turn_at = max(tree.last_turn_at, turn.created_at)
        parent_id = tree.conversation.head
        tree.conversation = replace(tree.conversation, head=turn.turn_id, running=None)
        self._add(tree, replace(turn, parent_id=parent_id, status="completed"), packed)

    async def replace_items(self, turn: StoredTurn) -> None:
        tree, node = self._find(turn.tenant, turn.turn_id)
        self._write(tree, node, pack(turn))

    async def turn(self, tenant: str, turn_id: str) -> StoredTurn:
        tree, node = self._find(tenant, turn_id)
        return self._unpacked(tree, node)

    async def path(self, tenant: str, turn_id: str) -> list[StoredTurn]:
        tree, node = self._find(tenant, turn_id)
        nodes = [node]
        while (parent_id := nodes[-1].info.parent_id) is not None:
            if parent_id not in tree.nodes:
                raise no_turn(turn_id)
            nodes.append(tree.nodes[parent_id])
        return [self._unpacked(tree, node) for node in reversed(nodes)]

    async def tree(self, tenant: str, conversation_id: str) -> Sequence[TurnSummary]:
        tree = self._use(tenant, conversation_id)
        return [
            TurnSummary(
                turn_id=turn_id,
                parent_id=node.info.parent_id,
                status=self._status(tree, node),
                created_at=node.info.created_at,
            )
            for turn_id, node in tree.nodes.items()
        ]

    async def set_head(
        self, tenant: str, conversation_id: str, turn_id: str | None, *, expected: str | None
    ) -> None:
        tree = self._use(tenant, conversation_id)
        if turn_id is not None and not tree.is_whole(turn_id):
            raise no_turn(turn_id)
        if self._is_held(tree) or tree.conversation.head != expected:
            raise head_locked(conversation_id)
        tree.conversation = replace(tree.conversation, head=turn_id, running=None)

    async def delete_turn(self, tenant: str, turn_id: str) -> None:
        tree, node = self._find(tenant, turn_id)
        conversation = tree.conversation
        if conversation.running == turn_id:
            conversation = replace(conversation, running=None)
        self._remove(tree, node)
        if not tree.is_whole(conversation.head):
            parent_id = node.info.parent_id
            conversation = replace(
                conversation, head=parent_id if tree.is_whole(parent_id) else None
            )
        tree.conversation = conversation
        if not tree.nodes and not conversation.is_listed:
            self._drop(conversation.conversation_id)

    # -- look-up -----------------------------------------------------------------------------

    def _tree(self, tenant: str, conversation_id: str | None) -> _Tree | None:
        self._drop_old()
        tree = None if conversation_id is None else self._trees.get(conversation_id)
        return tree if tree is not None and tree.conversation.tenant == tenant else None

    def _use(self, tenant: str, conversation_id: str) -> _Tree:
        tree = self._tree(tenant, conversation_id)
        if tree is None:
            raise no_conversation(conversation_id)
        tree.used_s = self._clock()
        self._trees.move_to_end(conversation_id)
        self._shelf.use(tenant, conversation_id)
        return tree

    def _find(self, tenant: str, turn_id: str) -> tuple[_Tree, _Node]:
        tree = self._tree(tenant, conversation_of(turn_id))
        if tree is None or turn_id not in tree.nodes:
            raise no_turn(turn_id)
        self._use(tenant, tree.conversation.conversation_id)
        return tree, tree.nodes[turn_id]

    def _is_held(self, tree: _Tree) -> bool:
        return tree.is_running(tree.conversation.running, self._clock())

    def _shown(self, tree: _Tree) -> Conversation:
        return (
            tree.conversation if self._is_held(tree) else replace(tree.conversation, running=None)
        )

    def _status(self, tree: _Tree, node: _Node) -> TurnStatus:
        status = node.info.status
        is_gone = status == "in_progress" and not tree.is_running(node.info.turn_id, self._clock())
        return "failed" if is_gone else status

    def _unpacked(self, tree: _Tree, node: _Node) -> StoredTurn:
        info = replace(node.info, status=self._status(tree, node))
        return unpack(info, node.body, tree.chunks)

    def _check_size(self, tree: _Tree, num_more: int) -> None:
        """
        Raises:
            StoreLimitError: as `add_items`.
        """
        conversation = tree.conversation
        added = (node for node in tree.nodes.values() if is_added(node.info.turn_id))
        num_added = sum(len(node.body) for node in added)
        for num_bytes, max_bytes in (
            (num_added, MAX_ADDED_BYTES),
            (tree.num_bytes + _TURN_BYTES, self._shelf.max_bytes_of(conversation.tenant)),
        ):
            if num_bytes + num_more > max_bytes:
                raise StoreLimitError(conversation.conversation_id, max_bytes)

    # -- storage -----------------------------------------------------------------------------

    def _add(self, tree: _Tree, turn: StoredTurn, packed: Packed, lease_s: float = 0.0) -> None:
        node = tree.nodes[turn.turn_id] = _Node(node_of(turn), b"", lease_s)
        self._write(tree, node, packed, num_more=_TURN_BYTES)

    def _write(self, tree: _Tree, node: _Node, packed: Packed, num_more: int = 0) -> None:
        num_more += len(packed.body) - len(node.body)
        node.body = packed.body
        for name, chunk in packed.chunks.items():
            if tree.chunks.setdefault(name, chunk) is chunk:
                num_more += _CHUNK_BYTES + len(chunk)
        self._account(tree, num_more)

    def _remove(self, tree: _Tree, node: _Node) -> None:
        """Delete a turn and the chunks that no other turn uses."""
        del tree.nodes[node.info.turn_id]
        num_less = _TURN_BYTES + len(node.body)
        used = {name for other in tree.nodes.values() for name in chunk_names(other.body)}
        for name in set(chunk_names(node.body)) - used:
            num_less += _CHUNK_BYTES + len(tree.chunks.pop(name))
        self._account(tree, -num_less)

    def _account(self, tree: _Tree, num_more: int) -> None:
        tree.num_bytes += num_more
        conversation = tree.conversation
        self._shelf.put(conversation.tenant, conversation.conversation_id, tree.num_bytes)
        self._drop_old()

    def _is_in_use(self, conversation_id: str) -> bool:
        tree, now_s = self._trees[conversation_id], self._clock()
        if not (tree.nodes or tree.conversation.is_listed):  # its first turn is about to begin
            return tree.used_s + self._lease_s > now_s
        return any(tree.is_running(turn_id, now_s) for turn_id in tree.nodes)

    def _drop_old(self) -> None:
        horizon_s = self._clock() - self._ttl_s
        expired = itertools.takewhile(lambda each: each[1].used_s <= horizon_s, self._trees.items())
        for conversation_id in [key for key, _ in expired if not self._is_in_use(key)]:
            self._drop(conversation_id)
        self._shelf.make_room()  # what ran before may not run any longer

    def _drop(self, conversation_id: str) -> None:
        tree = self._trees.pop(conversation_id, None)
        if tree is not None:
            self._shelf.remove(tree.conversation.tenant, conversation_id)


def _num_bytes_of(conversation: Conversation) -> int:
    return sum(2 * len(key) + 2 * len(value) for key, value in conversation.metadata.items())
