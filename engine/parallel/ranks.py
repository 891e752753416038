"""The processes that share a model, each with a part of every matrix, and what they tell each other
(tensor parallelism: Shoeybi et al., "Megatron-LM", 2019).

All of them run the same steps. Where a product's inputs are split, each has a part of the sums, and
`sum` adds these up in the order of the ranks, so that all go on with the same bits; where its
outputs are split and all are needed, `gather` puts them side by side.

Where the layers are cut into stages (pipeline parallelism: Huang et al., "GPipe", 2019), the first
rank of a stage sends what its layers give to all ranks of the next one. Nobody waits for a later
stage, so that each may be in another step.

On a CPU each is one operation in C, through memory that the processes share. `torch.distributed`
does the same on GPUs (NCCL), and on a CPU without a compiler (gloo, the reference).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from ctypes import Structure, c_int64
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.config import MAX_RANKS
from penstock.engine.errors import ConfigError
from penstock.kernels.cpu.library import CpuLibrary, load_library

_LINE_BYTES = 64
# A line for each rank and one more (`ranks.c`), then a line for each rank's number of `minimum`.
_HEADER_BYTES = -(-2 * (MAX_RANKS + 1) * _LINE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
_NUMBERS_START = (MAX_RANKS + 1) * _LINE_BYTES
_POLL_S = 0.002
_JOIN_TIMEOUT_S = 600.0


class Exchange(Protocol):
    """How ranks exchange rows: contiguous, of the model's dtype."""

    def sum(self, x: Tensor) -> Tensor:
        """x [num_rows, size] → the sum over the ranks, in their order"""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """x [num_rows, size] → the ranks' columns side by side"""
        ...

    def send(self, x: Tensor) -> None:
        """x [num_rows, size] to the next stage; of a stage's ranks the first does."""
        ...

    def receive(self, like: Tensor) -> Tensor:
        """What the stage before sent: of the shape, dtype and device of `like`."""
        ...


class Ranks(Exchange, Protocol):
    """
    Attributes:
        rank: this process's number, from 0 to size - 1.
        layers: those of them that have the same layers.
        stage: which part of the layers that is, of num_stages.
        num_on_cores: of all ranks, those that share this one's cores.
    """

    rank: int
    size: int
    stage: int
    num_stages: int
    num_on_cores: int

    @property
    def layers(self) -> Ranks: ...

    def open(self, dtype: torch.dtype, device: torch.device) -> None:
        """Before the first tensor: of which dtype they are, and where."""
        ...

    def minimum(self, number: int) -> int:
        """The least of the ranks' numbers; at start only, since it waits long."""
        ...


class Alone:
    """A process that has all of a model."""

    rank, size = 0, 1
    stage, num_stages = 0, 1
    num_on_cores = 1

    @property
    def layers(self) -> Ranks:
        return self

    def open(self, dtype: torch.dtype, device: torch.device) -> None: ...

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x

    def send(self, x: Tensor) -> None:  # noqa: ARG002
        raise AssertionError("there is no next stage")

    def receive(self, like: Tensor) -> Tensor:  # noqa: ARG002
        raise AssertionError("there is no stage before")

    def minimum(self, number: int) -> int:
        return number


ALONE = Alone()


def shared_file() -> int:
    """A descriptor of an empty file without a name, in memory where the system has such files. The
    caller closes it."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("penstock-ranks")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class SharedMemory:
    """Memory of all ranks, in which regions are found by the order of their making.

    Args:
        fd: of a `shared_file` that the ranks have in common.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._end = fd, 0

    def region(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], zero at first, with pages that are taken at the first access. All
        ranks must ask for the same regions in the same order."""
        start = self._end
        # One page more, into which each rank writes: that never makes a file shorter, and another
        # rank may use the region already.
        self._end += (-(-num_bytes // mmap.PAGESIZE) + 1) * mmap.PAGESIZE
        os.pwrite(self._fd, b"\0", self._end - 1)
        memory = mmap.mmap(self._fd, num_bytes, offset=start)
        return torch.frombuffer(memory, dtype=torch.uint8)


class Link:
    """From the first rank of a stage to all ranks of the next one, which read as they come to it.

    Args:
        fd: as in `SharedMemory`.
        rank: 0 sends, the others receive.
        num_steps: that may be on their way before the sender waits.
    """

    def __init__(self, fd: int, *, rank: int, num_ranks: int, num_steps: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        self._memory = SharedMemory(fd)
        self._header = self._memory.region(_HEADER_BYTES)
        self._num_slots = 1 << (num_steps - 1).bit_length()
        self._slots = torch.empty(self._num_slots, 0, dtype=torch.uint8)

    @property
    def is_sender(self) -> bool:
        return self._rank == 0

    def structure(self, library: CpuLibrary) -> Structure:
        """`struct ranks` of `ops.h`; the caller keeps this object."""
        return library.structure(
            "ranks", rank=self._rank, num_ranks=self._num_ranks, places=self._header
        )

    def slots(self, num_bytes: int) -> Tensor:
        """uint8 [num_slots, at least num_bytes]; all of its ranks must ask for the same numbers in
        the same order."""
        if num_bytes > self._slots.shape[1]:
            size = max(mmap.PAGESIZE, 1 << (num_bytes - 1).bit_length())
            self._slots = self._memory.region(self._num_slots * size).view(self._num_slots, size)
        return self._slots

    def send(self, library: CpuLibrary, x: Tensor) -> None:
        self._run(library, "send_rows", x, x=x)

    def receive(self, library: CpuLibrary, y: Tensor) -> None:
        self._run(library, "receive_rows", y, y=y)

    def _run(self, library: CpuLibrary, operation: str, rows: Tensor, **arguments: Any) -> None:
        slots = self.slots(rows.nbytes)
        library.run(
            operation, is_shared=False, slots=slots, ranks=self.structure(library),
            num_rows=c_int64(len(rows)), size=rows.shape[1], num_slots=len(slots),
            slot_stride=slots.shape[1] // rows.itemsize, **arguments,
        )  # fmt: skip

    def give_up(self) -> None:
        """Let neither side wait for the other one any more."""
        self._header[self._num_ranks * _LINE_BYTES] = 1


class KernelExchange:
    """In memory that the ranks share, by operations in C."""

    def __init__(self, ranks: SharedRanks, library: CpuLibrary) -> None:
        self._ranks, self._library = ranks, library
        self._structure = ranks.structure(library)
        self._places = (torch.empty(0), torch.empty(0))  # uint8, of all ranks' parts
        self._turn = 0

    def sum(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        self._run("sum_ranks", x, y=y, size=x.shape[1])
        return y

    def gather(self, x: Tensor) -> Tensor:
        num_rows, part_size = x.shape
        y = x.new_empty(num_rows, self._ranks.size * part_size)
        self._run("gather_ranks", x, y=y, size=y.shape[1], part_size=part_size)
        return y

    def send(self, x: Tensor) -> None:
        if self._ranks.after is not None:
            self._ranks.after.send(self._library, x)

    def receive(self, like: Tensor) -> Tensor:
        y = torch.empty_like(like)
        assert self._ranks.before is not None
        self._ranks.before.receive(self._library, y)
        return y

    def close(self) -> None:
        """Nothing to leave: the memory goes with the files."""

    def _run(self, operation: str, x: Tensor, **arguments: Any) -> None:
        if not x.numel():  # on all ranks
            return
        ranks = self._ranks
        self._turn ^= 1
        if x.nbytes * ranks.size > len(self._places[0]):
            num_bytes = ranks.size * (1 << (x.nbytes - 1).bit_length())
            self._places = (ranks.memory.region(num_bytes), ranks.memory.region(num_bytes))
        parts = self._places[self._turn].view(ranks.size, -1)
        parts[ranks.rank, : x.nbytes] = x.view(torch.uint8).flatten()
        self._library.run(
            operation, is_shared=False, parts=parts, ranks=self._structure,
            num_rows=c_int64(len(x)), part_stride=parts.shape[1] // x.itemsize, **arguments,
        )  # fmt: skip


class DistributedExchange:
    """By `torch.distributed`; waits for all ranks.

    Args:
        store: as in `SharedRanks`.
    """

    def __init__(self, ranks: SharedRanks, store: str, device: torch.device) -> None:
        self._rank, self._size = ranks.rank, ranks.size
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "nccl",
            store=dist.FileStore(store, ranks.size),  # type: ignore[attr-defined]
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=_JOIN_TIMEOUT_S),
        )

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(self._size)]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=1)

    def send(self, x: Tensor) -> None:
        dist.send(x, self._rank + 1)

    def receive(self, like: Tensor) -> Tensor:
        y = torch.empty_like(like)
        dist.recv(y, self._rank - 1)
        return y

    def close(self) -> None:
        dist.destroy_process_group()


class SharedRanks:
    """Ranks on one machine.

    Args:
        fd: as in `SharedMemory`.
        store: a path for a file by which `torch.distributed` finds the ranks.
        layers: those that have the same layers, if not all have.
        stage, num_stages: where in the model these layers are.
        before, after: to the stages there; None: this rank has no such link.
        check: called while this process waits at start; raises if another one has ended.
    """

    _exchange: KernelExchange | DistributedExchange  # from `open` on

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        fd: int,
        store: str,
        check: Callable[[], None] = lambda: None,
        layers: Ranks | None = None,
        stage: int = 0,
        num_stages: int = 1,
        before: Link | None = None,
        after: Link | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.stage, self.num_stages, self._layers = stage, num_stages, layers
        self.before, self.after = before, after
        self.num_on_cores = size
        self.memory, self._check, self._store = SharedMemory(fd), check, store
        self._header = self.memory.region(_HEADER_BYTES)
        self._numbers = self._header[_NUMBERS_START:].view(torch.int64).view(-1, 8)[:size]
        self._num_asked = 0

    @property
    def layers(self) -> Ranks:
        return self if self._layers is None else self._layers

    @property
    def is_distributed(self) -> bool:
        """Whether they exchange rows by `torch.distributed`."""
        return isinstance(self._exchange, DistributedExchange)

    def open(self, dtype: torch.dtype, device: torch.device) -> None:
        library = load_library(dtype) if device.type == "cpu" else None
        if self._layers is not None:
            if library is None and self._layers.size > 1:
                raise ConfigError(
                    "--pipeline-parallel-size with --tensor-parallel-size needs the CPU kernels"
                )
            self._layers.open(dtype, device)
        if library is None:
            self._exchange = DistributedExchange(self, self._store, device)
        else:
            self._exchange = KernelExchange(self, library)
        # What the model calls is the exchange's own.
        self.sum, self.gather = self._exchange.sum, self._exchange.gather
        self.send, self.receive = self._exchange.send, self._exchange.receive

    def minimum(self, number: int) -> int:
        self._num_asked += 1
        own = self._numbers[self.rank]
        own[1 + self._num_asked % 2] = number
        own[0] = self._num_asked
        while (self._numbers[:, 0] < self._num_asked).any():
            self._check()
            time.sleep(_POLL_S)
        return int(self._numbers[:, 1 + self._num_asked % 2].min())

    def structure(self, library: CpuLibrary) -> Structure:
        """`struct ranks` of `ops.h`; the caller keeps this object."""
        return library.structure("ranks", rank=self.rank, num_ranks=self.size, places=self._header)

    def close(self) -> None:
        """Leave the other ranks."""
        self._exchange.close()

    def give_up(self) -> None:
        """Let no rank wait for another one any more; what they compute is worthless."""
        self._header[self.size * _LINE_BYTES] = 1
        if isinstance(self._layers, SharedRanks):
            self._layers.give_up()
        for link in (self.before, self.after):
            if link is not None:
                link.give_up()
