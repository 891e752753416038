"""Where a batch runs: the seam between the step loop and the device or devices."""

from __future__ import annotations

from typing import Protocol

from penstock.engine.batch import Batch, BatchResult


class Handle(Protocol):
    """A step that was submitted."""

    def result(self) -> BatchResult:
        """Wait for the step and return what it sampled; raises what the step raised."""
        ...


class Executor(Protocol):
    """Runs batches in the order they are submitted."""

    def submit(self, batch: Batch) -> Handle:
        """Hand a batch over; it may still be running on return."""
        ...

    def num_parts_done(self) -> int:
        """Parts of all steps so far, as far as they can be counted; any thread may ask."""
        ...

    def describe(self) -> str:
        """The device's state in words, for the log of a step that does not end."""
        ...

    def close(self) -> None:
        """Give the device back. Nothing is submitted afterwards."""
        ...
