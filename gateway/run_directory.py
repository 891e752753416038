"""The folder of the engine's socket, for this user alone, and gone with the server.

A supervisor that was killed could not remove its own; the next one does. A folder is in use while
its `lock` is held, which the kernel lets go of when the holder dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "penstock-"
_LOCK = "lock"
_MAX_ROOT_CHARS = 60  # a Unix socket's path has 107 bytes at most


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    """A new folder, after those of the dead are removed."""
    default = tempfile.gettempdir()
    root = Path(default if len(default) <= _MAX_ROOT_CHARS else "/tmp")  # noqa: S108
    for path in root.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # not ours to look at, or removed by another
            _remove_if_dead(path)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=root) as name:
        path = Path(name)
        with (path / "unlocked").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Under its name it is locked from the first moment on.
            (path / "unlocked").rename(path / _LOCK)
            yield path


def _remove_if_dead(path: Path) -> None:
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
        return
    with (path / _LOCK).open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
