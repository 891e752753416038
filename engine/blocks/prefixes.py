"""Matches a sequence's tokens with the prefix cache: which blocks it can share, which it adds.

Works on the chain of keys in a `BlockTable`, which it extends as needed. With prefix caching off,
it finds and adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

from penstock.engine.blocks.block_keys import block_key, chain_root, pack, with_images
from penstock.engine.blocks.prefix_cache import CachedBlock, Tag
from penstock.engine.blocks.tiers import Tiers
from penstock.engine.request import ImageInput, Retention, Sequence, SequenceStatus


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence: position p lies in block `p // block_size`.

    Source: PagedAttention (Kwon et al., SOSP 2023), section 4.

    Attributes:
        root: start of its chain of keys.
        images: those of its prompt, in order.
        keys: keys of its full blocks, as far as they were needed.
        is_swapped: the ids are the host tier's.
        has_shared_partial_block: the last block is partly filled and belongs to another sequence,
            which may still write behind the shared part; this sequence must copy it before writing.
    """

    block_size: int
    root: bytes = b""
    images: tuple[ImageInput, ...] = ()
    block_ids: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    is_swapped: bool = False
    has_shared_partial_block: bool = False

    @property
    def capacity_tokens(self) -> int:
        return len(self.block_ids) * self.block_size

    def num_missing_blocks(self, num_tokens: int) -> int:
        """Blocks to append so that `num_tokens` positions fit."""
        return max(0, -(-num_tokens // self.block_size) - len(self.block_ids))


Tail = tuple[CachedBlock, int]  # a content to copy, and how many of its tokens match


class Prefixes:
    """Finds, adds, tags and drops the contents of sequences' blocks.

    Args: as in `BlockManager`.
    """

    def __init__(
        self,
        tiers: Tiers,
        block_size: int,
        *,
        is_on: bool,
        cache_root: bytes,
        kv_depends_on_prompt_len: bool,
        clock: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self._is_on = is_on
        self._cache_root = cache_root
        self._kv_depends_on_prompt_len = kv_depends_on_prompt_len
        self._clock = clock

    # -- finding ----------------------------------------------------------------------------

    def root_of(self, sequence: Sequence) -> bytes:
        """The root of the sequence's chain."""
        request = sequence.request
        adapter = None if request.adapter is None else request.adapter.digest
        return self._root(request.cache_salt, adapter, num_prompt_tokens=sequence.num_prompt_tokens)

    def find(self, table: BlockTable, sequence: Sequence) -> tuple[list[CachedBlock], Tail | None]:
        """The cached full blocks that match the start of the sequence, and a block that matches
        some of the tokens that follow. At least one token is left to compute."""
        found: list[CachedBlock] = []
        # Log-probabilities of the prompt, and the mean of its hidden states, need all of it.
        if not self._is_on or sequence.wants_prompt_logprobs or sequence.needs_every_token:
            return found, None
        last = len(sequence.token_ids) - 1
        for number in range(last // self._block_size):
            block = self._tiers.cache.get(self._key(table, sequence.token_ids, number))
            if block is None:
                break
            found.append(block)
        start = len(found) * self._block_size
        end = min(start + self._block_size, last)
        if start >= end:
            return found, None
        return found, self._tiers.cache.longest_tail(
            self._parent(table, len(found)),
            pack(sequence.token_ids[start:end]),
            is_usable=self._tiers.is_copyable,
        )

    def count_hits(self, sequence: Sequence, num_cached: int, num_from_host: int) -> None:
        """Count a request's hits at its first admission only: later, and in forks, a request finds
        its own blocks."""
        is_first = sequence.index == 0 and sequence.status is SequenceStatus.WAITING
        request = sequence.request
        num_given = len(request.prompt_token_ids) + len(request.output_token_ids)
        if not self._is_on or not is_first or len(sequence.token_ids) != num_given:
            return
        counters = self._tiers.counters
        counters.prefix_queries += num_given
        counters.prefix_hits += num_cached
        counters.prefix_host_hits += num_from_host
        sequence.num_cached_tokens = min(num_cached, sequence.num_prompt_tokens)
        sequence.num_host_cached_tokens = min(num_from_host, sequence.num_cached_tokens)

    # -- adding and dropping ----------------------------------------------------------------

    def commit(self, table: BlockTable, sequence: Sequence, *, is_fresh: bool) -> None:
        """Cache the full blocks whose tokens are known and computed, and the partly filled one at
        a prompt's end."""
        num_full = _num_known(sequence) // self._block_size
        first, sequence.num_committed_blocks = sequence.num_committed_blocks, num_full
        if not self._is_on:
            return
        for number in range(first, num_full):
            key = self._key(table, sequence.token_ids, number)
            device_id = table.block_ids[number]
            self._forget_tail(device_id)
            # If two sequences computed the same content, only the first is cached.
            if self._tiers.device.contents[device_id] is None and not self._tiers.cache.get(key):
                block = CachedBlock(
                    parent=self._parent(table, number),
                    tokens=self._packed(sequence.token_ids, number),
                    key=key,
                )
                self._tiers.publish(block, device_id, is_fresh=is_fresh)
        if sequence.num_computed_tokens == sequence.num_prompt_tokens:
            self._publish_tail(table, sequence, is_fresh=is_fresh)

    def last_key(self, table: BlockTable, sequence: Sequence) -> bytes | None:
        """The key of the last full block, whether or not its content is still cached. The newest
        token has no KV yet."""
        num_full = (len(sequence.token_ids) - 1) // self._block_size
        if not self._is_on or num_full == 0:
            return None
        return self._key(table, sequence.token_ids, num_full - 1)

    def keep(
        self, table: BlockTable, sequence: Sequence, retention: Retention | None
    ) -> list[CachedBlock]:
        """Cache everything that a sequence computed, as it leaves the device; the contents."""
        if not self._is_on or not table.block_ids:
            return []
        self.commit(table, sequence, is_fresh=False)
        self._publish_tail(table, sequence, is_fresh=False)
        return self.tag(table, retention)

    def tag(self, table: BlockTable, retention: Retention | None) -> list[CachedBlock]:
        """Extend the retention of a table's contents; the longest one given counts."""
        now_s = self._clock()
        contents = self._contents(table)
        for block in contents:
            if block.tag is not None and block.tag.expires_s <= now_s:
                block.tag = None  # expired, but used again: treat it like an untagged one
            if retention is not None:
                tag = Tag(now_s + retention.duration_s, retention.priority)
                block.tag = tag if block.tag is None else tag.joined(block.tag)
        return contents

    def spoil(self, table: BlockTable) -> None:
        """Remove a table's contents from the cache."""
        for block in self._contents(table):
            self._tiers.forget(block)

    def _contents(self, table: BlockTable) -> list[CachedBlock]:
        pool = self._tiers.host if table.is_swapped else self._tiers.device
        contents = (pool.contents[block_id] for block_id in table.block_ids)
        return [block for block in contents if block is not None]

    def drop(
        self,
        token_ids: Ordered[int],
        *,
        cache_salt: str,
        adapter: str | None,
        images: tuple[ImageInput, ...] = (),
    ) -> int:
        """Forget what is cached of a prefix; the number of blocks (`BlockManager.drop_prefix`)."""
        if not self._is_on:
            return 0
        root = self._root(cache_salt, adapter, num_prompt_tokens=len(token_ids))
        table = BlockTable(self._block_size, root=root, images=images)
        chain: list[CachedBlock] = []
        for number in range(len(token_ids) // self._block_size):
            block = self._tiers.cache.get(self._key(table, token_ids, number))
            if block is None:
                break
            chain.append(block)
        num_dropped = self._drop_tails(table, token_ids, len(chain))
        while chain:
            block = chain.pop()
            assert block.key is not None
            next_parent = self._parent(table, len(chain) + 1)
            if self._tiers.cache.has_children(next_parent) or not self._tiers.is_idle(block):
                break
            self._tiers.forget(block)
            num_dropped += 1 + self._drop_tails(table, token_ids, len(chain))
        return num_dropped

    def _publish_tail(self, table: BlockTable, sequence: Sequence, *, is_fresh: bool) -> None:
        """Cache the last, partly filled block; a sequence that continues from it makes a copy. Its
        owner may keep writing behind the cached tokens."""
        number = sequence.num_committed_blocks
        num_known = _num_known(sequence)
        tokens = pack(sequence.token_ids[number * self._block_size : num_known])
        if not tokens:
            return
        device_id = table.block_ids[number]
        device = self._tiers.device
        if self._tiers.plan.is_pending(device_id) and not is_fresh:
            return  # its planned copy will not be made
        if device.ref_counts[device_id] > 1:
            return  # another sequence holds it too
        self._forget_tail(device_id)
        if device.contents[device_id] is not None:
            return  # a shared partial block that its owner has filled
        parent = self._parent(table, number)
        known = self._tiers.cache.longest_tail(parent, tokens, is_usable=lambda _: True)
        if known is None or known[1] < num_known - number * self._block_size:
            block = CachedBlock(parent=parent, tokens=tokens)
            self._tiers.publish(block, device_id, is_fresh=is_fresh)

    def _forget_tail(self, device_id: int) -> None:
        """Remove a cached tail from the cache: the block holds more tokens by now."""
        block = self._tiers.device.contents[device_id]
        if block is not None and block.key is None:
            self._tiers.forget(block)

    def _drop_tails(self, table: BlockTable, token_ids: Ordered[int], number: int) -> int:
        """Forget the partly filled blocks at one position of a chain that hold these tokens."""
        tokens = self._packed(token_ids, number)
        tails = [
            block
            for block in self._tiers.cache.children(self._parent(table, number))
            if block.key is None and tokens.startswith(block.tokens) and self._tiers.is_idle(block)
        ]
        for block in tails:
            self._tiers.forget(block)
        return len(tails)

    # -- keys -------------------------------------------------------------------------------

    def _root(self, cache_salt: str, adapter: str | None, *, num_prompt_tokens: int) -> bytes:
        return chain_root(
            self._cache_root,
            cache_salt=cache_salt,
            adapter=adapter,
            num_prompt_tokens=num_prompt_tokens if self._kv_depends_on_prompt_len else 0,
        )

    def _key(self, table: BlockTable, token_ids: Ordered[int], number: int) -> bytes:
        """The key of a full block of known tokens."""
        keys = table.keys
        while len(keys) <= number:
            tokens = self._packed(token_ids, len(keys))
            keys.append(block_key(self._parent(table, len(keys)), tokens))
        return keys[number]

    def _parent(self, table: BlockTable, number: int) -> bytes:
        """The key of the block before, or the root; with the images in the block, if it has some:
        a token's id does not tell them apart."""
        key = table.keys[number - 1] if number else table.root
        if not table.images:
            return key
        start = number * self._block_size
        return with_images(key, table.images, start, start + self._block_size)

    def _packed(self, token_ids: Ordered[int], number: int) -> bytes:
        start = number * self._block_size
        return pack(token_ids[start : start + self._block_size])


def _num_known(sequence: Sequence) -> int:
    """Tokens that are both known and computed."""
    return min(sequence.num_computed_tokens, len(sequence.token_ids))
