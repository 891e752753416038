"""Checks every stream as its events come in, and fills its `StreamRecord`.

    chat, completions   chunks with text, the finish chunk, a usage chunk, `[DONE]`
    responses           events numbered from 0, one terminal event that repeats the text

A stream with a fault is read as far as it goes, since the first fault is seldom the only one.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections.abc import Callable
from typing import Any

import orjson

from penstock.load.client.records import Endpoint, Fault, StreamRecord

_MAX_DETAIL_CHARS = 300
_DONE = b"[DONE]"
_ENDINGS = frozenset({"response.completed", "response.incomplete", "response.failed"})
_REASONING_FIELDS = ("reasoning_content", "reasoning")  # servers differ


class StreamCheck(abc.ABC):
    """Fills the record of one stream.

    `is_ended`: the terminal event came, or nothing more can; later events are faults. `heard_s`:
    when the last event came; before the first event, when the request was sent.
    """

    def __init__(self, record: StreamRecord) -> None:
        self.record = record
        self.is_ended = False
        self.heard_s = record.sent_s
        self._pieces: list[str] = []

    def take(self, data: bytes, now_s: float) -> None:
        """Check an event, as received."""
        if data == _DONE and not self.is_ended:
            self.heard_s = now_s
            self._take_done(now_s)
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            self._take_junk(f"{error}: {_excerpt(data)}", now_s)
        else:
            self.take_event(event, now_s)

    def take_event(self, event: dict[str, Any], now_s: float) -> None:
        """Check a parsed event."""
        if self.is_ended:
            self._take_junk(_excerpt(orjson.dumps(event)), now_s)
            return
        self.heard_s = now_s
        try:
            self._take(event, now_s)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            self._take_junk(f"{error!r} in {_excerpt(orjson.dumps(event))}", now_s)

    def take_stray(self, data: bytes, now_s: float) -> None:
        """Note an event that does not say which of several streams it belongs to."""
        self._take_junk(f"an event of no stream: {_excerpt(data)}", now_s)

    def fail(self, fault: Fault, detail: str, now_s: float) -> None:
        """End the stream with a fault that is not an event."""
        self.record.fault(fault, detail)
        self._end(now_s)

    def close(self, now_s: float) -> None:
        """End the stream: no more events will come."""
        if not self.is_ended:
            self.fail(Fault.CUT, "the connection ended without a terminal event", now_s)
        self.settle()

    def settle(self) -> None:
        """Put what was collected during the stream into the record."""
        self.record.text = "".join(self._pieces)

    @abc.abstractmethod
    def _take(self, event: dict[str, Any], now_s: float) -> None:
        """An event before the end; may raise what an unexpected shape raises."""

    @abc.abstractmethod
    def _take_done(self, now_s: float) -> None:
        """`[DONE]`."""

    def _take_junk(self, detail: str, now_s: float) -> None:
        if self.is_ended:  # does not count as heard, or a stream might never end
            self.record.fault(Fault.AFTER_END, detail)
        else:
            self.heard_s = now_s
            self.record.fault(Fault.MALFORMED, detail)

    def _end(self, now_s: float) -> None:
        self.is_ended = True
        self.record.ended_s = self.record.ended_s or now_s

    def _add_text(self, text: str, now_s: float) -> None:
        self.record.event_times_s.append(now_s)
        self._pieces.append(text)

    def _note_usage(self, usage: dict[str, Any], output: str, prompt: str) -> None:
        """The counts of a usage object, under the endpoint's names."""
        record, details = self.record, usage.get(f"{prompt}_details") or {}
        record.output_tokens = _count_of(usage.get(output))
        record.prompt_tokens = _count_of(usage.get(prompt))
        record.cached_tokens = _count_of(details.get("cached_tokens"))

    def _compare(self, num_seen: int, num_wanted: int, *, wanted_by: str) -> None:
        """Note lost or extra tokens; a negative count is unknown."""
        if min(num_seen, num_wanted) < 0 or num_seen == num_wanted:
            return
        fault = Fault.LOST_TOKENS if num_seen < num_wanted else Fault.EXTRA_TOKENS
        self.record.fault(fault, f"{num_seen} tokens, and {num_wanted} {wanted_by}")


class ChunkCheck(StreamCheck):
    """Chat completions and completions with one choice.

    Tokens whose text is still incomplete (half a character) count into the next event with text.
    """

    def __init__(self, record: StreamRecord) -> None:
        super().__init__(record)
        self._usage: dict[str, Any] = {}  # the latest
        self._num_seen = -1  # by the running count, in the chunks of the choice
        self._num_timed = 0  # of these, in events with text
        self._is_counted = True  # every event with text said how many tokens there are
        self._has_failed = False

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        error = event.get("error")
        if error:
            self.record.fault(Fault.FAILED, _message_of(error))
            self.record.ended_s = self.record.ended_s or now_s
            self._has_failed = True
            return
        if not self.record.response_id:
            self.record.response_id = event.get("id") or ""
        choices = event["choices"]
        usage = event.get("usage")
        if usage:
            self._usage = usage
            if choices:
                self._count(usage["completion_tokens"])
        for choice in choices:
            text = _text_of(choice)
            if text:
                if self.record.finish_reason:
                    self.record.fault(Fault.AFTER_END, f"text after the finish chunk: {text!r}")
                self._add_text(text, now_s)
                self._time_tokens(is_counted=bool(usage))
            self.record.finish_reason = choice.get("finish_reason") or self.record.finish_reason

    def _count(self, num_tokens: int) -> None:
        if num_tokens < self._num_seen:
            self.record.fault(
                Fault.MALFORMED, f"the count of tokens fell from {self._num_seen} to {num_tokens}"
            )
        self._num_seen = num_tokens

    def _time_tokens(self, *, is_counted: bool) -> None:
        if is_counted and self._is_counted:
            self.record.event_tokens.append(self._num_seen - self._num_timed)
            self._num_timed = self._num_seen
        else:
            self._is_counted = False
            self.record.event_tokens.clear()

    def _take_done(self, now_s: float) -> None:
        self._end(now_s)
        if self._has_failed:
            return
        if not self.record.finish_reason:
            self.record.fault(Fault.MALFORMED, "[DONE] came before a finish chunk")
        self._check_tokens()

    def _check_tokens(self) -> None:
        self.settle()
        record = self.record
        self._compare(self._num_seen, record.output_tokens, wanted_by="in the usage")
        self._compare(record.output_tokens, record.expected_tokens, wanted_by="asked for")
        # An event with text has at least one token.
        most = record.output_tokens if record.output_tokens >= 0 else record.expected_tokens
        if 0 <= most < len(record.event_times_s):
            record.fault(
                Fault.EXTRA_TOKENS, f"{len(record.event_times_s)} events with text, {most} tokens"
            )

    def settle(self) -> None:
        super().settle()
        self._note_usage(self._usage, "completion_tokens", "prompt_tokens")


class ResponseCheck(StreamCheck):
    """Responses, over SSE and WebSocket."""

    def __init__(self, record: StreamRecord) -> None:
        super().__init__(record)
        self._next_number = 0
        self._part_begin = 0  # of the current content part, in the pieces

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        kind = event["type"]
        if kind == "error":
            self._take_error(event, now_s)
            return
        if not kind.startswith("penstock."):  # events of our own have no number
            number, expected = event["sequence_number"], self._next_number
            if number != expected:
                fault = Fault.GAP if number > expected else Fault.REPEAT
                self.record.fault(fault, f"number {number} came for {expected}")
            self._next_number = max(expected, number + 1)
        if kind == "response.output_text.delta":
            if event["delta"]:
                self._add_text(event["delta"], now_s)
        elif kind == "response.output_text.done":
            self._compare_text("".join(self._pieces[self._part_begin :]), event["text"], "done")
            self._part_begin = len(self._pieces)
        elif kind == "response.created":
            self.record.response_id = event["response"]["id"]
        elif kind in _ENDINGS:
            self._end(now_s)
            self._take_ending(kind, event["response"])

    def _take_error(self, event: dict[str, Any], now_s: float) -> None:
        # This is how a WebSocket request is refused; then the event has a status.
        status = event.get("status")
        is_refusal = self._next_number == 0 and status is not None
        if is_refusal:
            self.record.status = int(event["status"])
        fault = Fault.REFUSED if is_refusal else Fault.FAILED
        self.fail(fault, _message_of(event.get("error") or event), now_s)

    def _take_ending(self, kind: str, response: dict[str, Any]) -> None:
        record = self.record
        why = response.get("incomplete_details") or {}
        record.finish_reason = why.get("reason") or response["status"]
        self._note_usage(response.get("usage") or {}, "output_tokens", "input_tokens")
        if kind == "response.failed":
            record.fault(Fault.FAILED, _message_of(response.get("error") or kind))
            return
        self._compare(record.output_tokens, record.expected_tokens, wanted_by="asked for")
        messages = [item for item in response["output"] if item["type"] == "message"]
        parts = [part for item in messages for part in item["content"]]
        stated = "".join(part["text"] for part in parts if part["type"] == "output_text")
        self._compare_text("".join(self._pieces), stated, kind)

    def _compare_text(self, seen: str, stated: str, where: str) -> None:
        if seen != stated:
            self.record.fault(
                Fault.TEXT_DIFFERS,
                f"{len(seen)} characters in the deltas, other {len(stated)} in {where}",
            )

    def _take_done(self, now_s: float) -> None:
        self._take_junk("[DONE] is no event of the Responses API", now_s)


def check_of(endpoint: Endpoint, record: StreamRecord) -> StreamCheck:
    """The check for streams of an endpoint."""
    return ResponseCheck(record) if endpoint == "responses" else ChunkCheck(record)


def refusal_of(body: bytes) -> str:
    """The error message in a refused request's body, or the body's first words."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _excerpt(body)
    error = parsed.get("error") if isinstance(parsed, dict) else None
    return _message_of(error) if error else _excerpt(body)


def _text_of(choice: dict[str, Any]) -> str:
    delta = choice.get("delta")
    if delta is None:
        return choice["text"] or ""
    text = delta.get("content")
    if not text:
        text = next((delta[field] for field in _REASONING_FIELDS if delta.get(field)), "")
    return str(text)


def _message_of(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:_MAX_DETAIL_CHARS]


def _count_of(value: Any) -> int:
    return value if isinstance(value, int) else -1


def _excerpt(data: bytes) -> str:
    return data[:_MAX_DETAIL_CHARS].decode(errors="replace")


class StallTimer:
    """Calls `on_stall` once, when a stream has had no event for `stall_s`; the check knows when
    the last event came."""

    def __init__(self, check: StreamCheck, *, stall_s: float, on_stall: Callable[[], None]) -> None:
        self._check = check
        self._stall_s = stall_s
        self._on_stall = on_stall
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(stall_s, self._look)

    def cancel(self) -> None:
        self._handle.cancel()

    def _look(self) -> None:
        left_s = self._check.heard_s + self._stall_s - time.perf_counter()
        if left_s > 0:
            self._handle = self._loop.call_later(left_s, self._look)
        else:
            self._on_stall()
