"""Memory for packed weights: large regions that the system backs with huge pages.

A product streams through its weights once; with pages of 4 KiB it also waits for address
translations. A region holds several matrices, so that small ones benefit too.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_REGION_BYTES = 64 << 20
_ALIGNMENT_BYTES = 64
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class WeightMemory:
    """Allocates memory from regions; a region is freed with its last tensor."""

    def __init__(self) -> None:
        self._region = torch.empty(0, dtype=torch.uint8)
        self._num_used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned to a cache line, zero."""
        start = -(-self._num_used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if start + num_bytes > len(self._region):
            self._region, start = _new_region(max(num_bytes, _REGION_BYTES)), 0
        self._num_used = start + num_bytes
        return self._region[start : self._num_used]


def _new_region(num_bytes: int) -> Tensor:
    """uint8 [at least num_bytes], aligned to a huge page; pages are allocated at first access."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=_PRIVATE)
    region = torch.frombuffer(memory, dtype=torch.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return region[-region.data_ptr() % _HUGE_PAGE_BYTES :]
