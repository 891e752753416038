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

from penstock.engine import server
from penstock.engine.batch import Batch
from penstock.engine.process import CONFIG_FD, run_child
from penstock.gateway.launch.cli import main
from penstock.gateway.launch.supervisor import Supervisor

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


def _run_engine() -> int:
    build_core = server.build_core

    def build(config: Any) -> Any:
        core, info = build_core(config)
        core._executor = HangingExecutor(core._executor)
        return core, info

    server.build_core = build
    return run_child("penstock-engine", server.serve)


def _run_server() -> int:
    plan = Supervisor._plan

    def plan_ours(self: Supervisor, *arguments: Any) -> Any:
        children = plan(self, *arguments)
        children[0].module = __spec__.name
        return children

    Supervisor._plan = plan_ours
    return main()


if __name__ == "__main__":
    sys.exit(_run_engine() if CONFIG_FD in os.environ else _run_server())
