"""The folder in which a server keeps chats on disk.

`$XDG_DATA_HOME/penstock`, or `~/.local/share/penstock`, unless `--data-dir` names another. It is
for this user only (0700, its files 0600), and one server has it at a time: the gateway holds a lock
on it (flock), which the kernel releases however the gateway ends, so that the one that the
supervisor starts in its place gets it at once.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

NOWHERE = "none"  # as a setting: chats are kept in memory
_LOG = logging.getLogger(__name__)
_LOCK = "lock"
_MOUNTS = Path("/proc/self/mountinfo")
# Where SQLite's log of writes, which several processes map into memory, or its locks do not work.
_NETWORK = (
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "fuse.ceph", "fuse.glusterfs", "fuse.rclone",
    "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2",
    "smb3", "smbfs", "vboxsf",
)  # fmt: skip


class DataDirError(Exception):
    """The folder cannot be used; the text says why, as "/data is used by another server"."""


@dataclass(frozen=True, slots=True)
class DataDir:
    """A folder that this process alone uses until it ends or calls `release`."""

    path: Path
    lock_fd: int

    def release(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.lock_fd)


def default_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Raises: DataDirError: there is no home."""
    data_home = environment.get("XDG_DATA_HOME", "")
    if Path(data_home).is_absolute():  # others are to be ignored, says the specification
        return Path(data_home, "penstock")
    home = environment.get("HOME", "")
    if not home:
        raise DataDirError("HOME is not set")
    return Path(home, ".local", "share", "penstock")


def folder(asked: str | None) -> Path:
    """
    Args:
        asked: None: the user's own.

    Raises:
        DataDirError: there is no home.
    """
    return default_folder() if asked is None else Path(asked).expanduser().absolute()


def claim(asked: str | None) -> DataDir:
    """Make the folder, and take it for this process.

    Args:
        asked: the folder; None: the user's own.

    Raises:
        DataDirError: it cannot be written, another server has it, or it is the user's own and on a
            network file system.
    """
    path = folder(asked)
    lock_fd = _locked(path)
    kind = file_system(path)
    if kind in _NETWORK:
        if asked is None:
            os.close(lock_fd)
            raise DataDirError(f"{path} is on a network file system ({kind})")
        text = "%s is on a network file system (%s): chats may be lost or damaged there"
        _LOG.warning(text, path, kind)
    return DataDir(path, lock_fd)


def _locked(folder: Path) -> int:
    """A descriptor whose being open keeps other servers out."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # what the user has made stays as it is
            folder.mkdir(mode=0o700)
        lock_fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DataDirError(f"{folder} cannot be written ({_reason(error)})") from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock_fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise DataDirError(f"{folder} is used by another server") from error
        raise DataDirError(f"{folder} cannot be locked ({_reason(error)})") from error
    return lock_fd


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def file_system(folder: Path, mounts: Path = _MOUNTS) -> str:
    """The type of the file system that a folder is on, as `ext4`; empty where that is unknown."""
    device = folder.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:  # "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw"
        mount, _, about = line.partition(" - ")
        if mount.split()[2:3] == [name]:
            return about.split()[0]
    return ""
