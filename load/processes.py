"""Processes that a bench started, with all they started themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import psutil

_STOP_AND_CONTINUE = 'kill -STOP "$1" && sleep "$2"; kill -CONT "$1"'


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


async def freeze(process: psutil.Process, for_s: float) -> None:
    """Stop a process for a time. A shell does it, which wakes the process also when this one is
    killed meanwhile."""
    shell = await asyncio.create_subprocess_exec(
        *("sh", "-c", _STOP_AND_CONTINUE, "sh", str(process.pid), str(for_s)),
        stderr=asyncio.subprocess.DEVNULL,  # it may be gone already
        start_new_session=True,
    )
    try:
        await shell.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        await shell.wait()
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()
