"""A process that checks grammars of requests: whether they are supported, and compile in time and
memory. The frames on stdin and stdout are those of `penstock.engine.sandbox`.

llguidance takes minutes for some small schemas (`allOf` with several `multipleOf`), and a thread
cannot be stopped in the middle of that. A process can. The vocabulary is read once; each grammar is
compiled in a fork.

Run by the gateway as `python -m penstock.engine.structured_outputs.grammar_sandbox PARENT_PID
MODEL_DIRECTORY VOCAB_SIZE EOS_TOKEN_IDS MAX_CPU_S`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TypedDict

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.native_panics import is_panic
from penstock.engine.request import StructuredOutputs
from penstock.engine.sandbox import limit_process, refusal, serve
from penstock.engine.structured_outputs.compiler import GrammarCompiler

_MAX_MEMORY_BYTES = 1 << 30  # of address space, some 100 MiB of it Python's own and the vocabulary
_ANYTHING = StructuredOutputs("regex", "(?s:.*)")


class GrammarJob(TypedDict):
    """A `StructuredOutputs` to check."""

    kind: str
    text: str


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
