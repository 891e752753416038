"""An answer in the form of Anthropic's Messages API, whole or as events:

    message_start                           with the first output, when it is known what was cached
    content_block_start · deltas · content_block_stop      of each thought, text and call
    message_delta · message_stop            why it ended, and the usage

Items are blocks: what chat completions and responses have as thoughts, messages and calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from pydantic_core import from_json

from penstock.engine.chat_formats import OutputItem, Piece
from penstock.engine.request import FinishReason
from penstock.gateway.api.anthropic.conversation import signature_of
from penstock.gateway.api.anthropic.schema import MessagesRequest
from penstock.gateway.errors import failure_of
from penstock.gateway.generation.branch import Delta
from penstock.gateway.generation.generation import (
    DeltaSource,
    Output,
    Usage,
    collected,
    penstock_object,
)
from penstock.gateway.generation.request_planner import RequestPlanner
from penstock.gateway.http.event_stream import EventStream, ResumedEventStream, named
from penstock.gateway.http.raw_writer import RawWriter, pump
from penstock.gateway.storage.sealed_text import sealed
from penstock.gateway.telemetry.request_record import told

_PING = named("ping", b'{"type": "ping"}')
_TEXT, _THOUGHT = "message", "reasoning"  # kinds of items; all others are calls
# Kind of item → type of its deltas, and their field.
_DELTAS = {_TEXT: ("text_delta", "text"), _THOUGHT: ("thinking_delta", "thinking")}
_CALL_DELTA = ("input_json_delta", "partial_json")
_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.GRAMMAR: "refusal",  # its grammar let it neither go on nor end
    FinishReason.REPETITION: "end_turn",
    FinishReason.ABORT: "end_turn",
}
_ANY_TEXT = "\0"  # stands for a text


class MessageAnswer:
    """One answer; to be read once, whole or as a stream.

    Args:
        marks_cache: see `conversation.marks_cache`.
    """

    def __init__(
        self,
        asked: MessagesRequest,
        source: DeltaSource,
        planner: RequestPlanner,
        *,
        model: str,
        marks_cache: bool,
        block_size: int,
        max_model_len: int,
    ) -> None:
        self._asked = asked
        self._source = source
        self._planner = planner
        self._marks_cache = marks_cache
        self._block_size = block_size
        self._max_model_len = max_model_len
        _, _, self._number = source.request.request_id.partition("_")
        self._head = {
            "id": f"msg_{self._number}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._is_begun = False
        self._block = -1  # the newest one's index
        self._kind = ""  # of the item that is open; empty: none is, or it is not shown
        self._thought: list[str] = []  # of the open block
        self._num_calls = 0
        self._frame = (b"", b"")  # around the text of the open block's deltas
        self._finish_reason = FinishReason.ABORT

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        [[output]] = await collected([self._source])
        self._finish_reason = output.finish_reason
        content = self._content(output)
        ended = {
            "content": content,
            **await self._ending(),
            "usage": self._usage(),
            **self._diagnostics(),
        }
        return {**self._head, **ended, "penstock": self._penstock()}

    def event_stream(self, *, is_resumed: bool, ping_s: float) -> EventStream:
        """The answer as a response; `is_resumed`: another request has begun it."""
        kind = ResumedEventStream if is_resumed else EventStream
        return kind(self._write_to, ping_s=ping_s, on_error=_broken, ping=_PING)

    async def _write_to(self, out: RawWriter) -> None:
        with self._source as source:
            await pump(source, self._encoded, out)
        delta = await self._ending()
        ended = {
            "type": "message_delta",
            "delta": delta,
            "usage": self._usage(),
            "penstock": self._penstock(),
        }
        rest = [*self._begin_message(), *self._close(), _event(ended)]
        out.write(b"".join([*rest, _event({"type": "message_stop"})]))

    # -- events ------------------------------------------------------------------------------

    def _encoded(self, deltas: Sequence[Delta]) -> Sequence[bytes]:
        """What arrives together is one write."""
        events: list[bytes] = []
        for delta in deltas:
            if delta.finish_reason is not None:
                self._finish_reason = delta.finish_reason
            if delta.text and self._kind == _TEXT:  # nearly always
                events += (self._frame[0], orjson.dumps(delta.text), self._frame[1])
                continue
            for piece in delta.parts:
                events += self._begin_message()
                events += self._of_piece(piece)
        return (b"".join(events),) if events else ()

    def _begin_message(self) -> list[bytes]:
        if self._is_begun:
            return []
        self._is_begun = True
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
            **self._diagnostics(),
        }
        return [_event({"type": "message_start", "message": message})]

    def _of_piece(self, piece: Piece) -> list[bytes]:
        events: list[bytes] = []
        kind = piece.kind
        if piece.begins or (kind != self._kind and self._is_shown(kind)):
            events += self._close()
            if not self._is_shown(kind):
                return events
            events += self._open(piece)
        if not piece.text or not self._kind:
            return events
        if kind == _THOUGHT:
            self._thought.append(piece.text)
            if self._asked.seals_thoughts:
                return events
        return [*events, self._frame[0], orjson.dumps(piece.text), self._frame[1]]

    def _is_shown(self, kind: str) -> bool:
        return kind != _THOUGHT or self._asked.shows_thoughts

    def _open(self, piece: Piece) -> list[bytes]:
        self._block += 1
        self._kind = piece.kind
        self._thought = []
        kind, field = _DELTAS.get(piece.kind, _CALL_DELTA)
        delta = {"type": kind, field: _ANY_TEXT}
        start, end = _event(
            {"type": "content_block_delta", "index": self._block, "delta": delta}
        ).split(orjson.dumps(_ANY_TEXT))
        self._frame = start, end
        empty = OutputItem(piece.kind, "", piece.name)
        begun = {
            "type": "content_block_start",
            "index": self._block,
            "content_block": self._block_of(empty, signature=""),
        }
        return [_event(begun)]

    def _close(self) -> list[bytes]:
        if not self._kind:
            return []
        events: list[bytes] = []
        if self._kind == _THOUGHT:
            signature = self._signature("".join(self._thought))
            delta = {"type": "signature_delta", "signature": signature}
            signed = {"type": "content_block_delta", "index": self._block, "delta": delta}
            events.append(_event(signed))
        self._kind = ""
        return [*events, _event({"type": "content_block_stop", "index": self._block})]

    # -- parts of both forms -----------------------------------------------------------------

    def _content(self, output: Output) -> list[dict[str, Any]]:
        return [
            self._block_of(item, signature=self._signature(item.text))
            for item in output.items
            if self._is_shown(item.kind)
        ]

    def _block_of(self, item: OutputItem, *, signature: str) -> dict[str, Any]:
        if item.kind == _TEXT:
            return {"type": "text", "text": item.text}
        if item.kind == _THOUGHT:
            shown = "" if self._asked.seals_thoughts else item.text
            return {"type": "thinking", "thinking": shown, "signature": signature}
        call_id = f"toolu_{self._number}_{self._num_calls}"
        self._num_calls += 1
        return {
            "type": "tool_use",
            "id": call_id,
            "name": item.name,
            "input": _parsed(item.text),
        }

    def _signature(self, thought: str) -> str:
        return sealed(thought) if self._asked.seals_thoughts else signature_of(thought)

    async def _ending(self) -> dict[str, Any]:
        """Why it ended."""
        await self._source.settle()
        reason, stop = self._finish_reason, None
        ended = _STOP_REASONS[reason]
        if reason is FinishReason.STOP:
            stop = await self._planner.stop_found(self._source)
            if stop is not None:
                ended = "stop_sequence"
            elif self._num_calls:
                ended = "tool_use"
        elif reason is FinishReason.LENGTH:
            used = self._source.usage
            is_full = used.prompt_tokens + used.output_tokens >= self._max_model_len
            if is_full and used.output_tokens < self._asked.max_tokens:
                ended = "model_context_window_exceeded"
        return {"stop_reason": ended, "stop_sequence": stop}

    def _penstock(self) -> dict[str, Any]:
        """penstock's own part of the answer."""
        return penstock_object(self._source.usage, self._source.cache)

    def _diagnostics(self) -> dict[str, Any]:
        """Why no more was found in the cache, in Anthropic's words."""
        asked = self._asked.diagnostics
        if asked is None:
            return {}
        return {"diagnostics": diagnostics_object(self._source.cache)}

    def _usage(self) -> dict[str, Any]:
        used = self._source.usage
        return usage_object(used, marks_cache=self._marks_cache, block_size=self._block_size)


# Of `penstock.cache`: reason → Anthropic's. What it has no word for is `unavailable`.
_MISSES = {
    "adapter": "model_changed",
    "tools": "tools_changed",
    "system": "system_changed",
    "date": "system_changed",
    "messages": "messages_changed",
    "not_found": "previous_message_not_found",
}


def diagnostics_object(cache: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`diagnostics` of a message; None: nothing was missed, or there was nothing to compare."""
    if cache is None or cache["reason"] == "hit":
        return None
    kind = _MISSES.get(cache["reason"], "unavailable")
    miss: dict[str, Any] = {"type": kind}
    if kind.endswith("_changed"):
        miss["cache_missed_input_tokens"] = cache["missed_tokens"]
    return {"cache_miss_reason": miss}


def usage_object(used: Usage, *, marks_cache: bool, block_size: int) -> dict[str, Any]:
    """Each token of the prompt is counted once: read from the cache, new in it, or neither. New are
    the whole blocks that were computed, where the request says what to cache."""
    num_whole = (used.prompt_tokens - 1) // block_size * block_size
    num_new = max(num_whole - used.cached_tokens, 0) if marks_cache else 0
    num_thought = used.reasoning_tokens
    details = {"output_tokens_details": {"thinking_tokens": num_thought}} if num_thought else {}
    return {
        "input_tokens": used.prompt_tokens - used.cached_tokens - num_new,
        "cache_creation_input_tokens": num_new,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.output_tokens,
        **details,
    }


def _parsed(arguments: str) -> dict[str, Any]:
    """The input of a call; of one that was cut off, what is whole."""
    try:
        value = from_json(arguments, allow_partial=True) if arguments else {}
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


def _event(event: dict[str, Any]) -> bytes:
    return named(event["type"], orjson.dumps(event))


def _broken(error: Exception) -> bytes:
    """The last event of a stream that failed."""
    return named("error", orjson.dumps(told(failure_of(error))))
