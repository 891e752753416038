"""`penstock` with an engine whose step hangs when a file of a certain name appears, once.

Run as `python -m tests.system.stuck_engine serve …`; the supervisor starts the same module as the
engine.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.engine.batch import Batch

from ..support.changed_engine import run

FOLDER = "PENSTOCK_TEST_HANG"  # where the file appears
WAITS, HOLDS_LOCK = "waits", "holds-lock"


def _wait_for_nobody() -> None:
    threading.Event().wait()


def _hold_the_interpreters_lock() -> None:
    re.match("(a|a?)+$", "a" * 64 + "b")


HANGS: dict[str, Callable[[], None]] = {
    WAITS: _wait_for_nobody,
    HOLDS_LOCK: _hold_the_interpreters_lock,
}


class HangingExecutor:
    """An executor, but for that."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._folder = Path(os.environ[FOLDER])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def submit(self, batch: Batch) -> Any:
        for name, hang in HANGS.items():
            if (self._folder / name).exists():
                (self._folder / name).unlink()
                hang()
        return self._executor.submit(batch)


def _make_it_hang(core: Any) -> None:
    core._executor = HangingExecutor(core._executor)


if __name__ == "__main__":
    sys.exit(run(__spec__.name, _make_it_hang))
