"""Memory for packed weights: large regions that the system backs with huge pages, or with a file.

A product streams through its weights once; with pages of 4 KiB it also waits for address
translations. A region holds several matrices, so that small ones benefit too. Weights beyond memory
are mapped from a file: the system keeps in memory what is used, and reads the rest again.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

_HUGE_PAGE_BYTES = 2 << 20
_REGION_BYTES = 64 << 20
_ALIGNMENT_BYTES = 64
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


class WeightMemory:
    """Allocates memory from regions; a region is freed with its last tensor.

    Args:
        folder: where the files are that back the memory; they have no names, and so vanish with
            the process. None: nothing does.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._region = torch.empty(0, dtype=torch.uint8)
        self._num_used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned to a cache line, zero.

        Raises:
            OSError: there is no space for a file.
        """
        start = -(-self._num_used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if start + num_bytes > len(self._region):
            size = max(num_bytes, _REGION_BYTES)
            self._region = _new_region(size) if self._folder is None else _map(self._folder, size)
            start = 0
        self._num_used = start + num_bytes
        return self._region[start : self._num_used]


def _new_region(num_bytes: int) -> Tensor:
    """uint8 [at least num_bytes], aligned to a huge page; pages are allocated at first access."""
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=_PRIVATE)
    region = torch.frombuffer(memory, dtype=torch.uint8)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return region[-region.data_ptr() % _HUGE_PAGE_BYTES :]


def _map(folder: Path, num_bytes: int) -> Tensor:
    """uint8 [num_bytes] of a new file."""
    with tempfile.TemporaryFile(dir=folder) as file:
        _reserve(file.fileno(), num_bytes)
        memory = mmap.mmap(file.fileno(), num_bytes, flags=mmap.MAP_SHARED)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _reserve(fd: int, num_bytes: int) -> None:
    """Give an empty file its size now: a disk that is full at a page's first write kills."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, num_bytes)
        return
    space = os.statvfs(fd)
    if space.f_bavail * space.f_frsize < num_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(fd, num_bytes)
