"""The host tier of KV memory: its pool, and the moves of whole blocks between it and the device.

A host block holds all layers of one block contiguously, so neighbouring blocks need one copy. On
CUDA, copies over the link run on two side streams, through staging slots on the device:

    compute   gather D5 D9 → slot 0 ┐  the step …            ┌ scatter slot 1 → D2, the step …
    out                             └ slot 0 → H0 H1 …       │
    in                                       H7 → slot 1 ────┘

A swap-out never makes a step wait: its blocks are gathered before the step may overwrite them, and
transferred during the compute. A step that swaps in waits for its own blocks; their transfer starts
when the step is launched, during the previous step if that still runs, unless a swap-out has yet to
fill their source. (A swap-out always follows the swap-ins that read its destination: compute waits
for those, and the swap-out waits for compute.) A slot is reused when its last copy is done, so
staging is bounded, and a list of moves beyond that bound waits for the link. On a CPU the same code
runs with streams that do nothing.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.engine.batch import BlockMoves
from penstock.engine.errors import ConfigError
from penstock.engine.runner.timing import record_moment
from penstock.kernels.block_ids import block_ids_on
from penstock.kernels.copy_blocks import copy_blocks
from penstock.kernels.move_blocks import gather_blocks, scatter_blocks

Pairs = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staging:
    """The staging memory on a device."""

    num_slots: int
    slot_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.slot_bytes


CUDA_STAGING = Staging(num_slots=4, slot_bytes=64 << 20)
_CPU_STAGING = Staging(num_slots=1, slot_bytes=1 << 20)  # stays in the cache
_MAX_PROBE_BYTES = 8 << 20
_NUM_PROBES = 3
_cudart: Any = torch.cuda.cudart  # loads the CUDA runtime when called


class NoBlockBytes:
    """Stands in for `HostTier` where blocks are neither read nor written as bytes."""

    num_block_bytes = 0

    def read(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> list[bytes]:
        raise AssertionError(f"blocks cannot be read here: {device_ids}, {host_ids}")

    def write(self, host_id: int, data: bytes) -> None:
        raise AssertionError(f"blocks cannot be written here: {host_id}, {len(data)} bytes")


class NoHostTier(NoBlockBytes):
    """Stands in for `HostTier` where there is none."""

    num_blocks = 0
    block_move_s = 0.0
    timings: tuple[()] = ()

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool

    def execute(self, moves: BlockMoves) -> None:
        assert not moves.swap_outs, f"no host block for {moves.swap_outs}"
        assert not moves.swap_ins, f"no host block for {moves.swap_ins}"
        copy_blocks(self._pool, moves.copies)

    def take_seconds(self) -> tuple[float, float]:
        return 0.0, 0.0


@dataclass(frozen=True, slots=True)
class _Slot:
    """Staging on the device: [blocks_per_slot, *block], free once `is_free` has passed."""

    blocks: Tensor
    is_free: Any


class HostTier:
    """A pool of blocks in host memory, pinned where the device is a GPU.

    Args:
        pool: the device's, [num_layers, 2, num_blocks, block_size, num_kv_heads, head_size].
        num_host_blocks: at least 1.
        staging: None uses the device's default.

    Attributes:
        block_move_s: seconds to move one block, measured at construction.
        num_block_bytes: of one block.
        timings: of swaps that `take_seconds` has not seen to end.

    Raises:
        ConfigError: the memory cannot be allocated or pinned.
    """

    def __init__(
        self, pool: Tensor, num_host_blocks: int, *, staging: Staging | None = None
    ) -> None:
        self.num_blocks = num_host_blocks
        self._pool = pool
        self._runtime: Any = torch.cuda if pool.is_cuda else torch.cpu
        self._out, self._in = self._runtime.Stream(), self._runtime.Stream()
        # Host blocks that may still be written until the event has passed.
        self._unsaved: set[int] = set()
        self._is_saved = self._runtime.Event()
        self._is_brought = self._runtime.Event()  # the last swap-in's reads are done
        self._host = _allocate(num_host_blocks, pool)
        if pool.is_cuda:
            _pin(self._host)
            # Memory must be unpinned before it is freed; at exit the system does both.
            weakref.finalize(self, _unpin, self._host, self._out, self._in).atexit = False
        staging = staging or (CUDA_STAGING if pool.is_cuda else _CPU_STAGING)
        slots = self._make_slots(staging)
        self._slots = itertools.cycle(slots)
        self.timings: deque[tuple[bool, Any, Any]] = deque()  # is it out, start, end
        # [num_blocks, num_block_bytes], the same memory
        self._bytes = self._host.view(torch.uint8).flatten(1).numpy()
        self.num_block_bytes = int(self._bytes.shape[1])
        self.block_move_s = self._measure(slots[0])

    def execute(self, moves: BlockMoves) -> None:
        """Run the moves in their order, before anything launched later on the current stream."""
        if moves.swap_outs:
            self._swap_out(moves.swap_outs)
        if moves.swap_ins:
            self._swap_in(moves.swap_ins)
        copy_blocks(self._pool, moves.copies)

    def take_seconds(self) -> tuple[float, float]:
        """Seconds of the swap-outs and of the swap-ins that ended since the last call."""
        seconds = {True: 0.0, False: 0.0}
        while self.timings and self.timings[0][2].query():
            is_out, start, end = self.timings.popleft()
            seconds[is_out] += start.elapsed_time(end) / 1e3
        return seconds[True], seconds[False]

    @torch.inference_mode()
    def read(self, device_ids: Sequence[int], host_ids: Sequence[int]) -> list[bytes]:
        """The bytes of blocks, those on the device first, as they are after all steps that were
        launched; waits for those if it has to."""
        found: list[bytes] = []
        if device_ids:
            staged = self._host.new_empty(
                (len(device_ids), *self._host.shape[1:]), device=self._pool.device
            )
            gather_blocks(self._pool, block_ids_on(self._pool.device, device_ids), staged)
            is_gathered = self._runtime.Event()
            is_gathered.record(self._runtime.current_stream())
            is_gathered.synchronize()
            rows = staged.view(torch.uint8).flatten(1).cpu().numpy()
            found += [row.tobytes() for row in rows]
        self._is_saved.synchronize()
        return found + [self._bytes[host_id].tobytes() for host_id in host_ids]

    def write(self, host_id: int, data: bytes) -> None:
        """Replace a host block's bytes; waits for launched copies that may use the block."""
        self._is_saved.synchronize()
        self._is_brought.synchronize()
        self._bytes[host_id] = np.frombuffer(data, dtype=np.uint8)

    def _swap_out(self, pairs: Pairs) -> None:
        """Device → host."""
        device_ids, host_ids = self._columns([(host, device) for device, host in pairs])
        assert len(set(host_ids)) == len(pairs), f"destination named twice in {pairs}"
        compute, side = self._runtime.current_stream(), self._out
        side.wait_stream(compute)
        start = record_moment(self._pool.device, side)
        for slot, part in self._parts(len(pairs)):
            staged = slot.blocks[: part.stop - part.start]
            compute.wait_event(slot.is_free)
            gather_blocks(self._pool, device_ids[part], staged)
            side.wait_stream(compute)
            with self._runtime.stream(side):
                for here, there in _runs(host_ids[part]):
                    self._host[there].copy_(staged[here], non_blocking=True)
            slot.is_free.record(side)
        if self._is_saved.query():
            self._unsaved.clear()
        self._unsaved.update(host_ids)
        self._is_saved.record(side)
        self.timings.append((True, start, record_moment(self._pool.device, side)))

    def _swap_in(self, pairs: Pairs) -> None:
        """Host → device."""
        device_ids, host_ids = self._columns(pairs)
        assert len({block for _, block in pairs}) == len(pairs), f"destination twice in {pairs}"
        compute, side = self._runtime.current_stream(), self._in
        if not self._unsaved.isdisjoint(host_ids):
            side.wait_event(self._is_saved)
        start = record_moment(self._pool.device, side)
        for slot, part in self._parts(len(pairs)):
            staged = slot.blocks[: part.stop - part.start]
            side.wait_event(slot.is_free)
            with self._runtime.stream(side):
                for here, there in _runs(host_ids[part]):
                    staged[here].copy_(self._host[there], non_blocking=True)
            compute.wait_stream(side)
            scatter_blocks(staged, device_ids[part], self._pool)
            slot.is_free.record(compute)
        self._is_brought.record(side)
        self.timings.append((False, start, record_moment(self._pool.device, side)))

    def _columns(self, pairs: Pairs) -> tuple[Tensor, list[int]]:
        """(host, device) pairs by host block: int64 [num_pairs] for the device, and host ids."""
        host_ids, device_ids = zip(*sorted(pairs), strict=True)
        for ids, size in ((host_ids, self.num_blocks), (device_ids, self._pool.shape[2])):
            assert min(ids) >= 0, f"negative block in {pairs}"
            assert max(ids) < size, f"block beyond the pool's {size} in {pairs}"
        return block_ids_on(self._pool.device, device_ids), list(host_ids)

    def _parts(self, num_blocks: int) -> Iterator[tuple[_Slot, slice]]:
        """The slots in turn, each with its part of a list of blocks."""
        start = 0
        while start < num_blocks:
            slot = next(self._slots)
            stop = min(start + len(slot.blocks), num_blocks)
            yield slot, slice(start, stop)
            start = stop

    def _make_slots(self, staging: Staging) -> list[_Slot]:
        block = self._host[0]
        num_blocks = min(max(1, staging.slot_bytes // block.nbytes), self.num_blocks)
        return [
            _Slot(
                torch.empty(
                    (num_blocks, *block.shape), dtype=block.dtype, device=self._pool.device
                ),
                self._runtime.Event(),
            )
            for _ in range(staging.num_slots)
        ]

    def _measure(self, slot: _Slot) -> float:
        """Seconds to move one block: the fastest of several round trips of up to a slot's size."""
        num_blocks = min(
            max(1, _MAX_PROBE_BYTES // slot.blocks[0].nbytes),
            len(slot.blocks),
            self._pool.shape[2],
        )
        pairs = tuple((block, block) for block in range(num_blocks))
        seconds = []
        for _ in range(_NUM_PROBES):
            self.execute(BlockMoves(swap_outs=pairs, swap_ins=pairs))
            self._runtime.synchronize()
            seconds.append(sum(self.take_seconds()))
        return min(seconds) / (2 * num_blocks)


def _runs(ids: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Ascending ids as runs of consecutive ones: (their indices in the list, the ids)."""
    start = 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or ids[end] != ids[end - 1] + 1:
            yield slice(start, end), slice(ids[start], ids[end - 1] + 1)
            start = end


def _allocate(num_blocks: int, pool: Tensor) -> Tensor:
    """[num_blocks, num_layers, 2, block_size, num_kv_heads, head_size], uninitialised; pages are
    allocated at their first write."""
    num_layers, _, _, *plane = pool.shape
    try:
        return torch.empty((num_blocks, num_layers, 2, *plane), dtype=pool.dtype)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(_too_large(num_blocks)) from error


def _pin(host: Tensor) -> None:
    """Pin `host`, so that copies from and to it run asynchronously.

    Registered rather than allocated as pinned, since torch rounds pinned memory up to powers of
    two.
    """
    status = int(_cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
    if status != 0:
        raise ConfigError(f"{_too_large(len(host))} (CUDA error {status})")


def _unpin(host: Tensor, *streams: torch.cuda.Stream) -> None:
    for stream in streams:
        stream.synchronize()
    _cudart().cudaHostUnregister(host.data_ptr())


def _too_large(num_blocks: int) -> str:
    return (
        f"the memory for {num_blocks} host blocks of KV cache cannot be allocated: lower "
        "--swap-space or --num-host-blocks"
    )
