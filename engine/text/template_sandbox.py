"""A process that renders untrusted chat templates: those of requests, and a model's own when a
gateway starts.

Jinja's sandbox restricts what a template can access, but not how long it computes, and neither the
event loop nor a thread can be stopped in the middle of that. A process can: each rendering has a
limit of CPU time and memory, and exceeding it ends the process.

    stdin    a frame per job: a 4-byte length, then a `TemplateJob` as JSON
    stdout   a frame per answer: a 4-byte length, then `+` and the text, or `-` and
             {"message", "param"} as JSON

Run by the gateway as `python -m penstock.engine.text.template_sandbox PARENT_PID`. It imports
little, so that it starts quickly.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import signal
import sys
from typing import Any, BinaryIO, TypedDict

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.process import die_with_parent
from penstock.engine.text.chat_template import MAX_CPU_S, ChatTemplate

MAX_MEMORY_BYTES = 512 << 20  # of address space, about 100 MiB of it Python's own
MAX_TEXT_BYTES = 8 << 20
CPU_SIGNAL = signal.SIGPROF  # ends the process when its CPU time is spent
LENGTH_BYTES = 4


class TemplateJob(TypedDict):
    """A template to render.

    Attributes:
        source: the template; in a check, the model's own.
        arguments: the other arguments of `ChatTemplate.render`; None only checks the template.
    """

    source: str | None
    special_tokens: dict[str, str]
    arguments: dict[str, Any] | None


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    # Some systems lack some of these limits; CPU time is limited everywhere.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while (job := _next_job(stdin)) is not None:
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
        answer = _answer(job)
        signal.setitimer(signal.ITIMER_PROF, 0.0)  # before the write: a late answer is not sent
        stdout.write(framed(answer))
        stdout.flush()


def _next_job(stdin: BinaryIO) -> TemplateJob | None:
    length = int.from_bytes(stdin.read(LENGTH_BYTES), "big")
    job: TemplateJob | None = json.loads(stdin.read(length)) if length else None
    return job


def _answer(job: TemplateJob) -> bytes:
    try:
        return b"+" + _rendered(job)
    except (InvalidRequestError, ModelLoadError) as error:
        refusal = {"message": str(error), "param": getattr(error, "param", None)}
        return b"-" + json.dumps(refusal).encode()


def _rendered(job: TemplateJob) -> bytes:
    """Raises: InvalidRequestError, ModelLoadError."""
    arguments = job["arguments"]
    if arguments is None:
        ChatTemplate(job["source"], job["special_tokens"]).check()
        return b""
    template = ChatTemplate(None, job["special_tokens"])
    text = template.render(template=job["source"], max_cpu_s=math.inf, **arguments)
    try:
        data = text.encode()
    except (UnicodeEncodeError, MemoryError) as error:
        raise InvalidRequestError(
            "chat_template produces invalid Unicode", param="chat_template"
        ) from error
    if len(data) > MAX_TEXT_BYTES:
        raise InvalidRequestError(
            f"chat_template produces more than {MAX_TEXT_BYTES} bytes", param="chat_template"
        )
    return data


if __name__ == "__main__":
    main()
