"""A conversation's tree without its content, and what each operation makes of it: pure functions.

    load tree → operation(tree, …) → Change → store it, if nobody has changed the tree meanwhile

Every store works so: `memory_store` puts the change in place, `disk_store` loads and stores rows in
one transaction, `redis_store` compares a version and sets. So what an operation means is written
once. An operation returns `NOTHING` where its effect is there already: a store may repeat it after
a lost reply.

Times are milliseconds of the store's clock. Whether a turn with status `in_progress` runs is known
to the store of response logs, whose gateways hold leases (`response_log.leases`). `renewed` puts
that into a tree; a turn that does not run reads as `failed`. A turn begins before its log, so it
counts as running for `STARTS_S` in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import msgpack

from penstock.gateway.storage.conversations.ids import is_added
from penstock.gateway.storage.conversations.records import (
    Conversation,
    StoredTurn,
    TurnStatus,
    TurnSummary,
)
from penstock.gateway.storage.conversations.store import (
    MAX_ADDED_BYTES,
    head_locked,
    no_turn,
)
from penstock.gateway.storage.conversations.turn_codec import Packed, TreeNode
from penstock.gateway.storage.tenant_shares import StoreLimitError

TREE_BYTES = 1024  # objects and dictionary slots, without their content
TURN_BYTES = 512
CHUNK_BYTES = 128
_KNOWN_MS = 1000  # for which it counts that a response runs
# The chunks of token ids and images that turns use, by turn.
Uses = Mapping[str, Collection[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A turn in the tree.

    Attributes:
        order: children have a higher one than their parents.
        num_bytes: of its body.
        lease_ms: until when it counts as running, whatever the store of logs knows of it.
    """

    parent: str | None
    status: TurnStatus
    created_at: int
    order: int
    num_bytes: int = 0
    lease_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """
    Attributes:
        metadata: in msgpack.
        used_at: of the last turn; without turns, of its creation (seconds of the epoch).
        running: the turn that took the head last, whether it still runs or not.
        num_turns: that there ever were.
        chunks: what its turns share, by name: bytes of each.
    """

    conversation_id: str
    tenant: str
    created_at: int
    is_listed: bool
    metadata: bytes
    used_at: int
    is_pinned: bool = False
    head: str | None = None
    running: str | None = None
    num_turns: int = 0
    nodes: Mapping[str, Node] = field(default_factory=dict)
    chunks: Mapping[bytes, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        num = TREE_BYTES + len(self.metadata)
        num += sum(TURN_BYTES + node.num_bytes for node in self.nodes.values())
        return num + sum(CHUNK_BYTES + size for size in self.chunks.values())

    def node(self, turn_id: str) -> Node:
        """Raises: NotFoundError."""
        node = self.nodes.get(turn_id)
        if node is None:
            raise no_turn(turn_id)
        return node

    def runs(self, turn_id: str | None, now_ms: int) -> bool:
        node = None if turn_id is None else self.nodes.get(turn_id)
        return node is not None and node.status == "in_progress" and node.lease_ms > now_ms

    def is_held(self, now_ms: int) -> bool:
        """Whether a turn holds the head."""
        return self.runs(self.running, now_ms)

    def has_running(self, now_ms: int) -> bool:
        return any(self.runs(turn_id, now_ms) for turn_id in self.nodes)

    def is_whole(self, turn_id: str | None) -> bool:
        """Whether all turns from this one to the root exist."""
        while turn_id is not None:
            node = self.nodes.get(turn_id)
            if node is None:
                return False
            turn_id = node.parent
        return True

    def path(self, turn_id: str) -> list[str]:
        """From the root to a turn. Raises: NotFoundError: one of them does not exist."""
        path = [turn_id]
        while (parent := self.node(path[-1]).parent) is not None:
            if parent not in self.nodes:
                raise no_turn(turn_id)
            path.append(parent)
        return path[::-1]

    # -- as it is shown ----------------------------------------------------------------------

    def status(self, turn_id: str, now_ms: int) -> TurnStatus:
        status = self.nodes[turn_id].status
        is_gone = status == "in_progress" and not self.runs(turn_id, now_ms)
        return "failed" if is_gone else status

    def conversation(self, now_ms: int) -> Conversation:
        return Conversation(
            conversation_id=self.conversation_id,
            tenant=self.tenant,
            created_at=self.created_at,
            metadata=msgpack.unpackb(self.metadata),
            head=self.head,
            running=self.running if self.is_held(now_ms) else None,
            is_listed=self.is_listed,
            is_pinned=self.is_pinned,
            used_at=self.used_at,
        )

    def summaries(self, now_ms: int) -> list[TurnSummary]:
        """All turns, parents before children."""
        return [
            TurnSummary(
                turn_id=turn_id,
                parent_id=node.parent,
                status=self.status(turn_id, now_ms),
                created_at=node.created_at,
            )
            for turn_id, node in sorted(self.nodes.items(), key=lambda each: each[1].order)
        ]

    def info(self, turn_id: str, now_ms: int) -> TreeNode:
        """What `turn_codec.unpack` needs. Raises: NotFoundError."""
        node = self.node(turn_id)
        return TreeNode(
            turn_id=turn_id,
            conversation_id=self.conversation_id,
            tenant=self.tenant,
            parent_id=node.parent,
            status=self.status(turn_id, now_ms),
            created_at=node.created_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an operation changes.

    Attributes:
        tree: as it is now; None: the conversation is deleted.
        body: a turn and its new body.
        chunks: new ones.
        dropped: turns whose bodies go.
        dropped_chunks: which no turn uses any longer.
    """

    tree: Tree | None
    body: tuple[str, bytes] | None = None
    chunks: Mapping[bytes, bytes] = field(default_factory=dict)
    dropped: Sequence[str] = ()
    dropped_chunks: Sequence[bytes] = ()


NOTHING = None  # the effect of an operation is there already
# From a tree, the time (ms), and the chunks that its turns use, which only some need: one of the
# functions below, with its keywords bound.
Operation = Callable[[Tree, int, Uses], Change | None]
NO_USES: Uses = MappingProxyType({})


def overdue(tree: Tree, now_ms: int) -> list[str]:
    """The turns that run only if the store of logs says so."""
    return [
        turn_id
        for turn_id, node in tree.nodes.items()
        if node.status == "in_progress" and node.lease_ms <= now_ms
    ]


def renewed(tree: Tree, now_ms: int, running: Collection[str]) -> Tree:
    """With the leases of the turns whose responses run. That is never stored."""
    nodes = {
        turn_id: replace(tree.nodes[turn_id], lease_ms=now_ms + _KNOWN_MS)
        for turn_id in overdue(tree, now_ms)
        if turn_id in running
    }
    return replace(tree, nodes={**tree.nodes, **nodes}) if nodes else tree


def changed_nodes(before: Tree, after: Tree) -> dict[str, Node]:
    """The turns that are new or other than they were."""
    known = before.nodes
    return {name: node for name, node in after.nodes.items() if known.get(name) is not node}


# -- operations --------------------------------------------------------------------------------


def create(conversation: Conversation) -> Tree:
    return Tree(
        conversation_id=conversation.conversation_id,
        tenant=conversation.tenant,
        created_at=conversation.created_at,
        is_listed=conversation.is_listed,
        metadata=pack_metadata(conversation.metadata),
        is_pinned=conversation.is_pinned,
        used_at=max(conversation.used_at, conversation.created_at),
    )


def update(
    tree: Tree,
    _now_ms: int,
    _uses: Uses,
    *,
    metadata: Mapping[str, str] | None,
    is_pinned: bool | None,
) -> Change:
    return Change(
        tree=replace(
            tree,
            metadata=tree.metadata if metadata is None else pack_metadata(metadata),
            is_pinned=tree.is_pinned if is_pinned is None else is_pinned,
        )
    )


def delete(_tree: Tree, _now_ms: int, _uses: Uses) -> Change:
    return Change(tree=None)


def begin_turn(
    tree: Tree,
    now_ms: int,
    _uses: Uses,
    *,
    turn: StoredTurn,
    packed: Packed,
    takes_head: bool,
    starts_ms: int,
) -> Change | None:
    if turn.turn_id in tree.nodes:
        return NOTHING
    if turn.parent_id is not None and turn.parent_id not in tree.nodes:
        raise no_turn(turn.parent_id)
    if takes_head:
        if turn.parent_id != tree.head or tree.is_held(now_ms):
            raise head_locked(tree.conversation_id)
        tree = replace(tree, running=turn.turn_id)
    node = Node(
        parent=turn.parent_id,
        status="in_progress",
        created_at=turn.created_at,
        order=tree.num_turns + 1,
        lease_ms=now_ms + starts_ms,
    )
    return _put(tree, turn.turn_id, node, packed)


def finish_turn(
    tree: Tree, _now_ms: int, _uses: Uses, *, turn: StoredTurn, packed: Packed
) -> Change:
    tree = replace(tree, used_at=max(tree.used_at, turn.created_at))
    node = tree.nodes.get(turn.turn_id)
    if node is None or node.status != "in_progress":
        return Change(tree=tree)
    if tree.running == turn.turn_id:
        moves = turn.status != "failed" and tree.is_whole(turn.turn_id)
        tree = replace(tree, running=None, head=turn.turn_id if moves else tree.head)
    return _put(tree, turn.turn_id, replace(node, status=turn.status, lease_ms=0), packed)


def add_items(
    tree: Tree,
    now_ms: int,
    _uses: Uses,
    *,
    turn: StoredTurn,
    packed: Packed,
    max_bytes: int | None,
) -> Change | None:
    """
    Args:
        max_bytes: of the conversation; None: no bound.
    """
    if turn.turn_id in tree.nodes:
        return NOTHING
    if tree.is_held(now_ms):
        raise head_locked(tree.conversation_id)
    num_added = sum(node.num_bytes for name, node in tree.nodes.items() if is_added(name))
    images = sum(len(chunk) for name, chunk in packed.chunks.items() if name not in tree.chunks)
    num_bytes = tree.num_bytes + TURN_BYTES + images
    for num, bound in ((num_added, MAX_ADDED_BYTES), (num_bytes, max_bytes)):
        if bound is not None and num + len(packed.body) > bound:
            raise StoreLimitError(tree.conversation_id, bound)
    node = Node(
        parent=tree.head,
        status="completed",
        created_at=turn.created_at,
        order=tree.num_turns + 1,
    )
    used_at = max(tree.used_at, turn.created_at)
    tree = replace(tree, head=turn.turn_id, running=None, used_at=used_at)
    return _put(tree, turn.turn_id, node, packed)


def replace_items(
    tree: Tree, _now_ms: int, uses: Uses, *, turn: StoredTurn, packed: Packed
) -> Change:
    """Needs the uses."""
    change = _put(tree, turn.turn_id, tree.node(turn.turn_id), packed)
    assert change.tree is not None
    others = {name: names for name, names in uses.items() if name != turn.turn_id}
    return _without_unused(change, change.tree, {**others, turn.turn_id: packed.names})


def set_head(
    tree: Tree, now_ms: int, _uses: Uses, *, turn_id: str | None, expected: str | None
) -> Change:
    if turn_id is not None and not tree.is_whole(turn_id):
        raise no_turn(turn_id)
    if tree.is_held(now_ms) or tree.head != expected:
        raise head_locked(tree.conversation_id)
    return Change(tree=replace(tree, head=turn_id, running=None))


def delete_turn(tree: Tree, now_ms: int, uses: Uses, *, turn_id: str, joins: bool) -> Change:
    """Needs the uses."""
    parent = tree.node(turn_id).parent
    if joins and tree.has_running(now_ms):
        raise head_locked(tree.conversation_id)
    nodes = {name: node for name, node in tree.nodes.items() if name != turn_id}
    if joins:
        nodes |= {
            name: replace(node, parent=parent)
            for name, node in nodes.items()
            if node.parent == turn_id
        }
    if not nodes and not tree.is_listed:
        return Change(tree=None)
    running = None if tree.running == turn_id else tree.running
    tree = replace(tree, nodes=nodes, running=running)
    if not tree.is_whole(tree.head):
        tree = replace(tree, head=parent if tree.is_whole(parent) else None)
    others = {name: names for name, names in uses.items() if name != turn_id}
    return _without_unused(Change(tree=tree, dropped=(turn_id,)), tree, others)


def with_use(tree: Tree, used_at: int) -> Tree:
    """As used at that time or later."""
    return replace(tree, used_at=max(tree.used_at, used_at))


def pack_metadata(metadata: Mapping[str, str]) -> bytes:
    packed: bytes = msgpack.packb(dict(metadata))
    return packed


# -- parts of operations -----------------------------------------------------------------------


def _with_node(tree: Tree, turn_id: str, node: Node) -> Tree:
    return replace(
        tree,
        nodes={**tree.nodes, turn_id: node},
        num_turns=max(tree.num_turns, node.order),
    )


def _put(tree: Tree, turn_id: str, node: Node, packed: Packed) -> Change:
    """A turn with its new body."""
    new = {name: chunk for name, chunk in packed.chunks.items() if name not in tree.chunks}
    tree = _with_node(tree, turn_id, replace(node, num_bytes=len(packed.body)))
    if new:
        sizes = {name: len(chunk) for name, chunk in new.items()}
        tree = replace(tree, chunks={**tree.chunks, **sizes})
    return Change(tree=tree, body=(turn_id, packed.body), chunks=new)


def _without_unused(change: Change, tree: Tree, uses: Uses) -> Change:
    used = {name for names in uses.values() for name in names}
    unused = [name for name in tree.chunks if name not in used]
    chunks = {name: size for name, size in tree.chunks.items() if name in used}
    return replace(change, tree=replace(tree, chunks=chunks), dropped_chunks=unused)
