"""Two tiers of blocks, their contents, and the moves between them.

The device computes on the device tier. The host tier keeps what does not fit there: blocks of
parked sequences (held, so they stay) and evicted contents (cached, so they may be dropped). A
content may be in both, with the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from penstock.engine.batch import BlockMoves
from penstock.engine.blocks.block_pool import BlockPool
from penstock.engine.blocks.lasting_pool import BlockRecords
from penstock.engine.blocks.prefix_cache import CachedBlock, Hold, PrefixCache


class MovePlan:
    """The copies of blocks that start the next step.

        swap-outs (device → host), then swap-ins (host → device), then copies (device → device)

    In that order, one plan can save a block, replace its content, and copy the new content. The
    source of a swap-in or copy is held until the plan is handed over, so that nothing planned later
    can write to it first. Every destination has one source; a released block has none.
    """

    def __init__(self, device: BlockPool, host: BlockPool) -> None:
        self._device, self._host = device, host
        self._swap_outs: dict[int, int] = {}  # host block ← device block
        self._swap_ins: dict[int, int] = {}  # device block ← host block
        self._copies: dict[int, int] = {}  # device block ← device block
        self._held_device: Counter[int] = Counter()
        self._held_host: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._swap_outs or self._held_host or self._held_device)

    def swap_out(self, device_id: int, host_id: int) -> None:
        """Save a device block. A host block evicted within one plan is just overwritten."""
        # Copies run after swap-outs: if a copy fills this block, its content is at the source.
        self._swap_outs[host_id] = self._copies.get(device_id, device_id)

    def swap_in(self, host_id: int, device_id: int) -> None:
        self._swap_ins[device_id] = host_id
        self._host.incref(host_id)
        self._held_host.append(host_id)

    def copy(self, source: int, destination: int) -> None:
        self._copies[destination] = source
        self._device.incref(source)
        self._held_device[source] += 1

    def is_pending(self, device_id: int) -> bool:
        """Whether a planned copy will fill the block."""
        return device_id in self._copies

    def cancel(self, device_id: int) -> None:
        """Drop the planned copy to a block that is released."""
        self._copies.pop(device_id, None)

    def num_holders(self, device_id: int) -> int:
        """References to a block other than the plan's own."""
        return self._device.ref_counts[device_id] - self._held_device[device_id]

    def take_moves(self) -> BlockMoves:
        """Return the plan and start an empty one."""
        moves = BlockMoves(
            swap_outs=tuple((source, target) for target, source in self._swap_outs.items()),
            swap_ins=tuple((source, target) for target, source in self._swap_ins.items()),
            copies=tuple((source, target) for target, source in self._copies.items()),
        )
        for source in self._held_device.elements():
            self._device.release(source)
        for host_id in self._held_host:
            self._host.release(host_id)
        for pending in (self._swap_outs, self._swap_ins, self._copies, self._held_device):
            pending.clear()
        self._held_host.clear()
        return moves


_NO_MOVES = BlockMoves()


@dataclass(slots=True)
class BlockCounters:
    """Totals since start."""

    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found, in either tier
    prefix_host_hits: int = 0  # of those, tokens that came from the host tier
    num_copied: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_holds: int = 0  # turns that ended in a tool call and were kept
    num_returns: int = 0  # of those, followed by the next turn in time


class Tiers:
    """The pools, the index of their contents, and the moves planned between them.

    Args:
        records: of the device's blocks, if they outlive the engine; those that another engine left
            are cached.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        num_host_blocks: int,
        clock: Callable[[], float],
        records: BlockRecords | None = None,
    ) -> None:
        left = [] if records is None else records.left()
        self.device = BlockPool(num_blocks, clock=clock, on_evict=self._leave_device, cached=left)
        self.host = BlockPool(num_host_blocks, clock=clock, on_evict=self._leave_host)
        self.cache = PrefixCache()
        self.plan = MovePlan(self.device, self.host)
        self.counters = BlockCounters()
        self.records = records
        self._fresh: set[int] = set()  # device blocks whose content the next step computes
        for block in left:
            self.cache.insert(block)

    def take_moves(self) -> BlockMoves:
        """Return, and clear, the planned moves; the next step must start with them."""
        self._fresh.clear()
        if not self.plan:
            return _NO_MOVES
        moves = self.plan.take_moves()
        self.counters.num_copied += len(moves.copies)
        self.counters.num_swapped_out += len(moves.swap_outs)
        self.counters.num_swapped_in += len(moves.swap_ins)
        return moves

    # -- contents ---------------------------------------------------------------------------

    def publish(self, block: CachedBlock, device_id: int, *, is_fresh: bool) -> None:
        """Put a device block's content into the prefix cache.

        Args:
            is_fresh: the next step computes it, so it can be shared but not yet copied.
        """
        self.cache.insert(block)
        self._set_device_block(block, device_id)
        if is_fresh:
            self._fresh.add(device_id)

    def is_copyable(self, block: CachedBlock) -> bool:
        return block.device_id not in self._fresh

    def full_content(self, device_id: int) -> CachedBlock | None:
        """The cached content of a full block. Not of a partly filled one, which may hold more
        tokens by now."""
        content = self.device.contents[device_id]
        return None if content is None or content.key is None else content

    def incref(self, block: CachedBlock) -> None:
        """Add a reference to a content's device block, or else to its host block."""
        if block.device_id is not None:
            self.device.incref(block.device_id)
        elif block.host_id is not None:
            self.host.incref(block.host_id)

    def bring(self, block: CachedBlock, device_id: int) -> None:
        """Copy a content, held on the host by `hold`, to a device block."""
        host_id = block.host_id
        assert host_id is not None, "a content that is not on the device is on the host"
        self.plan.swap_in(host_id, device_id)
        self.host.release(host_id)
        self._set_device_block(block, device_id)

    def copy(self, block: CachedBlock, device_id: int) -> None:
        """Fill a device block with a copy of a content held by `hold`, for a sequence that will
        write to it."""
        if block.device_id is not None:
            self.plan.copy(block.device_id, device_id)
            self.device.release(block.device_id)
        else:
            host_id = block.host_id
            assert host_id is not None, "a content is somewhere"
            self.plan.swap_in(host_id, device_id)
            self.host.release(host_id)

    def forget(self, block: CachedBlock) -> None:
        """Remove a content from the cache; sequences that hold its blocks keep them."""
        self.cache.remove(block)
        if block.device_id is not None:
            if self.records is not None:
                self.records.forget(block.device_id)
            self.device.forget(block.device_id)
        if block.host_id is not None:
            self.host.forget(block.host_id)
        block.device_id = block.host_id = None

    def insert_remote_block(self, block: CachedBlock) -> int | None:
        """Cache a content that comes from elsewhere; the host block to write it to at once, or None
        if there is no room. No moves may be planned."""
        assert not self.plan, "a planned move could overwrite it"
        if not self.host.num_available:
            return None
        (host_id,) = self.host.allocate(1)
        self.cache.insert(block)
        block.host_id = host_id
        self.host.contents[host_id] = block
        self.host.release(host_id)
        return host_id

    def hold(self, blocks: Ordered[CachedBlock], hold: Hold) -> None:
        """Keep a turn's contents, in their order, because its session may come back."""
        self.counters.num_holds += not hold.is_persons
        for block in reversed(blocks):
            if block.device_id is None and block.host_id is None:
                continue  # evicted meanwhile
            if block.key is not None and hold.last is None:
                hold.last = block
            other = block.hold
            if other is None or other.is_over:
                block.hold = hold
            elif other.expires_s < hold.expires_s:
                block.hold = hold
                hold.beside.append((block, other))
            else:
                other.beside.append((block, hold))
            self._place(block)

    def end_hold(self, hold: Hold) -> None:
        """Treat a hold's contents like others, those that are in a shorter hold too as its."""
        hold.is_over = True
        for block, other in hold.beside:
            if block.hold is hold:
                block.hold = other
                self._place(block)
        self.device.end_hold(hold)
        self.host.end_hold(hold)

    def _place(self, block: CachedBlock) -> None:
        if block.device_id is not None:
            self.device.place(block.device_id)
        if block.host_id is not None:
            self.host.place(block.host_id)

    def is_idle(self, block: CachedBlock) -> bool:
        """Whether no sequence holds the content in either tier."""
        on_device = block.device_id is not None and self.device.ref_counts[block.device_id] > 0
        on_host = block.host_id is not None and self.host.ref_counts[block.host_id] > 0
        return not (on_device or on_host)

    def _set_device_block(self, block: CachedBlock, device_id: int) -> None:
        block.device_id = device_id
        self.device.contents[device_id] = block
        if self.records is not None and block.key is not None:
            self.records.publish(device_id, block)

    # -- swapping ---------------------------------------------------------------------------

    def save(self, device_ids: Iterable[int]) -> list[int] | None:
        """Copy device blocks to host blocks, which are held; None if there is no room.

        A full block whose content is already on the host is held there and not copied again.
        """
        device_ids = list(device_ids)
        known = [self._saved_block(device_id) for device_id in device_ids]
        num_new = known.count(None)
        num_revived = sum(
            host_id is not None and self.host.ref_counts[host_id] == 0 for host_id in known
        )
        if num_new + num_revived > self.host.num_available:
            return None
        for host_id in known:
            if host_id is not None:
                self.host.incref(host_id)
        new = self.host.allocate(num_new)
        return [
            self._save(device_id, new.pop()) if host_id is None else host_id
            for device_id, host_id in zip(device_ids, known, strict=True)
        ]

    def _saved_block(self, device_id: int) -> int | None:
        content = self.full_content(device_id)
        return None if content is None else content.host_id

    def _save(self, device_id: int, host_id: int) -> int:
        self.plan.swap_out(device_id, host_id)
        content = self.full_content(device_id)
        if content is not None:
            content.host_id = host_id
            self.host.contents[host_id] = content
        return host_id

    # -- eviction ---------------------------------------------------------------------------

    def _leave_device(self, device_id: int, block: CachedBlock) -> None:
        """Move an evicted content to the host, if there is room."""
        if self.records is not None:
            self.records.forget(device_id)
        if block.host_id is None and self.host.num_available:
            (host_id,) = self.host.allocate(1)
            self.plan.swap_out(device_id, host_id)
            block.host_id = host_id
            self.host.contents[host_id] = block
            self.host.release(host_id)
        block.device_id = None
        if block.host_id is None:
            self.cache.remove(block)

    def _leave_host(self, _: int, block: CachedBlock) -> None:
        block.host_id = None
        if block.device_id is None:
            self.cache.remove(block)

    # -- checking ---------------------------------------------------------------------------

    def check_integrity(self, device_ids: Iterable[int], host_ids: Iterable[int]) -> None:
        """Assert that both pools are sound, and that index and contents agree.

        Args:
            device_ids, host_ids: every block of every table, repeated as often as it is held.
        """
        self.device.check_integrity(device_ids)
        self.host.check_integrity(host_ids)
        indexed = set(self.cache)
        for pool, name in ((self.device, "device_id"), (self.host, "host_id")):
            by_id = {getattr(block, name): block for block in indexed}
            by_id.pop(None, None)
            contents = {i: block for i, block in enumerate(pool.contents) if block is not None}
            assert by_id == contents, f"index and contents differ on {name}"
        for block in indexed:
            assert block.device_id is not None or block.host_id is not None, "a content is nowhere"
