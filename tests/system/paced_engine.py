"""`penstock` with engines that take only as many steps as a test lets them.

Run as `Pace.command` says; the supervisor starts the same module as the engine. What is to be amid
its text when something happens to it cannot be over then, however late the test comes.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

from penstock.engine.request import RequestOutput

from ..support.changed_engine import run

_FILE = "PENSTOCK_TEST_PACE"
_LOOK_S = 0.002
_NO_LIMIT = -1


class Pace:
    """How far the engines of a server go; at first as far as they can.

    Args:
        file: in which they are told; of one server.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._serials = itertools.count(1)
        self.set_free()

    @property
    def command(self) -> tuple[str, ...]:
        """What starts the server."""
        # A step is a token of each stream.
        settings = (f"{_FILE}={self._file}", "PENSTOCK_SPECULATIVE_CONFIG=none")
        return ("env", *settings, sys.executable, "-m", __name__)

    def allow(self, num_steps: int) -> None:
        """They stop after so many steps more; one that is started later, after so many in all."""
        fresh = self._file.with_suffix(".fresh")
        fresh.write_text(f"{next(self._serials)} {num_steps}")
        fresh.replace(self._file)

    def set_free(self) -> None:
        self.allow(_NO_LIMIT)


class PacedSteps:
    """The steps of an engine's core, as far as it is let; it hears and answers all the same."""

    def __init__(self, core: Any) -> None:
        self._step, self._has_work = core.step, core.has_work
        self._file = Path(os.environ[_FILE])
        self._told = ""
        self._num_left = _NO_LIMIT

    def __call__(self) -> list[RequestOutput]:
        if not self._has_work():
            return self._step()  # type: ignore[no-any-return]
        told = self._file.read_text()
        if told != self._told:
            self._told, self._num_left = told, int(told.split()[1])
        if not self._num_left:
            time.sleep(_LOOK_S)
            return []
        self._num_left -= self._num_left > 0
        return self._step()  # type: ignore[no-any-return]


def _pace(core: Any) -> None:
    core.step = PacedSteps(core)


if __name__ == "__main__":
    sys.exit(run(__spec__.name, _pace))
