"""How fast this machine reads memory: the ceiling of what reads all its weights for each token.

Read as the CPU kernels read weights: every thread along one stretch, on huge pages where the system
has them. Machines drift, so a rate is to be measured beside what it is compared with.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Self

import torch

from penstock.kernels.cpu.weight_memory import WeightMemory

_NUM_BYTES = 512 << 20  # many times what caches hold


class MemoryReader:
    """Memory that no cache holds, and threads to read it. Enter it, so that they end.

    Args:
        num_threads: as many as what is compared with it has.
    """

    def __init__(self, num_threads: int, *, num_bytes: int = _NUM_BYTES) -> None:
        words = WeightMemory().allocate(num_bytes).view(torch.int64)
        words.fill_(1)  # a page is there from its first write on
        self._num_bytes = words.nbytes
        self._parts = [part.numpy() for part in words.chunk(num_threads)]
        self._threads = ThreadPoolExecutor(num_threads)
        # The pool starts a thread only where none is idle: all meet once, so that all are there.
        barrier = Barrier(len(self._parts))
        list(self._threads.map(lambda _: barrier.wait(), self._parts))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def measure(self, *, num_passes: int = 10) -> float:
        """Bytes a second, in the best of a few passes over all of it."""
        return self._num_bytes / min(self._pass_s() for _ in range(num_passes))

    def _pass_s(self) -> float:
        began_s = time.perf_counter()
        sums = self._threads.map(lambda part: part.sum(), self._parts)  # which lets go of the GIL
        total = sum(map(int, sums))
        elapsed_s = time.perf_counter() - began_s
        assert total * 8 == self._num_bytes, "not all of it was read"
        return elapsed_s
