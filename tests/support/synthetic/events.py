"""An answer as the Responses API tells it: numbered events, over SSE or a WebSocket.

    0 created · 1 in_progress · 2 output_item.added · 3 content_part.added
    4… output_text.delta
    output_text.done · content_part.done · output_item.done · completed | incomplete | failed

Written apart from the gateway's, so that each can tell on the other.
"""

from __future__ import annotations

from typing import Any

import orjson

from .plan import StreamPlan

_NUM_HEAD = 4
_DELTA = "response.output_text.delta"


class Events:
    """The frames of one answer.

    Args:
        is_socket: they are messages of a WebSocket; otherwise blocks of an event stream.
        stream_id: the lane that each message of a WebSocket names, if any.
    """

    def __init__(
        self, plan: StreamPlan, model: str, *, is_socket: bool = False, stream_id: str | None = None
    ) -> None:
        self._plan = plan
        self._model = model
        self._is_socket = is_socket
        self._lane = {} if stream_id is None else {"stream_id": stream_id}
        self.response_id = plan.response_id()
        self._item_id = "msg_" + self.response_id.removeprefix("resp_")
        sample = self._frame(self._text_event(_DELTA, 987654321, delta="\0", logprobs=[]))
        self._before, _, rest = sample.partition(b"987654321")
        self._between, _, self._after = rest.partition(b"\\u0000")
        self.malformed = b'{"type": ' if is_socket else b'event: x\ndata: {"type": \n\n'

    def head(self, after: int = -1) -> list[bytes]:
        """What comes before any token, as far as it is numbered above `after`."""
        response = self.response("in_progress", 0)
        item = self._item("in_progress", [])
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        events: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": response}),
            ("response.in_progress", {"response": response}),
            ("response.output_item.added", {"output_index": 0, "item": item}),
            ("response.content_part.added", {**place, "part": _part("")}),
        ]
        return self._frames(events, 0, after)

    def first_event(self, after: int = -1) -> int:
        """The first delta numbered above `after`."""
        return max(0, after + 1 - _NUM_HEAD)

    def delta(self, event: int, *, lost: int | None = None) -> bytes:
        """
        Args:
            lost: an event before that never came, and was not numbered either.
        """
        number = b"%d" % _number(event, lost)
        text = self._plan.text(event).encode()
        return self._before + number + self._between + text + self._after

    def end(
        self, num_events: int, status: str, *, after: int = -1, lost: int | None = None
    ) -> list[bytes]:
        """What follows the last delta, as far as it is numbered above `after`; the last frame is
        terminal."""
        part = _part(self._plan.text_through(num_events))
        item = self._item("completed" if status == "completed" else "incomplete", [part])
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        terminal = "response.completed" if status == "completed" else "response.incomplete"
        events: list[tuple[str, dict[str, Any]]] = [
            ("response.output_text.done", {**place, "text": part["text"], "logprobs": []}),
            ("response.content_part.done", {**place, "part": part}),
            ("response.output_item.done", {"output_index": 0, "item": item}),
            (terminal, {"response": self.response(status, num_events)}),
        ]
        return self._frames(events, _number(num_events, lost), after)

    def failure(self, num_events: int, *, lost: int | None = None) -> list[bytes]:
        response = self.response("failed", num_events)
        events = [("response.failed", {"response": response})]
        return self._frames(events, _number(num_events, lost), -1)

    def whole(self, num_events: int, status: str) -> dict[str, Any]:
        return self.response(status, num_events)

    def response(self, status: str, num_events: int) -> dict[str, Any]:
        """The Response object after so many deltas."""
        is_open, text = status == "in_progress", self._plan.text_through(num_events)
        item_status = "completed" if status == "completed" else "incomplete"
        error = {"code": "server_error", "message": "a fault as ordered"}
        why = {"reason": "max_output_tokens"}
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._plan.created_s,
            "model": self._model,
            "status": status,
            "output": [] if is_open else [self._item(item_status, [_part(text)])],
            "usage": None if is_open else self._usage(num_events),
            "error": error if status == "failed" else None,
            "incomplete_details": why if status == "incomplete" else None,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }

    def _frames(
        self, events: list[tuple[str, dict[str, Any]]], first_number: int, after: int
    ) -> list[bytes]:
        return [
            self._frame({"type": kind, "sequence_number": number, **values})
            for number, (kind, values) in enumerate(events, first_number)
            if number > after
        ]

    def _text_event(self, kind: str, number: int, **values: Any) -> dict[str, Any]:
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        return {"type": kind, "sequence_number": number, **place, **values}

    def _frame(self, event: dict[str, Any]) -> bytes:
        if self._is_socket:
            return orjson.dumps({**event, **self._lane})
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), orjson.dumps(event))

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _usage(self, num_events: int) -> dict[str, Any]:
        num_output, num_prompt = self._plan.tokens_through(num_events - 1), self._plan.prompt_tokens
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": self._plan.cached_tokens},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_output,
        }


def _number(event: int, lost: int | None) -> int:
    return _NUM_HEAD + event - (lost is not None)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
