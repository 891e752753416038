"""The prefix cache: contents of blocks, found by the tokens before and in them.

A full block has a key (`block_keys`). The last, partly filled block of a finished sequence is kept
under its parent without a key of its own.

Source: automatic prefix caching as in vLLM; RadixAttention (SGLang, Zheng et al., 2024) for
sharing to the token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

_TOKEN_BYTES = 4
_MAX_TAILS = 32  # children of one block that are compared, newest first


@dataclass(frozen=True, slots=True)
class Tag:
    """A block's retention: until when (by the clock of `EvictionOrder.pop`), and its priority."""

    expires_s: float
    priority: int = 0

    def joined(self, other: Tag) -> Tag:
        """A tag that satisfies both."""
        return Tag(max(self.expires_s, other.expires_s), max(self.priority, other.priority))


@dataclass(slots=True, eq=False)
class Hold:
    """Why the blocks of a turn that has ended are kept for a while: its session may come back.

    A block that several turns share is in the hold that lasts longest.

    Attributes:
        tenant: whose turn it was.
        is_persons: a person is expected, not a program.
        expires_s: by the clock of `EvictionOrder.pop`.
        last: the turn's last full block. Whoever finds it continues the turn.
        is_over: its session came back, or did not in time.
        beside: blocks that are in a shorter hold too, and that one.
    """

    tenant: str
    is_persons: bool
    expires_s: float
    last: CachedBlock | None = None
    is_over: bool = False
    beside: list[tuple[CachedBlock, Hold]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class CachedBlock:
    """The content of one block: computed once, never changed, in one or both tiers.

    Attributes:
        parent: key of the block before it, or the root.
        tokens: its token ids, packed (`pack`).
        key: None if the block is not full.
        device_id, host_id: the blocks that hold its bytes; if both, the same bytes.
        tag: its retention.
        hold: of the last turn that ended with it, which may be over.
    """

    parent: bytes
    tokens: bytes
    key: bytes | None = None
    device_id: int | None = None
    host_id: int | None = None
    tag: Tag | None = None
    hold: Hold | None = None


class KeyJournal:
    """Which full blocks came and went since it was last read; empty until it is first read.

    It says which prefixes an engine has, to those who route requests. Of a key that came and went,
    only what happened last is kept, and of more than `max_keys` keys nothing: then the reader must
    ask for all keys again.
    """

    def __init__(self, max_keys: int = 1 << 16) -> None:
        self._max_keys = max_keys
        self._is_on = False
        self._changes: dict[bytes, bool] = {}
        self._is_whole = False

    def __bool__(self) -> bool:
        """Whether there is something to read."""
        return bool(self._changes) or not self._is_whole

    def note(self, key: bytes, *, is_cached: bool) -> None:
        if self._is_on:
            self._changes[key] = is_cached
            if len(self._changes) > self._max_keys:
                self._changes.clear()
                self._is_whole = False

    def take(self) -> tuple[list[bytes], list[bytes]] | None:
        """The keys that came, and those that went; None if that is not known."""
        changes, self._changes = self._changes, {}
        was_whole, self._is_whole = self._is_whole, True
        self._is_on = True
        if not was_whole:
            return None
        return (
            [key for key, is_cached in changes.items() if is_cached],
            [key for key, is_cached in changes.items() if not is_cached],
        )


class PrefixCache:
    """The cached contents, by key and by parent."""

    def __init__(self) -> None:
        self.journal = KeyJournal()
        self._by_key: dict[bytes, CachedBlock] = {}
        self._children: dict[bytes, dict[CachedBlock, None]] = {}  # oldest first

    def __iter__(self) -> Iterator[CachedBlock]:
        for children in self._children.values():
            yield from children

    def keys(self) -> Iterable[bytes]:
        """The keys of all full blocks."""
        return self._by_key.keys()

    def get(self, key: bytes) -> CachedBlock | None:
        """The content of a full block."""
        return self._by_key.get(key)

    def insert(self, block: CachedBlock) -> None:
        """Add a content, whose key must be new."""
        if block.key is not None:
            assert block.key not in self._by_key, "a key stands for one content"
            self._by_key[block.key] = block
            self.journal.note(block.key, is_cached=True)
        self._children.setdefault(block.parent, {})[block] = None

    def remove(self, block: CachedBlock) -> None:
        """Remove a content; KeyError if it is not cached."""
        siblings = self._children[block.parent]
        del siblings[block]
        if not siblings:
            del self._children[block.parent]
        if block.key is not None:
            del self._by_key[block.key]
            self.journal.note(block.key, is_cached=False)

    def has_children(self, key: bytes) -> bool:
        return key in self._children

    def children(self, key: bytes) -> list[CachedBlock]:
        """The contents that directly follow a block."""
        return list(self._children.get(key, ()))

    def longest_tail(
        self, parent: bytes, tokens: bytes, *, is_usable: Callable[[CachedBlock], bool]
    ) -> tuple[CachedBlock, int] | None:
        """The child of `parent` that shares the longest prefix with the packed tokens, and how
        many tokens that is; None if no usable child shares the first one.
        """
        best: tuple[CachedBlock, int] | None = None
        longest = 0
        for number, child in enumerate(reversed(self._children.get(parent, {}))):
            if number == _MAX_TAILS:
                break
            shared = _num_shared(child.tokens, tokens)
            if shared > longest and is_usable(child):
                best, longest = (child, shared), shared
        return best


def _num_shared(left: bytes, right: bytes) -> int:
    """Length, in tokens, of the common prefix of two packed lists."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length // _TOKEN_BYTES
    if left[:_TOKEN_BYTES] != right[:_TOKEN_BYTES]:
        return 0
    return next(i for i in range(length) if left[i] != right[i]) // _TOKEN_BYTES
