"""Delivers Ctrl-C between steps, never inside one.

An interrupted step would leave policy and device in disagreement: blocks counted as computed that
are not, sequences that only one of them still knows.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_deferred() -> Iterator[Callable[[], None]]:
    """Hold SIGINT back inside the context; the function returned passes it to the previous handler.

    A second SIGINT is delivered at once, since the first one's step may hang. Outside the main
    thread, where Python delivers no signals, nothing is held back.
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
    deliver()  # one that arrived in the last step
