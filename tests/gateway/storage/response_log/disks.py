"""Log stores on disk: processes of one folder, one after the other."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from penstock.gateway.storage.disk import Disk
from penstock.gateway.storage.response_log.disk_journal import SCHEMA
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

    def take_over(self, log: ResponseLog) -> None:
        self.carried_on[log.header.response_id] = log

    def execute(self, sql: str) -> Callable[[Any], list[Any]]:
        """A job that executes it, and returns its rows."""
        return lambda connection: connection.execute(sql).fetchall()

    async def rows(self, table: str) -> int:
        """How many there are."""
        ((num,),) = await self.disk.run(self.execute(f"SELECT count(*) FROM {table}"))
        return int(num)

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
    disk = Disk(folder, (SCHEMA,), on_emptied=lambda: made[0].emptied())
    disk.open()
    disk.start()
    store = DiskLogStore(disk, options.pop("max_bytes", 1 << 20), **options)
    made.append(store)
    started = Process(store, disk)
    await store.start(started.take_over, pool=lambda: pool)
    try:
        yield started
    finally:
        await store.close()
        await disk.close()
