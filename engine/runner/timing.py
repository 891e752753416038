"""Timing a device without synchronising it: events on its streams.

On a CPU work is done when a call returns, so an event is the time at which it is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch


class WallMoment:
    """A CPU's counterpart of `torch.cuda.Event`."""

    __slots__ = ("_at",)

    def record(self, _stream: object = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Whether it has passed."""
        return True

    def synchronize(self) -> None:
        """Wait until it has passed, which it has."""

    def elapsed_time(self, end: WallMoment) -> float:
        """Milliseconds from this event to `end`; both must have passed."""
        return (end._at - self._at) * 1e3


def record_moment(device: torch.device, stream: Any = None) -> Any:
    """An event recorded now on `stream`, by default the device's current one.

    Returns:
        a `torch.cuda.Event` or a `WallMoment`.
    """
    cuda: Any = torch.cuda
    moment = cuda.Event(enable_timing=True) if device.type == "cuda" else WallMoment()
    moment.record(stream)
    return moment


class EventStopwatch:
    """Measures from its construction on, on a GPU's current stream."""

    __slots__ = ("_device", "_end", "_start")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = record_moment(device)

    def mark_end(self) -> None:
        """Set the end to when everything launched so far is done."""
        self._end = record_moment(self._device)

    def seconds(self) -> float:
        """From the start to the marked end; waits for the end."""
        self._end.synchronize()
        seconds: float = self._start.elapsed_time(self._end) / 1e3
        return seconds


class WallStopwatch:
    """Its counterpart on a CPU, one of which is made for every token."""

    __slots__ = ("_end_s", "_start_s")

    def __init__(self) -> None:
        self._start_s = time.perf_counter()

    def mark_end(self) -> None:
        self._end_s = time.perf_counter()

    def seconds(self) -> float:
        return self._end_s - self._start_s


Stopwatch: TypeAlias = EventStopwatch | WallStopwatch


def stopwatch_of(device: torch.device) -> Callable[[], Stopwatch]:
    """What starts a stopwatch on a device."""
    return WallStopwatch if device.type == "cpu" else partial(EventStopwatch, device)
