"""Takes from a Python what only Linux has: for `PYTHONPATH`, and so for all processes of a server.

What is not Python's goes on as before: the C library, torch, and C kernels, which are compiled with
`-DWITHOUT_FUTEX`.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import socket
import sys
from typing import Any

_NAMES = {
    mmap: ("MADV_HUGEPAGE",),
    os: (
        "copy_file_range", "eventfd", "memfd_create", "pidfd_open", "pipe2", "posix_fallocate",
        "sched_getaffinity", "sched_setaffinity", "splice",
    ),
    select: ("epoll",),
    socket: ("TCP_NOTSENT_LOWAT",),
}  # fmt: skip
_OF_LIBC = {"mallinfo2", "malloc_trim", "prctl"}
_FOLDERS = ("/proc", "/sys")


def _look_for(path: Any) -> None:
    if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(_FOLDERS):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


def _stat(path: Any, **options: Any) -> os.stat_result:
    _look_for(path)
    return _real_stat(path, **options)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir"):
        _look_for(arguments[0])
    elif event == "ctypes.dlsym":
        for name in arguments:
            if isinstance(name, str) and name in _OF_LIBC:
                raise AttributeError(name)


for _module, _names in _NAMES.items():
    for _name in _names:
        if hasattr(_module, _name):
            delattr(_module, _name)
_real_stat, os.stat = os.stat, _stat
sys.addaudithook(_refuse)
