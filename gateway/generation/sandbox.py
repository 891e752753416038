"""Runs a process that does untrusted work, and kills it when it takes too long.

The process's own side is `penstock.engine.process.sandbox`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from typing import Any

import orjson

from penstock.engine.process.sandbox import LENGTH_BYTES, framed

_EXIT_S = 5.0


class SandboxEndedError(Exception):
    """The job was killed. `code` is the process's exit code, negative for a signal."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"exit code {code}")
        self.code = code

    @property
    def how(self) -> str:
        """The code, for a message."""
        if self.code is None or self.code >= 0:
            return f"exit code {self.code}"
        return signal.Signals(-self.code).name


class Sandbox:
    """Does one job at a time. The process is started for the first job, and again after a job has
    ended it.

    Args:
        module: runs in the process: `python -m MODULE PARENT_PID ARGUMENT …`.

    Attributes:
        max_wall_s: for a job. CPU time is the main limit; this one covers waiting for a core and
            for the process to start.
    """

    max_wall_s = 30.0

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = sandbox_command(module, *arguments)
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self.num_waiting = 0

    async def answer(self, job: Any) -> bytes:
        """The answer to a job: `+` and its result, or `-` and a refusal as JSON.

        Raises:
            SandboxEndedError: the job exceeded a limit.
        """
        frame = framed(orjson.dumps(job))
        self.num_waiting += 1
        try:
            async with self._lock:
                answer = await self._answer(frame)
        finally:
            self.num_waiting -= 1
        if answer.startswith(b"!"):
            raise SandboxEndedError(int(answer[1:]))
        return answer

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def _answer(self, frame: bytes) -> bytes:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL
            )
        process = self._process
        try:
            async with asyncio.timeout(self.max_wall_s):
                return await _exchange(process, frame)
        except (EOFError, TimeoutError) as error:
            if isinstance(error, EOFError):  # the process is ending; its exit code says why
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _EXIT_S)
            await _end(process)
            raise SandboxEndedError(process.returncode) from error
        except BaseException:  # cancelled: the answer must not be read as the next job's
            await _end(process)
            raise


def sandbox_command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, str(os.getpid()), *arguments]


async def _exchange(process: Process, frame: bytes) -> bytes:
    """Raises: EOFError: the process died."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame)
    with contextlib.suppress(ConnectionError):  # reading then fails with a better reason
        await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    return await process.stdout.readexactly(length)


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
