"""The events of one response of the Responses API: one source for SSE, WebSocket and plain JSON.

    created · in_progress · output_item.added · content_part.added
    output_text.delta …
    output_text.done · content_part.done · output_item.done
    completed | incomplete | failed

Numbered from 0 without gaps; exactly one terminal event. A response that only prepares its prompt
has no item. `penstock.*` events stand between the others, without a number. Not known here: where
tokens come from, and how events travel.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from penstock.engine.request import FinishReason, Notice, SamplingParams
from penstock.gateway.errors import Failure
from penstock.gateway.generation import Usage
from penstock.gateway.schemas import ResponsesRequest

Event = dict[str, Any]

# Finish reason → (status of the response, terminal event, why it is incomplete).
_ENDINGS: dict[FinishReason, tuple[str, str, str | None]] = {
    FinishReason.STOP: ("completed", "response.completed", None),
    FinishReason.LENGTH: ("incomplete", "response.incomplete", "max_output_tokens"),
    FinishReason.ABORT: ("cancelled", "response.incomplete", None),
}


class ResponseEvents:
    """Makes the events of one response, in order.

    Args:
        model: the name to answer under.
        params: the sampling parameters in force, echoed in the Response object.
    """

    def __init__(
        self, response_id: str, request: ResponsesRequest, *, model: str, params: SamplingParams
    ) -> None:
        self.response_id = response_id
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._next_number = 0
        self._pieces: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._is_started = False
        self._generates = request.generates
        self._echo = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": request.instructions,
            "metadata": request.metadata,
            "previous_response_id": request.previous_response_id,
            "max_output_tokens": request.max_output_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": params.logprobs or 0,
            "store": request.store,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            "background": False,
            "service_tier": "default",
        }

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def started(self) -> list[Event]:
        self._is_started = True
        response = self._response("in_progress", output=[])
        events = [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]
        if not self._generates:
            return events
        return [
            *events,
            self._event(
                "response.output_item.added",
                output_index=0,
                item=self._item("in_progress", content=[]),
            ),
            self._event(
                "response.content_part.added",
                item_id=self._item_id,
                output_index=0,
                content_index=0,
                part=_part("", []),
            ),
        ]

    def delta(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Event:
        self._pieces.append(text)
        self._logprobs.extend(logprobs)
        return self._text_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def notice(self, notice: Notice) -> Event:
        """What happened to the response meanwhile: no event of OpenAI's, so without a number."""
        return {"type": f"penstock.{notice.value}", "response_id": self.response_id}

    def ended(self, reason: FinishReason, usage: Usage) -> list[Event]:
        """The events after the last delta; the last one is terminal."""
        if not self._generates and reason is FinishReason.LENGTH:
            reason = FinishReason.STOP  # all that was asked for is done
        status, terminal, why = _ENDINGS[reason]
        if not self._generates:
            return [self._event(terminal, response=self._response(status, output=[], usage=usage))]
        part = _part(self.text, self._logprobs)
        item = self._item("completed" if status == "completed" else "incomplete", content=[part])
        details = None if why is None else {"reason": why}
        response = self._response(status, output=[item], usage=usage, incomplete_details=details)
        return [
            self._text_event(
                "response.output_text.done", text=part["text"], logprobs=self._logprobs
            ),
            self._event(
                "response.content_part.done",
                item_id=self._item_id,
                output_index=0,
                content_index=0,
                part=part,
            ),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(terminal, response=response),
        ]

    def failed(self, failure: Failure, usage: Usage) -> list[Event]:
        """The terminal event of a response that broke off, with what there is of it."""
        events = [] if self._is_started else self.started()
        code = "server_error" if failure.status >= 500 else "invalid_prompt"
        error = {"code": code, "message": failure.message}
        part = _part(self.text, self._logprobs)
        output = [self._item("incomplete", content=[part])] if self._generates else []
        response = self._response("failed", output=output, usage=usage, error=error)
        return [*events, self._event("response.failed", response=response)]

    def _event(self, kind: str, **values: Any) -> Event:
        number = self._next_number
        self._next_number += 1
        return {"type": kind, "sequence_number": number, **values}

    def _text_event(self, kind: str, **values: Any) -> Event:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **values)

    def _item(self, status: str, *, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _response(
        self,
        status: str,
        *,
        output: list[dict[str, Any]],
        usage: Usage | None = None,
        error: dict[str, Any] | None = None,
        incomplete_details: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            **self._echo,
            "status": status,
            "output": output,
            "usage": None if usage is None else _usage_object(usage),
            "error": error,
            "incomplete_details": incomplete_details,
            "completed_at": int(time.time()) if status == "completed" else None,
        }


def _part(text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _usage_object(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
