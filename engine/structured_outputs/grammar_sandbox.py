"""A process that checks grammars of requests: whether they are supported, and compile in time and
memory. The frames on stdin and stdout are those of `penstock.engine.process.sandbox`.

A gateway runs one for its requests, and an engine for those of gateways on other machines.

llguidance takes minutes for some small schemas (`allOf` with several `multipleOf`), and a thread
cannot be stopped in the middle of that. A process can. The vocabulary is read once; each grammar is
compiled in a fork.

Run as `python -m penstock.engine.structured_outputs.grammar_sandbox PARENT_PID MODEL_DIRECTORY
VOCAB_SIZE EOS_TOKEN_IDS MAX_CPU_S`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import TypedDict

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.process.native_panics import is_panic
from penstock.engine.process.sandbox import LENGTH_BYTES, framed, limit_process, refusal, serve
from penstock.engine.request import StructuredOutputs
from penstock.engine.structured_outputs.compiler import GrammarCompiler

MODULE = "penstock.engine.structured_outputs.grammar_sandbox"
MAX_CPU_S = 0.25  # of compiling; of 400 schemas as they are in use none took a third of it
_MAX_WALL_S = 30.0  # the wait for a core, and the start of the process, included
_MAX_MEMORY_BYTES = 1 << 30  # of address space, some 100 MiB of it Python's own and the vocabulary
_ANYTHING = StructuredOutputs("regex", "(?s:.*)")


class GrammarJob(TypedDict):
    """A `StructuredOutputs` to check."""

    kind: str
    text: str


def arguments(directory: str, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> list[str]:
    """The process's arguments after its parent's pid."""
    return [directory, str(vocab_size), ",".join(map(str, eos_token_ids)), str(MAX_CPU_S)]


class GrammarSandbox:
    """The process, for an engine; started with the first grammar.

    Args:
        directory: of the model's files.
        vocab_size, eos_token_ids: see `GrammarCompiler`.
    """

    def __init__(self, directory: str, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._arguments = arguments(directory, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = threading.Lock()  # while the process is asked

    def check(self, grammar: StructuredOutputs) -> None:
        """Raises: InvalidRequestError: it is refused. `param` begins with `structured_outputs`."""
        with self._lock:
            answer = self._answer({"kind": grammar.kind, "text": grammar.text})
        if answer.startswith(b"+"):
            return
        refused = {"message": "it takes too long or too much memory to compile", "param": ""}
        if answer.startswith(b"-"):
            refused = json.loads(answer[1:])
        param = f"structured_outputs{refused['param'] or ''}"
        raise InvalidRequestError(f"structured_outputs: {refused['message']}", param=param)

    def close(self) -> None:
        """End the process; any thread may call it. What is being checked is refused."""
        self._is_closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._end()

    def _answer(self, job: GrammarJob) -> bytes:
        """Nothing: the process has ended."""
        if self._is_closed:
            return b""
        process = self._process = self._process or self._started()
        late = threading.Timer(_MAX_WALL_S, process.kill)
        late.start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(framed(json.dumps(job).encode()))
            process.stdin.flush()
            length = int.from_bytes(process.stdout.read(LENGTH_BYTES), "big")
            answer = process.stdout.read(length)
        except OSError:  # it has ended
            answer = b""
        finally:
            late.cancel()
        if not answer:
            self._end()
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  (our own module)
            [sys.executable, "-m", MODULE, str(os.getpid()), *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def main() -> None:
    parent_pid, directory, vocab_size, eos_token_ids, max_cpu_s = sys.argv[1:]
    limit_process(int(parent_pid), max_memory_bytes=_MAX_MEMORY_BYTES)
    compiler = GrammarCompiler(
        Path(directory),
        vocab_size=int(vocab_size),
        eos_token_ids=tuple(map(int, filter(None, eos_token_ids.split(",")))),
    )
    try:
        compiler.matcher(_ANYTHING)  # which reads the vocabulary
        answer = partial(_answer, compiler)
    except ModelLoadError as error:
        answer = partial(_unusable, str(error))
    serve(answer, max_cpu_s=float(max_cpu_s), forks=True)


def _unusable(why: str, _: GrammarJob) -> bytes:
    return refusal(
        f"this model's tokenizer does not work with structured outputs: {why}",
        code="unsupported_parameter",
    )


def _answer(compiler: GrammarCompiler, job: GrammarJob) -> bytes:
    grammar = StructuredOutputs(job["kind"], job["text"])  # type: ignore[arg-type]
    try:
        _check(compiler, grammar)
    except InvalidRequestError as error:
        return refusal(str(error), param=error.param)
    except (MemoryError, RecursionError):
        return refusal("it is too large or nested too deeply to be compiled")
    except BaseException as error:
        if not is_panic(error):
            raise
        return refusal("it cannot be compiled: llguidance fails on it")
    return b"+"


def _check(compiler: GrammarCompiler, grammar: StructuredOutputs) -> None:
    """Raises: InvalidRequestError: `param` is the path in a schema that is at fault."""
    matcher = compiler.matcher(grammar)
    matcher.compute_bitmask()
    if matcher.is_error():
        why = matcher.get_error()
        raise InvalidRequestError(
            "no output can match it"
            if "NoExtension" in why
            else f"it is too complex: {why.splitlines()[0]}"
        )


if __name__ == "__main__":
    main()
