"""Ctrl-C between steps, never inside one.

Cut in its middle, a step would leave policy's books and the device's apart: blocks counted as
computed that are not, sequences that one side still knows and the other does not.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_deferred() -> Iterator[Callable[[], None]]:
    """Hold SIGINT back while inside; the function given hands it to whoever handled it before.

    A second SIGINT goes through at once: the first one's step may hang. Outside the main thread,
    where Python delivers no signals, nothing is held back.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield lambda: None
        return
    held: list[FrameType | None] = []

    def hold(signum: int, frame: FrameType | None) -> None:
        if held:
            previous(signum, frame)
        held.append(frame)

    def deliver() -> None:
        if held:
            previous(signal.SIGINT, held.pop())

    signal.signal(signal.SIGINT, hold)
    try:
        yield deliver
    finally:
        signal.signal(signal.SIGINT, previous)
    deliver()  # one that came in the last step
