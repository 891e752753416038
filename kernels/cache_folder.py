"""The folder for what can be made again: compiled kernels, converted weights, facts of chat
templates. Several processes and users may share it.

What is in it is trusted only if nobody else but root can have written it (`is_private`), and is
written aside and then renamed (`unfinished`), so that nobody ever reads a half of it. Standard
library only: the gateway uses it too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

CACHE_VARIABLE = "PENSTOCK_CACHE_DIR"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_UNFINISHED, _UNFINISHED_S = "unfinished-", 3600.0  # after which nobody writes them any more


class NoCacheError(Exception):
    """There is no place for it, or others may write there."""


def cache_dir() -> Path:
    """The folder for what can be made again; created if missing.

    Raises:
        NoCacheError: there is no place for it.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        folder = (
            Path(chosen)
            if chosen
            else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
        )
    except RuntimeError as error:  # a container's user without an entry in the user database
        raise NoCacheError(f"no place for a cache ({error}): set {CACHE_VARIABLE}") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NoCacheError(f"{folder} cannot be written: {error}") from error
    return folder


def is_private(path: Path) -> bool:
    """Whether nobody but this user and root may write a file or folder that is there."""
    if not hasattr(os, "geteuid"):
        return True
    try:
        about = path.stat()
    except OSError:
        return False
    return about.st_uid in (0, os.geteuid()) and not about.st_mode & _OTHERS_MAY_WRITE


def private_folder(cache: Path) -> Path:
    """The cache, or a folder in it where others may write to the cache.

    Raises:
        NoCacheError: that is not this user's alone either.
    """
    if is_private(cache):
        return cache
    folder = cache / f"private-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise NoCacheError(f"{folder} cannot be written: {error}") from error
    if not is_private(folder):
        raise NoCacheError(f"others may write to {cache} and {folder}: set {CACHE_VARIABLE}")
    return folder


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """A folder in `folder` for what is not finished yet, removed at the end; those that killed
    processes have left are removed too.

    Raises:
        OSError: it cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=folder) as own:
        for left in folder.glob(f"{_UNFINISHED}*"):
            with contextlib.suppress(OSError):
                if time.time() - left.stat().st_mtime > _UNFINISHED_S:
                    shutil.rmtree(left, ignore_errors=True)
        yield Path(own)


def remove_orphans(folder: Path, *, link: str) -> None:
    """Remove the folders in `folder` whose file of this name is a link to what is gone."""
    for each in folder.iterdir():
        origin = each / link
        if origin.is_symlink() and not origin.exists():
            shutil.rmtree(each, ignore_errors=True)
