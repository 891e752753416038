"""The events of a response, made from its log: the same for every reader and transport.

    created · (queued) · in_progress · output_item.added · content_part.added
    output_text.delta …
    output_text.done · content_part.done · output_item.done
    completed | incomplete | failed

Events are numbered from 0 without gaps, and exactly one is terminal. A response that only prepares
its prompt has no item. Nothing here depends on time or place: a replay produces the same bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
import orjson

from penstock.engine.request import FinishReason
from penstock.gateway.storage.response_log.log import LogNotice, ResponseLog
from penstock.gateway.storage.response_log.record import (
    NUM_CLOSING_EVENTS,
    DeltaEntry,
    EndEntry,
    Entry,
    ResponseHeader,
)

_Object = dict[str, Any]

# Finish reason → (status of the response, terminal event, why it is incomplete).
_ENDINGS: dict[FinishReason, tuple[str, str, str | None]] = {
    FinishReason.STOP: ("completed", "response.completed", None),
    FinishReason.LENGTH: ("incomplete", "response.incomplete", "max_output_tokens"),
    FinishReason.ABORT: ("cancelled", "response.incomplete", None),
}


class Event(msgspec.Struct, gc=False):
    """One event: its type, and the whole event as JSON."""

    type: str
    json: bytes


class EventWriter:
    """Makes the events of one response for one reader.

    Args:
        notices: kinds of `penstock.*` events that the reader asked for.
        after: only events with a higher number.
    """

    __slots__ = ("_after", "_delta_start", "_header", "_notices")

    def __init__(
        self, header: ResponseHeader, *, notices: Collection[str] = (), after: int = -1
    ) -> None:
        self._header = header
        self._notices = notices
        self._after = after
        self._delta_start = (
            b'{"type":"response.output_text.delta","item_id":'
            + orjson.dumps(header.item_id)
            + b',"output_index":0,"content_index":0,"sequence_number":'
        )

    def opening(self) -> list[Event]:
        """The events before the first entry."""
        return _numbered(_opening(self._header), first=0, after=self._after)

    def of(self, entries: Sequence[Entry | LogNotice], log: ResponseLog) -> list[Event]:
        """The events of some of a log's entries."""
        found: list[Event] = []
        for entry in entries:
            if isinstance(entry, DeltaEntry):
                found.append(self._delta(entry))
            elif isinstance(entry, EndEntry):
                closing = _closing(log, entry)
                found += _numbered(closing, first=entry.number, after=self._after)
            elif entry.kind in self._notices:
                found.append(self._notice(entry))
        return found

    def _delta(self, entry: DeltaEntry) -> Event:
        # Formatted by hand, for speed: every token passes here.
        return Event(
            "response.output_text.delta",
            b'%b%d,"delta":%b,"logprobs":%b}'
            % (
                self._delta_start,
                entry.number,
                orjson.dumps(entry.text),
                orjson.dumps(entry.logprobs) if entry.logprobs else b"[]",
            ),
        )

    def _notice(self, notice: LogNotice) -> Event:
        kind = f"penstock.{notice.kind}"
        response_id = self._header.response_id
        return Event(
            kind, orjson.dumps({"type": kind, "response_id": response_id, **notice.values})
        )


def num_closing_events(header: ResponseHeader, reason: FinishReason | None) -> int:
    """How many events end a response for this reason; None for a failure."""
    return NUM_CLOSING_EVENTS if header.generates and reason is not None else 1


def response_object(log: ResponseLog, end: EndEntry | None = None) -> _Object:
    """The Response object as it is now, or as it will be once `end` is appended."""
    end = end or log.end
    if end is not None:
        return _ended(log, end)
    status = "queued" if log.header.is_background and not log.entries else "in_progress"
    return _response(log.header, status, output=_output(log, status) if log.entries else [])


def _numbered(events: Sequence[tuple[str, _Object]], *, first: int, after: int) -> list[Event]:
    return [
        Event(kind, orjson.dumps({"type": kind, "sequence_number": number, **values}))
        for number, (kind, values) in enumerate(events, first)
        if number > after
    ]


def _opening(header: ResponseHeader) -> list[tuple[str, _Object]]:
    response = _response(header, "in_progress", output=[])
    events: list[tuple[str, _Object]] = [("response.created", {"response": response})]
    if header.is_background:
        queued = {"response": {**response, "status": "queued"}}
        events = [("response.created", queued), ("response.queued", queued)]
    events.append(("response.in_progress", {"response": response}))
    if header.generates:
        item = _item(header, "in_progress", content=[])
        events += [
            ("response.output_item.added", {"output_index": 0, "item": item}),
            ("response.content_part.added", {**_part_location(header), "part": _part("", [])}),
        ]
    assert len(events) == header.num_opening_events
    return events


def _closing(log: ResponseLog, end: EndEntry) -> list[tuple[str, _Object]]:
    header, response = log.header, _ended(log, end)
    if end.reason is None:
        return [("response.failed", {"response": response})]
    _, terminal, _ = _ENDINGS[_reason(header, end.reason)]
    if not header.generates:
        return [(terminal, {"response": response})]
    [item] = response["output"]
    [part] = item["content"]
    text = {"text": part["text"], "logprobs": part["logprobs"]}
    return [
        ("response.output_text.done", {**_part_location(header), **text}),
        ("response.content_part.done", {**_part_location(header), "part": part}),
        ("response.output_item.done", {"output_index": 0, "item": item}),
        (terminal, {"response": response}),
    ]


def _ended(log: ResponseLog, end: EndEntry) -> _Object:
    if end.reason is None:
        assert end.error is not None
        code, message = end.error
        return _response(
            log.header,
            "failed",
            output=_output(log, "incomplete"),
            end=end,
            error={"code": code, "message": message},
        )
    status, _, why = _ENDINGS[_reason(log.header, end.reason)]
    return _response(
        log.header,
        status,
        output=_output(log, "completed" if status == "completed" else "incomplete"),
        end=end,
        incomplete_details=None if why is None else {"reason": why},
    )


def _reason(header: ResponseHeader, reason: FinishReason) -> FinishReason:
    if not header.generates and reason is FinishReason.LENGTH:
        return FinishReason.STOP  # only the prompt was to be prepared: it is complete
    return reason


def _output(log: ResponseLog, status: str) -> list[_Object]:
    if not log.header.generates:
        return []
    logprobs = [
        token for entry in log.entries if isinstance(entry, DeltaEntry) for token in entry.logprobs
    ]
    return [_item(log.header, status, content=[_part(log.text, logprobs)])]


def _part_location(header: ResponseHeader) -> _Object:
    return {"item_id": header.item_id, "output_index": 0, "content_index": 0}


def _item(header: ResponseHeader, status: str, *, content: list[_Object]) -> _Object:
    return {
        "id": header.item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def _part(text: str, logprobs: Sequence[Mapping[str, Any]]) -> _Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _response(
    header: ResponseHeader,
    status: str,
    *,
    output: list[_Object],
    end: EndEntry | None = None,
    error: _Object | None = None,
    incomplete_details: _Object | None = None,
) -> _Object:
    return {
        "id": header.response_id,
        "object": "response",
        "created_at": header.created_at,
        **header.echo,
        "status": status,
        "output": output,
        "usage": None if end is None else _usage(*end.usage),
        "error": error,
        "incomplete_details": incomplete_details,
        "completed_at": end.ended_at if end is not None and status == "completed" else None,
    }


def _usage(input_tokens: int, cached_tokens: int, output_tokens: int) -> _Object:
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }
