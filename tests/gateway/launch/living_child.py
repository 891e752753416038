"""A child of the supervisor: ready at once, then a sign of life every millisecond, until a file is
there that its settings name.

Run by `test_child` as `python -m tests.gateway.launch.living_child`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.engine.process.launch import HEARTBEAT_FD, Status, run_child
from penstock.engine.process.watchdog import heartbeat


def _live(settings: Mapping[str, Any], status: Status) -> None:
    stacks = os.open(settings["stacks"], os.O_CREAT | os.O_WRONLY)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    show_life = heartbeat(int(os.environ[HEARTBEAT_FD]))
    status.ready()
    while not Path(settings["silent"]).exists():
        show_life()
        time.sleep(0.001)
    _be_silent()


def _be_silent() -> None:
    while True:
        signal.pause()


if __name__ == "__main__":
    run_child("living-child", _live)
