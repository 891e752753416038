"""A rival that is a library: a worker of ours runs it under its own Python and times it there."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from penstock.load.client.records import StreamRecord
from penstock.load.peers import models
from penstock.load.peers.environments import REPOSITORY
from penstock.load.peers.http_server import tail
from penstock.load.peers.rival import RivalError
from penstock.load.peers.workloads import Workload, token_turns
from penstock.load.processes import end
from penstock.load.workloads.driver import RunResult

_READY_WITHIN_S = 240.0
_STOP_WITHIN_S = 5.0
_CELL_WITHIN_S = 300.0


class InProcess:
    """A `Running`. No client, no HTTP, and no tokenizer are in its figures."""

    def __init__(
        self, command: Sequence[str], *, model: str, env: Mapping[str, str], log: Path
    ) -> None:
        self._tokenizer = Tokenizer.from_file(str(models.MODELS / model / "tokenizer.json"))
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        began_s = time.perf_counter()
        with log.open("wb") as file:
            self._popen = subprocess.Popen(  # noqa: S603  (a command of ours)
                command,
                env={**os.environ, **env, "PYTHONPATH": str(REPOSITORY / ".namespace")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                process_group=0,
            )
        self.process = psutil.Process(self._popen.pid)
        try:
            self._answer(_READY_WITHIN_S)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.perf_counter() - began_s

    def measure(self, workload: Workload) -> RunResult:
        asked = {
            "concurrency": workload.concurrency,
            "dialogues": [token_turns(each, self._tokenizer) for each in workload.dialogues],
        }
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(json.dumps(asked).encode() + b"\n")
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise RivalError(f"it had ended: {tail(self._log)}") from None
        return _result(self._answer(_CELL_WITHIN_S), workload)

    def stop(self) -> None:
        end(self.process, within_s=_STOP_WITHIN_S)
        self._popen.communicate()

    def _answer(self, within_s: float) -> dict[str, Any]:
        """One line; it is written at once, so that its start says that all of it comes."""
        assert self._popen.stdout is not None
        readable, _, _ = select.select([self._popen.stdout], [], [], within_s)
        line = self._popen.stdout.readline() if readable else b""
        if not line:
            how = "it ended" if readable else f"nothing came for {within_s:g} s"
            raise RivalError(f"{how}: {tail(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _result(answer: Mapping[str, Any], workload: Workload) -> RunResult:
    records = []
    for fields in answer["records"]:
        num_tokens = sum(fields["event_tokens"])
        record = StreamRecord(**fields, sent_s=fields["scheduled_s"], output_tokens=num_tokens)
        expected = workload.dialogues[record.dialogue].turns[record.turn].max_tokens
        record.expected_tokens = expected
        record.finish_reason = "length"
        records.append(record)
    records.sort(key=lambda record: (record.dialogue, record.turn))
    return RunResult(
        records=records, began_s=answer["began_s"], ended_s=answer["ended_s"], client_cpu_s=0.0
    )
