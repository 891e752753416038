"""Which blocks each sequence holds, in which tier: the interface of scheduling to KV memory.

    admit     a sequence enters the device: cached blocks are shared, swapped ones come back
    grow      add room for its next tokens; a shared partial block is copied before it is written
    commit    put computed blocks into the prefix cache
    fork      a new sequence continues from here, sharing every block
    swap_out  move blocks to the host tier, to come back with the same bytes
    release   give blocks up; those worth finding stay cached

This only plans; the device writes. A released block may be handed out at once, because the device
runs batches in order and a batch's moves before its compute, so every reader of the old content
comes before the next writer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered

from penstock.engine.batch import BlockMoves
from penstock.engine.blocks.block_keys import block_key, pack
from penstock.engine.blocks.lasting_pool import BlockRecords
from penstock.engine.blocks.prefix_cache import CachedBlock, Hold
from penstock.engine.blocks.prefixes import BlockTable, Prefixes, Tail
from penstock.engine.blocks.tiers import BlockCounters, Tiers
from penstock.engine.request import ImageInput, Retention, Sequence


class BlockManager:
    """The block tables of all sequences, over the two tiers.

    Args:
        num_host_blocks: size of the host tier; 0 for none.
        cache_root: everything that KV depends on besides tokens (weights, dtypes, block size).
        kv_depends_on_prompt_len: KV depends on the prompt's length too (dynamic NTK rope), so only
            prompts of equal length share it.
        clock: seconds, for retention and for what sequences are charged.
        records: of the device's blocks, if they outlive the engine.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        cache_root: bytes = b"",
        kv_depends_on_prompt_len: bool = False,
        clock: Callable[[], float] = time.monotonic,
        records: BlockRecords | None = None,
    ) -> None:
        self.block_size = block_size
        self.tiers = Tiers(
            num_blocks=num_blocks, num_host_blocks=num_host_blocks, clock=clock, records=records
        )
        self._prefixes = Prefixes(
            self.tiers,
            block_size,
            is_on=enable_prefix_caching,
            cache_root=cache_root,
            kv_depends_on_prompt_len=kv_depends_on_prompt_len,
            clock=clock,
        )
        self._clock = clock
        self._tables: dict[int, BlockTable] = {}
        self._num_swapped = 0

    @property
    def counters(self) -> BlockCounters:
        return self.tiers.counters

    @property
    def num_blocks(self) -> int:
        return self.tiers.device.num_blocks

    @property
    def num_swapped_sequences(self) -> int:
        return self._num_swapped

    def is_swapped(self, sequence: Sequence) -> bool:
        table = self._tables.get(sequence.seq_id)
        return table is not None and table.is_swapped

    def block_ids(self, sequence: Sequence) -> tuple[int, ...]:
        """The sequence's blocks in the tier it is in."""
        table = self._tables.get(sequence.seq_id)
        return () if table is None else tuple(table.block_ids)

    def take_moves(self) -> BlockMoves:
        """Return, and clear, the planned moves; the next step must start with them."""
        return self.tiers.take_moves()

    def num_slots(self, sequence: Sequence) -> int:
        """Token slots of the sequence's blocks."""
        return self._tables[sequence.seq_id].capacity_tokens

    # -- entering the device ----------------------------------------------------------------

    def admit(
        self,
        sequence: Sequence,
        *,
        num_spared: int = 0,
        spares_persons: bool = False,
        spares_agents: bool = False,
    ) -> int | None:
        """Give a sequence device blocks for all its known tokens. Returns how many of the tokens
        already have their KV there (never all), or None, changing nothing, if too few are free.

        Args:
            num_spared: blocks that must stay free.
            spares_persons, spares_agents: so must those that are kept for its tenant's persons, or
                agents (`hold`), without those found for it.
        """
        table = self._table(sequence)
        if table.is_swapped:
            return self._swap_in(table, sequence, num_spared)
        found, tail = self._prefixes.find(table, sequence)
        for persons, spares in ((True, spares_persons), (False, spares_agents)):
            if spares:
                num_spared += self._num_expected_others(sequence, found, persons=persons)
        if tail is not None and not self._fits(sequence, found, num_spared, tail=tail[0]):
            tail = None
        if not self._fits(sequence, found, num_spared):
            return None
        return self._enter(table, sequence, found, tail)

    def _table(self, sequence: Sequence) -> BlockTable:
        table = self._tables.get(sequence.seq_id)
        if table is None:
            table = self._tables[sequence.seq_id] = BlockTable(
                self.block_size,
                root=self._prefixes.root_of(sequence),
                images=sequence.request.images,
            )
        return table

    def num_cached(self, sequence: Sequence, *, hold_s: float) -> int:
        """How many tokens of a new sequence have their KV in full blocks on the device.

        Args:
            hold_s: if it continues a turn that is kept (`hold`), keep it for so much longer.
        """
        found, _ = self._prefixes.find(self._table(sequence), sequence)
        for hold in _continued(found):
            hold.expires_s = max(hold.expires_s, self._clock() + hold_s)
        return self.block_size * sum(block.device_id is not None for block in found)

    def _num_expected_others(
        self, sequence: Sequence, found: Ordered[CachedBlock], *, persons: bool
    ) -> int:
        device = self.tiers.device
        num_expected = device.num_expected(sequence.request.tenant, persons=persons)
        own = sum(
            block.hold is not None
            and not block.hold.is_over
            and block.hold.is_persons == persons
            and block.device_id is not None
            and not device.ref_counts[block.device_id]
            for block in found
        )
        return max(0, num_expected - own)

    def _fits(
        self,
        sequence: Sequence,
        found: Ordered[CachedBlock],
        num_spared: int,
        *,
        tail: CachedBlock | None = None,
    ) -> bool:
        """Whether enough blocks are free once `found` and `tail` are held."""
        device = self.tiers.device
        held = [block.device_id for block in found if block.device_id is not None]
        num_new = -(-len(sequence.token_ids) // self.block_size) - len(held)
        if tail is not None and tail.device_id is not None:
            held.append(tail.device_id)
        num_revived = sum(device.ref_counts[block_id] == 0 for block_id in held)
        return num_new + num_revived + num_spared <= device.num_available

    def _enter(
        self,
        table: BlockTable,
        sequence: Sequence,
        found: Ordered[CachedBlock],
        tail: Tail | None,
    ) -> int:
        """Hold the blocks found and allocate the rest; how many tokens need not be computed."""
        self.charge(sequence)
        # Hold everything that will be read before allocating, which may evict cached blocks.
        for block in found:
            self.tiers.incref(block)
        if tail is not None:
            self.tiers.incref(tail[0])
        for hold in _continued(found):
            self.counters.num_returns += not hold.is_persons
            self.tiers.end_hold(hold)
        num_on_device = sum(block.device_id is not None for block in found)
        num_total = -(-len(sequence.token_ids) // self.block_size)
        new = iter(self.tiers.device.allocate(num_total - num_on_device))
        num_cached, num_from_host = len(found) * self.block_size, 0
        for block in found:
            if block.device_id is None:
                self.tiers.bring(block, next(new))
                num_from_host += self.block_size
            assert block.device_id is not None
            table.block_ids.append(block.device_id)
        if tail is not None:
            block, num_shared = tail
            num_cached += num_shared
            num_from_host += num_shared if block.device_id is None else 0
            table.block_ids.append(next(new))
            self.tiers.copy(block, table.block_ids[-1])
        table.block_ids.extend(new)
        sequence.num_committed_blocks = len(found)
        self._prefixes.count_hits(sequence, num_cached, num_from_host)
        return num_cached

    # -- on the device ----------------------------------------------------------------------

    def grow(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for `num_tokens` tokens in total. Returns the blocks appended, or None,
        changing nothing, if too few are free.

        A shared partial block is replaced by the sequence's own. It can only be shared while the
        device does not know the sequence, and so is sent its whole table.
        """
        table = self._tables[sequence.seq_id]
        if num_tokens <= table.capacity_tokens and not table.has_shared_partial_block:
            sequence.num_slots = table.capacity_tokens
            return ()
        device = self.tiers.device
        num_missing = table.num_missing_blocks(num_tokens)
        is_copying = table.has_shared_partial_block and self._is_wanted(table.block_ids[-1])
        if num_missing + is_copying > device.num_available:
            return None
        if is_copying:
            assert not sequence.is_on_device, "a shared partial block on the device"
            source = table.block_ids[-1]
            (table.block_ids[-1],) = device.allocate(1)
            self.tiers.plan.copy(source, table.block_ids[-1])
            device.release(source)
        table.has_shared_partial_block = False
        if num_missing == 0:
            return ()
        self.charge(sequence)
        new = device.allocate(num_missing)
        table.block_ids.extend(new)
        sequence.num_slots = table.capacity_tokens
        return tuple(new)

    def grow_if_free(
        self, sequence: Sequence, num_tokens: int, *, num_spared: int
    ) -> tuple[int, ...] | None:
        """Grow a sequence (`grow`), unless that takes blocks and leaves fewer than `num_spared`."""
        num_missing = self._tables[sequence.seq_id].num_missing_blocks(num_tokens)
        if num_missing > 0 and num_missing + num_spared > self.tiers.device.num_available:
            return None
        return self.grow(sequence, num_tokens)

    def _is_wanted(self, device_id: int) -> bool:
        """Whether another sequence holds a block, or may find its content in the cache."""
        is_shared = self.tiers.plan.num_holders(device_id) > 1
        return is_shared or self.tiers.full_content(device_id) is not None

    def commit(self, sequence: Sequence, *, is_fresh: bool = True) -> None:
        """Put the full blocks whose tokens are known and computed into the prefix cache.

        Args:
            is_fresh: the next step computes them, not an earlier one.
        """
        self._prefixes.commit(self._tables[sequence.seq_id], sequence, is_fresh=is_fresh)

    def prefix_id(self, sequence: Sequence) -> bytes | None:
        """The hash of a sequence's last full block, and so of the chain up to it; None if there
        is no such block, or the sequence holds no blocks."""
        table = self._tables.get(sequence.seq_id)
        return None if table is None else self._prefixes.last_key(table, sequence)

    def fork(self, parent: Sequence, child: Sequence, *, num_tokens: int) -> None:
        """Make a new sequence continue after the parent's first `num_tokens` tokens, whose KV is
        computed (in either tier): every block is shared, none is copied yet."""
        source = self._tables[parent.seq_id]
        num_blocks = -(-num_tokens // self.block_size)
        table = BlockTable(
            self.block_size,
            root=source.root,
            images=source.images,
            block_ids=source.block_ids[:num_blocks],
            keys=source.keys[: num_tokens // self.block_size],
            is_swapped=source.is_swapped,
            has_shared_partial_block=num_tokens % self.block_size != 0,
        )
        pool = self.tiers.host if table.is_swapped else self.tiers.device
        for block_id in table.block_ids:
            pool.incref(block_id)
        self._num_swapped += table.is_swapped
        self.charge(child)
        self._tables[child.seq_id] = table
        child.num_committed_blocks = min(parent.num_committed_blocks, num_tokens // self.block_size)

    def charge(self, sequence: Sequence) -> None:
        """Add to what a sequence has spent the blocks that it has held on the device since it was
        last charged. To be called before their number changes."""
        now_s, table = self._clock(), self._tables.get(sequence.seq_id)
        if table is not None and not table.is_swapped:
            sequence.block_us += len(table.block_ids) * (now_s - sequence.held_since_s) * 1e6
        sequence.held_since_s = now_s

    # -- leaving the device -----------------------------------------------------------------

    def swap_out(self, sequence: Sequence) -> bool:
        """Move a sequence's computed blocks to the host tier; False, changing nothing, if it has
        none or there is no room. Other sequences keep the blocks that they share."""
        table = self._tables[sequence.seq_id]
        num_used = -(-sequence.num_computed_tokens // self.block_size)
        host_ids = self.tiers.save(table.block_ids[:num_used]) if num_used else None
        if host_ids is None:
            return False
        self.charge(sequence)
        self._release_device(table)
        sequence.num_slots = 0
        table.block_ids = host_ids
        table.is_swapped = True
        self._num_swapped += 1
        return True

    def num_blocks_to_save(self, sequence: Sequence) -> int:
        """Blocks that swapping a sequence out would move."""
        num_used = -(-sequence.num_computed_tokens // self.block_size)
        return sum(
            (block := self.tiers.full_content(block_id)) is None or block.host_id is None
            for block_id in self._tables[sequence.seq_id].block_ids[:num_used]
        )

    def release(
        self,
        sequence: Sequence,
        *,
        retention: Retention | None = None,
        has_invalid_kv: bool = False,
    ) -> list[CachedBlock]:
        """Release all blocks of a sequence, which may have none. Returns those contents that can
        still be found, in order.

        Args:
            retention: how long to prefer them at eviction.
            has_invalid_kv: their content is invalid (NaN) and must not be found again.
        """
        self.charge(sequence)
        sequence.num_slots = 0
        table = self._tables.pop(sequence.seq_id, None)
        if table is None:
            return []
        contents: list[CachedBlock] = []
        if has_invalid_kv:
            self._prefixes.spoil(table)
        elif table.is_swapped:
            contents = self._prefixes.tag(table, retention)
        else:
            contents = self._prefixes.keep(table, sequence, retention)
        if table.is_swapped:
            self._num_swapped -= 1
            for host_id in reversed(table.block_ids):
                self.tiers.host.release(host_id)
        else:
            self._release_device(table)
        return contents

    def hold(
        self, contents: Ordered[CachedBlock], *, tenant: str, is_persons: bool, duration_s: float
    ) -> Hold:
        """Keep what a turn left (`release`) for a while, since its session is expected back: it is
        evicted after blocks that nobody is expected for, but never kept from a sequence."""
        hold = Hold(tenant, is_persons, self._clock() + duration_s)
        self.tiers.hold(contents, hold)
        return hold

    def end_hold(self, hold: Hold) -> None:
        """Treat what was kept like anything else in the cache."""
        self.tiers.end_hold(hold)

    def drop_prefix(
        self,
        token_ids: Ordered[int],
        *,
        cache_salt: str = "",
        adapter: str | None = None,
        images: tuple[ImageInput, ...] = (),
    ) -> int:
        """Forget the cached blocks of these tokens, from their end back to where another cached
        prefix branches off or a sequence holds the block; the number of blocks forgotten.

        Args:
            adapter: the digest of the adapter that computed them.
            images: those of the tokens.
        """
        return self._prefixes.drop(token_ids, cache_salt=cache_salt, adapter=adapter, images=images)

    # -- blocks of other engines --------------------------------------------------------------

    def find_blocks(self, keys: Ordered[bytes]) -> list[CachedBlock]:
        """The cached full blocks of these keys, up to the first that is not there. Between steps,
        their bytes are at `device_id` or `host_id`, once the steps in flight have run."""
        assert not self.tiers.plan, "their bytes are elsewhere until the next step"
        found = []
        for key in keys:
            block = self.tiers.cache.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def insert_remote_block(self, parent: bytes, tokens: bytes, key: bytes) -> int | None:
        """Cache a full block that comes from elsewhere. Between steps only.

        Args:
            parent, tokens, key: as in `CachedBlock`.

        Returns:
            The host block to write its bytes to before the next step; -1 if it is cached already,
            None if there is no room.

        Raises:
            ValueError: the key is not that of the tokens, or they are not a whole block.
        """
        if len(tokens) != len(pack((0,))) * self.block_size or block_key(parent, tokens) != key:
            raise ValueError("the key of a block is not that of its tokens")
        if self.tiers.cache.get(key) is not None:
            return -1
        return self.tiers.insert_remote_block(CachedBlock(parent=parent, tokens=tokens, key=key))

    def _swap_in(self, table: BlockTable, sequence: Sequence, num_spared: int) -> int | None:
        """Bring a swapped sequence back: its own bytes, or the same content if it is on the
        device by now."""
        device, host = self.tiers.device, self.tiers.host
        contents = [host.contents[host_id] for host_id in table.block_ids]
        if table.has_shared_partial_block:
            contents[-1] = None  # it will be written, so it needs a copy of its own
        found = [block for block in contents if block is not None and block.device_id is not None]
        if not self._fits(sequence, found, num_spared):
            return None
        self.charge(sequence)
        for block in found:
            self.tiers.incref(block)
        num_total = -(-len(sequence.token_ids) // self.block_size)
        new = iter(device.allocate(num_total - len(found)))
        block_ids = []
        for host_id, content in zip(table.block_ids, contents, strict=True):
            if content is None:
                block_ids.append(next(new))
                self.tiers.plan.swap_in(host_id, block_ids[-1])
                host.release(host_id)
            elif content.device_id is not None:
                block_ids.append(content.device_id)
                host.release(host_id)
            else:
                block_ids.append(next(new))
                self.tiers.bring(content, block_ids[-1])
        table.block_ids = [*block_ids, *new]
        table.is_swapped = table.has_shared_partial_block = False
        self._num_swapped -= 1
        return sequence.num_computed_tokens

    def _release_device(self, table: BlockTable) -> None:
        # The last block first, so that a chain is evicted from its end.
        for device_id in reversed(table.block_ids):
            self.tiers.plan.cancel(device_id)
            self.tiers.device.release(device_id)
        table.block_ids = []

    def check_integrity(self) -> None:
        """Assert that every block is held, cached or empty, exactly as the tables say."""
        tables = self._tables.values()
        self.tiers.check_integrity(
            [b for table in tables if not table.is_swapped for b in table.block_ids],
            [b for table in tables if table.is_swapped for b in table.block_ids],
        )
        assert self._num_swapped == sum(table.is_swapped for table in tables)


def _continued(found: Iterable[CachedBlock]) -> list[Hold]:
    """The holds on turns that a sequence continues for which these blocks were found."""
    return [
        block.hold
        for block in found
        if block.hold is not None and block.hold.last is block and not block.hold.is_over
    ]
