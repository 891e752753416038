"""The copies between blocks that the next step begins with.

    swap-outs (device → host), then swap-ins (host → device), then copies (device → device)

In that order, so a plan may at once save a block, fill it anew, and copy what was filled. What a
swap-in or a copy reads is held until the plan is handed over: nothing planned after it can write
there first. Knows pools and ids, nothing of sequences and contents.
"""

from __future__ import annotations

from collections import Counter

from penstock.engine.batch import BlockMoves
from penstock.engine.blocks.block_pool import BlockPool


class MovePlan:
    """Collects moves; every destination has one source, and a block given up again has none."""

    def __init__(self, device: BlockPool, host: BlockPool) -> None:
        self._device, self._host = device, host
        self._swap_outs: dict[int, int] = {}  # host block ← device block
        self._swap_ins: dict[int, int] = {}  # device block ← host block
        self._copies: dict[int, int] = {}  # device block ← device block
        self._held_device: Counter[int] = Counter()
        self._held_host: list[int] = []

    def swap_out(self, device_id: int, host_id: int) -> None:
        """Save a device block. A host block evicted within one plan is simply written anew."""
        # A copy comes after all swap-outs: what it is yet to bring is still at its source.
        self._swap_outs[host_id] = self._copies.get(device_id, device_id)

    def swap_in(self, host_id: int, device_id: int) -> None:
        self._swap_ins[device_id] = host_id
        self._host.hold(host_id)
        self._held_host.append(host_id)

    def copy(self, source: int, destination: int) -> None:
        self._copies[destination] = source
        self._device.hold(source)
        self._held_device[source] += 1

    def is_pending(self, device_id: int) -> bool:
        """Whether a copy is yet to fill the block."""
        return device_id in self._copies

    def cancel(self, device_id: int) -> None:
        """The block is given up: nothing need be copied to it."""
        self._copies.pop(device_id, None)

    def num_holders(self, device_id: int) -> int:
        """References to a block other than the plan's own."""
        return self._device.ref_counts[device_id] - self._held_device[device_id]

    def take(self) -> BlockMoves:
        """The plan, which then begins anew."""
        if not (self._swap_outs or self._held_host or self._held_device):
            return _NO_MOVES
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
