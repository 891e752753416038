"""Log stores on disk: processes of one folder, one after the other."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from penstock.gateway.storage.disk import Disk
from penstock.gateway.storage.response_log import journal_files
from penstock.gateway.storage.response_log.disk_journal import JOURNAL_FILES, SCHEMA
from penstock.gateway.storage.response_log.disk_store import DiskLogStore
from penstock.gateway.storage.response_log.log import ResponseLog

POOL = b"the engines"


@dataclass
class Process:
    """One that runs, as far as response logs go.

    Attributes:
        carried_on: logs that it was given at its start.
    """

    store: DiskLogStore
    disk: Disk
    carried_on: dict[str, ResponseLog] = field(default_factory=dict)
    has_room: bool = True

    def write(self, fd: int, data: bytes) -> int:
        """In place of `os.write` of the journal: of what a full disk gets, it takes a byte."""
        if self.has_room or len(data) > 1:
            return os.write(fd, data if self.has_room else data[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def take_over(self, log: ResponseLog) -> None:
        self.carried_on[log.header.response_id] = log

    def execute(self, sql: str) -> Callable[[Any], list[Any]]:
        """A job that executes it, and returns its rows."""
        return lambda connection: connection.execute(sql).fetchall()

    async def rows(self, table: str) -> int:
        """How many there are."""
        ((num,),) = await self.disk.run(self.execute(f"SELECT count(*) FROM {table}"))
        return int(num)

    async def journal(self) -> list[Path]:
        """The files that there are when what is no longer needed was deleted."""
        self.store._drop_dead()
        await self.disk.look(lambda _: None)
        return sorted(self.store._journal.folder.glob("*"))

    async def journal_rows(self) -> int:
        """How many there are."""
        numbers = [int(path.stem) for path in await self.journal()]
        return sum(len(list(self.store._journal.rows(number))) for number in numbers)

    def killed(self, name: str) -> Path:
        """What it leaves if it is killed now, in a folder of this name."""
        folder = self.disk.path.parent
        left = folder.with_name(f"{folder.name} {name}")
        gate = threading.Event()
        with contextlib.ExitStack() as stack:
            stack.callback(gate.set)
            for queue in (self.disk._writes, self.disk._reads):  # else the files change meanwhile
                entered = threading.Event()
                queue.put((partial(_wait, entered, gate), lambda *_: None))
                assert entered.wait(60.0)
            shutil.copytree(folder, left)
        return left


def _wait(entered: threading.Event, gate: threading.Event, _: Any) -> None:
    entered.set()
    gate.wait()


@asynccontextmanager
async def process(folder: Path, *, pool: bytes = POOL, **options: Any) -> AsyncIterator[Process]:
    """A process of this folder, until it ends.

    Args:
        options: of `DiskLogStore`.
    """
    made: list[DiskLogStore] = []
    disk = Disk(folder, (SCHEMA, JOURNAL_FILES), on_emptied=lambda: made[0].emptied())
    disk.open()
    disk.start()
    store = DiskLogStore(disk, options.pop("max_bytes", 1 << 20), **options)
    made.append(store)
    started = Process(store, disk)
    with patch.object(journal_files, "write", started.write):
        await store.start(started.take_over, pool=lambda: pool)
        try:
            yield started
        finally:
            started.has_room = True
            await store.close()
            await disk.close()
