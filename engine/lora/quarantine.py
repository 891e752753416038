"""Adapters whose reading has ended an engine are refused for a while.

Reading one may end the process: a damaged file, a driver's fault, too little memory. The next
request for it would end the next engine. So a file is locked while an adapter is read; one that is
there without a lock was left by a process that died.

One death may be anybody's fault (`kill -9`), and the adapter is read once more; after the second
one it is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import Adapter

_NUM_DEATHS = 2
QUARANTINE_S = 3600.0  # after the last death
_LOG = logging.getLogger(__name__)


def mark_name(adapter: Adapter) -> str:
    """What its marks' names begin with; its digest is whatever a gateway says."""
    return hashlib.sha256(adapter.digest.encode()).hexdigest()[:16]


class Quarantine:
    """
    Args:
        folder: of the marks, shared by this machine's engines.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextlib.contextmanager
    def reading(self, adapter: Adapter) -> Iterator[None]:
        """Mark that an adapter is read.

        Raises:
            InvalidRequestError: reading it has ended engines.
        """
        name = mark_name(adapter)
        left = self._left(name)
        if len(left) >= _NUM_DEATHS:
            raise InvalidRequestError(
                f"the adapter {adapter.name!r} is not loaded: reading it has ended "
                f"{len(left)} engines in the last {QUARANTINE_S / 60:.0f} minutes "
                f"(remove {self._folder / name}* to try again now)",
                param="model",
            )
        mark = self._folder / f"{name}-{uuid.uuid4().hex}"
        with _locked(mark):
            try:
                yield
            finally:
                # An engine that is told to stop meanwhile ends in order, too.
                for each in (mark, *left):
                    with contextlib.suppress(OSError):
                        each.unlink()

    def _left(self, name: str) -> list[Path]:
        """The marks of processes that died, not long ago."""
        left = []
        for mark in self._folder.glob(f"{name}-*"):
            with contextlib.suppress(OSError), mark.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it fails while it is read
                if time.time() - mark.stat().st_mtime > QUARANTINE_S:
                    mark.unlink()
                else:
                    left.append(mark)
        return left


@contextlib.contextmanager
def _locked(mark: Path) -> Iterator[None]:
    """Without a place for the mark there is none."""
    descriptor = None
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(mark, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        _LOG.debug("no mark for the adapter that is read: %s", error)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
