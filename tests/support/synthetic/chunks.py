"""An answer as chat completions and completions tell it: chunks, the usage, `[DONE]`."""

from __future__ import annotations

from typing import Any

import orjson

from .asked import Asked, Endpoint
from .plan import StreamPlan

DONE = b"data: [DONE]\n\n"
MALFORMED = b'data: {"choices": [\n\n'
_NO_THOUGHTS = {"reasoning_content": None, "reasoning": None}  # as of a model that has some
_FINISH = {"completed": "stop", "incomplete": "length", "cancelled": "abort"}


class Chunks:
    """The frames of one answer. They carry no numbers, so none can be replayed or left out."""

    malformed = MALFORMED

    def __init__(self, plan: StreamPlan, asked: Asked) -> None:
        self._plan = plan
        self._asked = asked
        self._is_chat = asked.endpoint is Endpoint.CHAT
        self._head = {
            "id": plan.response_id("chatcmpl-" if self._is_chat else "cmpl-"),
            "created": plan.created_s,
            "model": asked.settings.model,
            "system_fingerprint": "fp_synthetic",
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
        }
        self._before, self._after = self._frame(self._choice("\0")).split(b"\\u0000")

    def head(self, after: int = -1) -> list[bytes]:
        return []

    def first_event(self, after: int = -1) -> int:
        return 0

    def delta(self, event: int, *, lost: int | None = None) -> bytes:
        """
        Args:
            lost: an event before that never came; a running count leaves it out.
        """
        text, usage = self._plan.text(event), None
        frame = self._before + text.encode() + self._after
        if self._asked.shows_running_usage:
            usage = self._usage(event + 1, lost=lost)
            frame = self._frame(self._choice(text), usage=usage)
        if event == 0 and self._is_chat:
            role = {"index": 0, "delta": {**_NO_THOUGHTS, "role": "assistant", "content": ""}}
            opening = {**role, "logprobs": None, "finish_reason": None}
            return self._frame(opening, usage=usage) + frame
        return frame

    def end(
        self,
        num_events: int,
        status: str,
        *,
        after: int = -1,
        lost: int | None = None,
    ) -> list[bytes]:
        usage = self._usage(num_events)
        running = self._usage(num_events, lost=lost) if self._asked.shows_running_usage else None
        frames = [self._frame(self._choice(None, finish=_FINISH[status]), usage=running)]
        if self._asked.shows_usage:
            frames.append(self._frame(usage=usage))
        return [*frames, DONE]

    def failure(self, num_events: int, *, lost: int | None = None) -> list[bytes]:
        return [b"data: " + orjson.dumps(FAILURE) + b"\n\n", DONE]

    def whole(self, num_events: int, status: str) -> dict[str, Any]:
        """The answer in one piece."""
        text = self._plan.text_through(num_events)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": _FINISH[status]}
        if self._is_chat:
            choice["message"] = {
                "role": "assistant",
                "content": text,
                "refusal": None,
                **_NO_THOUGHTS,
            }
        else:
            choice["text"] = text
        kind = "chat.completion" if self._is_chat else "text_completion"
        usage = self._usage(num_events)
        return {**self._head, "object": kind, "choices": [choice], "usage": usage}

    def _frame(
        self, choice: dict[str, Any] | None = None, *, usage: dict[str, Any] | None = None
    ) -> bytes:
        chunk = {**self._head, "choices": [] if choice is None else [choice]}
        if self._asked.shows_usage:
            chunk["usage"] = usage
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _choice(self, text: str | None, *, finish: str | None = None) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text or ""}
        if self._is_chat:
            content = {"delta": {**_NO_THOUGHTS, "content": text or ""}}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish}

    def _usage(self, num_events: int, *, lost: int | None = None) -> dict[str, Any]:
        plan, num_prompt = self._plan, self._plan.prompt_tokens
        num_output = plan.tokens_through(num_events - 1)
        if lost is not None:
            num_output -= plan.tokens_through(lost) - plan.tokens_through(lost - 1)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": self._plan.cached_tokens},
        }


FAILURE = {
    "error": {
        "message": "a fault as ordered",
        "type": "server_error",
        "param": None,
        "code": "ordered_fault",
    }
}
