"""Processes that tests wait for, and ports that nobody takes meanwhile."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil


def lives(process: psutil.Process) -> bool:
    """Whether it still does anything: an orphan may stay a zombie for a while."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def await_gone(processes: Iterable[psutil.Process]) -> None:
    """Assert that all of them end: what was killed takes a moment to give back its memory."""
    deadline_s = time.monotonic() + 60
    for process in processes:
        while lives(process):
            assert time.monotonic() < deadline_s, f"{process} lives"
            time.sleep(0.02)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that the system gives to nobody else, and on which nobody listens yet.

    Only a socket that asks for the very port may listen there (SO_REUSEADDR).
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
