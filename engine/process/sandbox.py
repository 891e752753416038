"""Does untrusted work in a separate process, with limits of CPU time and memory.

A thread cannot be stopped in the middle of a computation; a process can. Each job has a limit of
CPU time, and the process one of memory; what exceeds them is killed.

    stdin    a frame per job: a 4-byte length, then the job as JSON
    stdout   a frame per answer: a 4-byte length, then `+` and the result, `-` and a refusal as
             JSON, or `!` and the exit code of a job that was killed

The gateway runs such processes (`gateway.generation.sandbox`).
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from penstock.engine.process.launch import die_with_parent

CPU_SIGNAL = signal.SIGPROF  # ends a process when its CPU time is spent
LENGTH_BYTES = 4
_NICE = 10


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def refusal(message: str, *, param: str | None = None, **more: str) -> bytes:
    """The answer to a job that is refused."""
    return b"-" + json.dumps({"message": message, "param": param, **more}).encode()


def limit_process(parent_pid: int, *, max_memory_bytes: int) -> None:
    """Die with the parent, leave no core, and use no more address space than that."""
    die_with_parent(parent_pid)
    # Some systems lack some of these limits; CPU time is limited everywhere.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (max_memory_bytes, max_memory_bytes))


def give_way(thread_id: int = 0) -> None:
    """Let a thread, by default this process, have a tenth of a stream's share where all cores are
    busy. Beside compiling at an equal priority streams had a quarter of their tokens; at a lower
    one than this a grammar of 0.25 s would not be compiled within 2.5 s."""
    with contextlib.suppress(OSError):  # not everywhere has a thread a priority of its own
        own = os.getpriority(os.PRIO_PROCESS, thread_id)
        os.setpriority(os.PRIO_PROCESS, thread_id, max(own, _NICE))


def serve(answer: Callable[[Any], bytes], *, max_cpu_s: float, forks: bool = False) -> None:
    """Answer the jobs on stdin until it ends.

    Args:
        max_cpu_s: of CPU time for a job.
        forks: do each job in a fork of this process, which survives it; otherwise a job that
            exceeds its limit ends this process.
    """
    give_way()  # not before: a start takes seconds of CPU time
    do = _do_in_fork if forks else _do
    while (job := _next_job(sys.stdin.buffer)) is not None:
        do(answer, job, max_cpu_s)


def _next_job(stdin: BinaryIO) -> Any:
    length = int.from_bytes(stdin.read(LENGTH_BYTES), "big")
    return json.loads(stdin.read(length)) if length else None


def _do(answer: Callable[[Any], bytes], job: Any, max_cpu_s: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, max_cpu_s)
    data = answer(job)
    signal.setitimer(signal.ITIMER_PROF, 0.0)  # before the write: a late answer is not sent
    _write(data)


def _do_in_fork(answer: Callable[[Any], bytes], job: Any, max_cpu_s: float) -> None:
    own_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            die_with_parent(own_pid)
            _do(answer, job, max_cpu_s)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    if status:
        _write(b"!%d" % os.waitstatus_to_exitcode(status))


def _write(answer: bytes) -> None:
    sys.stdout.buffer.write(framed(answer))
    sys.stdout.buffer.flush()
