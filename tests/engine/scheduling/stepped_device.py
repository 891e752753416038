"""A device that takes a step when it is let."""

from __future__ import annotations

import threading
from typing import Any

from penstock.engine.batch import Batch

from .fake_device import FakeDevice


class SteppedDevice(FakeDevice):
    """Computes at once until it is told to hold.

    Attributes:
        begun: the batches it was given; while it holds, the last one is not computed yet.
    """

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.begun: list[Batch] = []
        self._allowed = threading.Semaphore(0)
        self._is_free = True

    def submit(self, batch: Batch) -> Any:
        self.begun.append(batch)
        if not self._is_free:
            self._allowed.acquire()
        return super().submit(batch)

    def hold(self, *, but: int = 0) -> None:
        """From now on every step, but for the next few."""
        self._allowed = threading.Semaphore(but)
        self._is_free = False

    def allow(self, num_steps: int) -> None:
        self._allowed.release(num_steps)

    def set_free(self) -> None:
        self._is_free = True
        self.allow(1)
