"""Chat templates that nobody vouches for, rendered in a process that may be killed: those of
requests (`--trust-request-chat-template`), and the model's own once at start.

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
from penstock.engine.text.chat_template import TemplateFiles
from penstock.engine.text.template_sandbox import (
    CPU_SIGNAL,
    LENGTH_BYTES,
    MAX_CPU_S,
    TemplateJob,
    framed,
)
from penstock.gateway.errors import RequestRefusedError

MAX_WAITING = 16  # requests for the one process
# Where CPU time is not the limit: the process waits for a core, or for its start.
_MAX_WALL_S = 30.0
_EXIT_S = 5.0


class TemplateProcess:
    """Renders one template at a time. The process starts with the first, and again after one that
    ended it."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._lock = asyncio.Lock()
        self._num_waiting = 0

    async def render(
        self, source: str, special_tokens: Mapping[str, str], arguments: Mapping[str, Any]
    ) -> str:
        """The text of a conversation.

        Args:
            arguments: of `ChatTemplate.render`, other than the template.

        Raises:
            InvalidRequestError: the template fails, or takes more than it may.
            RequestRefusedError: 503: too many wait.
        """
        if self._num_waiting >= MAX_WAITING:
            raise RequestRefusedError(
                f"{MAX_WAITING} requests with a chat_template of their own are waiting already",
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
            if isinstance(error, EOFError):  # it is dying: of what, its exit code is to say
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), _EXIT_S)
            await _end(process)
            raise InvalidRequestError(
                f"chat_template {_end_of(process.returncode)}", param="chat_template"
            ) from error
        except BaseException:  # nobody waits for the answer any more: it must not be the next one's
            await _end(process)
            raise


async def _exchange(process: Process, frame: bytes) -> bytes:
    """Raises: EOFError: the process died."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame)
    with contextlib.suppress(ConnectionError):  # what it read last says more
        await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
    return await process.stdout.readexactly(length)


async def _end(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


class TemplateCheck:
    """The rendering of a model's own template before anything else looks at it; it goes on beside
    other work until its `result` is asked for."""

    def __init__(self, files: TemplateFiles) -> None:
        job = TemplateJob(
            source=files.source, special_tokens=dict(files.special_tokens), arguments=None
        )
        self._frame = framed(orjson.dumps(job))
        self._process = subprocess.Popen(  # noqa: S603  (our own module)
            _command(), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
        )

    def result(self) -> None:
        """Raises: ModelLoadError: the template is broken, or takes more than it may."""
        with self._process as process:
            try:
                answer, _ = process.communicate(self._frame, timeout=_MAX_WALL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                answer, _ = process.communicate()
        if not answer:
            raise ModelLoadError(f"the model's chat template {_end_of(process.returncode)}")
        answer = answer[LENGTH_BYTES:]
        if answer.startswith(b"-"):
            raise ModelLoadError(orjson.loads(answer[1:])["message"])


def _command() -> list[str]:
    return [sys.executable, "-m", "penstock.engine.text.template_sandbox", str(os.getpid())]


def _end_of(code: int | None) -> str:
    """What a template did to the process that rendered it."""
    if code == -CPU_SIGNAL:
        return f"takes more than {MAX_CPU_S:g} s to render"
    if code == -signal.SIGKILL:
        return f"was not rendered within {_MAX_WALL_S:g} s"
    how = f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name
    return f"ended the process that rendered it ({how})"
