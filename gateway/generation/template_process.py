"""Renders untrusted chat templates in a process that can be killed: those of requests
(`--trust-request-chat-template`), and the model's own once at start.

The process itself is `penstock.engine.text.template_sandbox`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from typing import Any

import orjson

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.text.chat_template import MAX_CPU_S, TemplateFiles, located
from penstock.engine.text.template_sandbox import (
    CPU_SIGNAL,
    LENGTH_BYTES,
    TemplateJob,
    framed,
)
from penstock.gateway.errors import RequestRefusedError

MAX_WAITING = 16  # requests for the one process
# CPU time is the main limit; this one covers waiting for a core and for the process to start.
_MAX_WALL_S = 30.0
_EXIT_S = 5.0


class TemplateProcess:
    """Renders one template at a time. The process is started for the first template, and again
    after a template has ended it."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._num_waiting = 0

    async def render(
        self, source: str, special_tokens: Mapping[str, str], arguments: Mapping[str, Any]
    ) -> str:
        """The text of a conversation.

        Args:
            arguments: of `ChatTemplate.render`, without the template.

        Raises:
            InvalidRequestError: the template fails or exceeds a limit.
            RequestRefusedError: 503: too many requests are waiting.
        """
        if self._num_waiting >= MAX_WAITING:
            raise RequestRefusedError(
                f"{MAX_WAITING} requests with their own chat_template are already waiting",
                code="server_overloaded",
                param="chat_template",
                status=503,
            )
        job = TemplateJob(
            source=source, special_tokens=dict(special_tokens), arguments=dict(arguments)
        )
        self._num_waiting += 1
        try:
            async with self._lock:
                answer = await self._answer(framed(orjson.dumps(job)))
        finally:
            self._num_waiting -= 1
        if answer.startswith(b"+"):
            return answer[1:].decode()
        refusal = orjson.loads(answer[1:])
        raise InvalidRequestError(refusal["message"], param=refusal["param"])

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await _end(process)

    async def _answer(self, frame: bytes) -> bytes:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *_command(), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
            )
        process = self._process
        try:
            async with asyncio.timeout(_MAX_WALL_S):
                return await _exchange(process, frame)
        except (EOFError, TimeoutError) as error:
            if isinstance(error, EOFError):  # the process is ending; its exit code says why
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _EXIT_S)
            await _end(process)
            raise InvalidRequestError(
                f"chat_template {_end_of(process.returncode)}", param="chat_template"
            ) from error
        except BaseException:  # cancelled: the answer must not be read as the next request's
            await _end(process)
            raise


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


class TemplateCheck:
    """Renders a model's own template before anything else uses it. The process runs in parallel
    until `result` is called."""

    def __init__(self, files: TemplateFiles) -> None:
        job = TemplateJob(
            source=files.source, special_tokens=dict(files.special_tokens), arguments=None
        )
        self._where = located(files.file)
        self._frame = framed(orjson.dumps(job))
        self._process = subprocess.Popen(  # noqa: S603  (our own module)
            _command(), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
        )

    def result(self) -> None:
        """Raises: ModelLoadError: the template fails or exceeds a limit."""
        with self._process as process:
            try:
                answer, _ = process.communicate(self._frame, timeout=_MAX_WALL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                answer, _ = process.communicate()
        if not answer:
            raise ModelLoadError(
                f"{self._where}the model's chat template {_end_of(process.returncode)}"
            )
        answer = answer[LENGTH_BYTES:]
        if answer.startswith(b"-"):
            raise ModelLoadError(self._where + orjson.loads(answer[1:])["message"])


def _command() -> list[str]:
    return [sys.executable, "-m", "penstock.engine.text.template_sandbox", str(os.getpid())]


def _end_of(code: int | None) -> str:
    """Why the process ended, as the predicate of a sentence about the template."""
    if code == -CPU_SIGNAL:
        return f"takes more than {MAX_CPU_S:g} s to render"
    if code == -signal.SIGKILL:
        return f"was not rendered within {_MAX_WALL_S:g} s"
    how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
    return f"ended the process that rendered it ({how})"
