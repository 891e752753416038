"""Checks what outputs must match before their request is submitted: compiled off the event loop, in
a process that is killed when that takes too long (`penstock.engine.structured_outputs`), and once.

The engine compiles what passes once more, for its own use. Tenants with new grammars take
turns, and of each the smallest comes first.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import orjson

from penstock.engine.process.sandbox import CPU_SIGNAL
from penstock.engine.protocol.messages import EngineInfo
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs.grammar_sandbox import MAX_CPU_S, MODULE, arguments
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.sandbox import Sandbox, SandboxEndedError
from penstock.gateway.generation.turns import NoTurnError, Turns
from penstock.gateway.telemetry.metrics import Metrics

MAX_WAITING = 16  # new grammars for the one process
_MAX_VERDICTS = 4096


class Verdict(NamedTuple):
    """What is wrong with a grammar.

    Attributes:
        message: empty if nothing is.
        path: in its schema.
        code: None: that of an invalid schema or value.
    """

    kind: str
    message: str = ""
    path: str = ""
    code: str | None = None
    status: int = 400


class GrammarCheck:
    """Checks one grammar at a time, and remembers the verdicts.

    Args:
        directory: of the model's files.
    """

    def __init__(self, directory: Path, metrics: Metrics) -> None:
        self._directory = directory
        self._metrics = metrics
        self._sandbox: Sandbox | None = None
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[Verdict]] = {}
        self._turns = Turns(MAX_WAITING)

    def __len__(self) -> int:
        """Number of grammars whose verdict is known."""
        return len(self._verdicts)

    async def close(self) -> None:
        """End the process."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        if self._sandbox is not None:
            await self._sandbox.close()

    async def check(
        self, grammar: StructuredOutputs, *, param: str, info: EngineInfo, tenant: str = ""
    ) -> None:
        """
        Args:
            param: the parameter that it came from.
            tenant: whose turn it takes.

        Raises:
            RequestRefusedError: 400: the grammar is invalid, unsupported or takes too long to
                compile. 503: too many new grammars are waiting, most of them this tenant's.
        """
        try:
            verdict = await self._verdict(grammar, info=info, tenant=tenant)
        except NoTurnError as error:
            self._metrics.count_grammar("overloaded")
            raise RequestRefusedError(
                f"{MAX_WAITING} new grammars are already being compiled",
                code="server_overloaded",
                param=param,
                status=503,
            ) from error
        self._metrics.count_grammar(verdict.kind)
        if verdict.message:
            is_schema = grammar.kind == "json_schema"
            raise RequestRefusedError(
                f"{param}: {verdict.message}",
                code=verdict.code or ("invalid_json_schema" if is_schema else "invalid_value"),
                param=param + verdict.path,
                status=verdict.status,
            )

    async def _verdict(
        self, grammar: StructuredOutputs, *, info: EngineInfo, tenant: str
    ) -> Verdict:
        key = hashlib.sha256(f"{grammar.kind} {grammar.text}".encode()).digest()
        known = self._verdicts.get(key)
        if known is not None:
            self._verdicts.move_to_end(key)
            return known
        task = self._running.get(key)
        if task is None:
            # Others may want the same, so it goes on when this request's caller leaves.
            task = asyncio.create_task(self._compile(key, grammar, info, tenant))
            self._running[key] = task
            task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(task)

    def _forget(self, key: bytes, task: asyncio.Task[Verdict]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # all who wanted to know may have left

    async def _compile(
        self, key: bytes, grammar: StructuredOutputs, info: EngineInfo, tenant: str
    ) -> Verdict:
        async with self._turns.turn(tenant, len(grammar.text)):
            verdict = await self._answered(grammar, info)
        if verdict.status == 400:
            self._verdicts[key] = verdict
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return verdict

    async def _answered(self, grammar: StructuredOutputs, info: EngineInfo) -> Verdict:
        if self._sandbox is None:
            directory, ends = str(self._directory), info.eos_token_ids
            self._sandbox = Sandbox(
                MODULE, *arguments(directory, vocab_size=info.vocab_size, eos_token_ids=ends)
            )
        begun_s = time.perf_counter()
        answer: bytes | SandboxEndedError
        try:
            answer = await self._sandbox.answer({"kind": grammar.kind, "text": grammar.text})
        except SandboxEndedError as error:
            answer = error
        self._metrics.grammar_check.observe(time.perf_counter() - begun_s)
        return _verdict_of(answer)


def _verdict_of(answer: bytes | SandboxEndedError) -> Verdict:
    if isinstance(answer, SandboxEndedError):
        if answer.code == -CPU_SIGNAL:
            return Verdict("too_slow", f"it takes too long to compile (more than {MAX_CPU_S:g} s)")
        if answer.code == -signal.SIGKILL:
            message = (
                f"it was not compiled within {Sandbox.max_wall_s:g} s: the server is overloaded"
            )
            return Verdict("overloaded", message, code="server_overloaded", status=503)
        message = f"it is too large or nested too deeply to be compiled ({answer.how})"
        return Verdict("refused", message)
    if answer.startswith(b"+"):
        return Verdict("accepted")
    refusal = orjson.loads(answer[1:])
    return Verdict(
        "refused", refusal["message"], path=refusal["param"] or "", code=refusal.get("code")
    )
