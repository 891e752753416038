"""Renders untrusted chat templates in a process that can be killed: those of requests
(`--trust-request-chat-template`), and the model's own once at start.

The process itself is `penstock.engine.chat_formats.template_sandbox`.
"""

from __future__ import annotations

import signal
import subprocess
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Mapping
from typing import Any

import orjson

from penstock.engine.chat_formats import ModelFacts, TemplateFacts, of_request
from penstock.engine.chat_formats.template_sandbox import TemplateJob
from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.process.sandbox import CPU_SIGNAL, LENGTH_BYTES, framed
from penstock.engine.text.chat_template import MAX_CPU_S, TemplateFiles, located
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.sandbox import (
    Sandbox,
    SandboxEndedError,
    sandbox_command,
)

MAX_WAITING = 16  # requests for the one process
_MAX_FACTS = 64
_MODULE = "penstock.engine.chat_formats.template_sandbox"


class TemplateProcess(Sandbox):
    """Renders one template at a time."""

    def __init__(self) -> None:
        super().__init__(_MODULE)
        self._facts: dict[str, TemplateFacts] = {}

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
        job = TemplateJob(
            source=source,
            special_tokens=dict(special_tokens),
            named={},
            arguments=dict(arguments),
            checks=False,
        )
        return (await self._answered(job)).decode()

    async def facts(self, source: str, special_tokens: Mapping[str, str]) -> TemplateFacts:
        """What a template shows. Raises as `render`."""
        known = self._facts.get(source)
        if known is None:
            job = TemplateJob(
                source=source,
                special_tokens=dict(special_tokens),
                named={},
                arguments=None,
                checks=False,
            )
            found = ModelFacts.from_fields(orjson.loads(await self._answered(job)))
            if len(self._facts) >= _MAX_FACTS:
                self._facts.clear()
            known = self._facts[source] = of_request(found.with_tools, source)
        return known

    async def _answered(self, job: TemplateJob) -> bytes:
        """Raises as `render`."""
        if self.num_waiting >= MAX_WAITING:
            raise RequestRefusedError(
                f"{MAX_WAITING} requests with their own chat_template are already waiting",
                code="server_overloaded",
                param="chat_template",
                status=503,
            )
        try:
            answer = await self.answer(job)
        except SandboxEndedError as error:
            raise InvalidRequestError(
                f"chat_template {_end_of(error)}", param="chat_template"
            ) from error
        if answer.startswith(b"+"):
            return answer[1:]
        refusal = orjson.loads(answer[1:])
        raise InvalidRequestError(refusal["message"], param=refusal["param"])


class TemplateCheck:
    """Renders a model's own templates before anything else uses it, and finds what they show. The
    process runs in parallel until `result` is called."""

    def __init__(self, files: TemplateFiles) -> None:
        job = TemplateJob(
            source=files.source,
            special_tokens=dict(files.special_tokens),
            named=dict(files.named),
            arguments=None,
            checks=True,
        )
        self._where = located(files.file)
        self._frame = framed(orjson.dumps(job))
        self._process = subprocess.Popen(  # noqa: S603  (our own module)
            sandbox_command(_MODULE), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
        )

    def result(self) -> ModelFacts:
        """What was found.

        Raises:
            ModelLoadError: the template fails or exceeds a limit.
        """
        with self._process as process:
            try:
                answer, _ = process.communicate(self._frame, timeout=Sandbox.max_wall_s)
            except subprocess.TimeoutExpired:
                process.kill()
                answer, _ = process.communicate()
        if not answer:
            raise ModelLoadError(
                f"{self._where}the chat template {_end_of(SandboxEndedError(process.returncode))}"
            )
        answer = answer[LENGTH_BYTES:]
        if answer.startswith(b"-"):
            raise ModelLoadError(self._where + orjson.loads(answer[1:])["message"])
        return ModelFacts.from_fields(orjson.loads(answer[1:]))


def _end_of(error: SandboxEndedError) -> str:
    """Why the process ended, as the predicate of a sentence about the template."""
    if error.code == -CPU_SIGNAL:
        return f"takes more than {MAX_CPU_S:g} s to render"
    if error.code == -signal.SIGKILL:
        return f"was not rendered within {Sandbox.max_wall_s:g} s"
    return f"ended the process that rendered it ({error.how})"
