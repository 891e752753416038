"""Processes that a bench started, with all they started themselves."""

from __future__ import annotations

import contextlib

import psutil


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and all below it, those that live."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(process: psutil.Process, *, within_s: float) -> None:
    """Ask a process to end, wait for it, and kill what is left of its family."""
    processes = family(process)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
    psutil.wait_procs([process], timeout=within_s)
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(processes, timeout=within_s)
