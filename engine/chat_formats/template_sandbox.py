"""A process that renders untrusted chat templates: those of requests, and a model's own when a
gateway starts. The frames on stdin and stdout are those of `penstock.engine.process.sandbox`.

Jinja's sandbox restricts what a template can access, but not how long it computes, and neither the
event loop nor a thread can be stopped in the middle of that. A process can.

Run by the gateway as `python -m penstock.engine.chat_formats.template_sandbox PARENT_PID`. It
imports little, so that it starts quickly.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any, TypedDict

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.process.sandbox import limit_process, refusal, serve
from penstock.engine.text.chat_template import MAX_CPU_S, ChatTemplate

MAX_MEMORY_BYTES = 512 << 20  # of address space, about 100 MiB of it Python's own
MAX_TEXT_BYTES = 8 << 20


class TemplateJob(TypedDict):
    """A template to render.

    Attributes:
        source: the template; in a check, the model's own.
        named: in a check: the model's others.
        arguments: the other arguments of `ChatTemplate.render`; None: what the template shows is
            found, as JSON.
        checks: it is refused if it is broken, and nothing is found of it otherwise.
    """

    source: str | None
    special_tokens: dict[str, str]
    named: dict[str, str]
    arguments: dict[str, Any] | None
    checks: bool


def main() -> None:
    limit_process(int(sys.argv[1]), max_memory_bytes=MAX_MEMORY_BYTES)
    serve(_answer, max_cpu_s=MAX_CPU_S)


def _answer(job: TemplateJob) -> bytes:
    try:
        return b"+" + _rendered(job)
    except (InvalidRequestError, ModelLoadError) as error:
        return refusal(str(error), param=getattr(error, "param", None))


def _rendered(job: TemplateJob) -> bytes:
    """Raises: InvalidRequestError, ModelLoadError."""
    arguments = job["arguments"]
    if arguments is None:
        own = _template(job)
        return json.dumps(_facts(own)).encode()
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


def _template(job: TemplateJob) -> ChatTemplate:
    """Raises: ModelLoadError."""
    try:
        template = ChatTemplate(job["source"], job["special_tokens"], named=job["named"])
    except ModelLoadError:
        if job["checks"]:
            raise
        return ChatTemplate(None, {})
    if job["checks"]:
        template.check()
    return template


def _facts(template: ChatTemplate) -> dict[str, Any]:
    # Not where templates of requests are rendered: it takes a while to import.
    from penstock.engine.chat_formats.template_facts import ModelFacts

    return ModelFacts.found_in(template).as_fields()


if __name__ == "__main__":
    main()
