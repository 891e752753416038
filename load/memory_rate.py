"""How fast this machine reads memory: the limit for a model that reads all weights for each token.

Memory is read as the CPU kernels read weights: each thread reads one contiguous part, on huge pages
where the system has them. Machines drift, so measure the rate beside what it is compared with.
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
    """Memory larger than any cache, and as many threads to read it as the compared run has."""

    def __init__(self, num_threads: int, *, num_bytes: int = _NUM_BYTES) -> None:
        words = WeightMemory().allocate(num_bytes).view(torch.int64)
        words.fill_(1)  # a page exists from its first write on
        self._num_bytes = words.nbytes
        self._parts = [part.numpy() for part in words.chunk(num_threads)]
        self._threads = ThreadPoolExecutor(num_threads)
        # The pool starts a thread only if none is idle: the barrier makes it start them all.
        barrier = Barrier(len(self._parts))
        list(self._threads.map(lambda _: barrier.wait(), self._parts))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def measure(self, *, num_passes: int = 10) -> float:
        """Bytes a second, in the best of some passes over all of it."""
        return self._num_bytes / min(self._pass_s() for _ in range(num_passes))

    def _pass_s(self) -> float:
        began_s = time.perf_counter()
        sums = self._threads.map(lambda part: part.sum(), self._parts)  # without the GIL
        total = sum(map(int, sums))
        elapsed_s = time.perf_counter() - began_s
        assert total * 8 == self._num_bytes, "not all of it was read"
        return elapsed_s
