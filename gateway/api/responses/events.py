"""The events of a response, made from its log: the same for every reader and transport.

    created · (queued) · in_progress
    output_item.added … deltas … output_item.done      of each item; see `item_kinds`
    (steer.accepted)                                   wherever it arrived
    completed | incomplete | failed · (steer.pending | steer.failed)

Events are numbered from 0 without gaps, and exactly one is terminal. The events around an item's
deltas follow from the deltas, except that a response whose only item is a message begins it before
the first one. A response that only prepares its prompt has no item. Nothing here depends on time or
place: a replay produces the same bytes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec
import orjson

from penstock.engine.request import FinishReason
from penstock.gateway.api.responses.item_kinds import (
    FUNCTION_CALL,
    MESSAGE,
    ItemContent,
    ItemKind,
    item_number,
    kind_of,
)
from penstock.gateway.api.responses.item_kinds import JsonObject as _Object
from penstock.gateway.api.responses.logged_generation import usage_of
from penstock.gateway.api.shared.items import CALLS
from penstock.gateway.generation.generation import Usage, penstock_object
from penstock.gateway.storage.conversations.ids import successor_id
from penstock.gateway.storage.response_log.cursor import LogNotice
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.record import (
    INTERRUPTED,
    DeltaEntry,
    EndEntry,
    Entry,
    LogHeader,
    Steered,
    SteerEntry,
)

# Finish reason → (status of the response, terminal event, why it is incomplete).
_ENDINGS: dict[FinishReason, tuple[str, str, str | None]] = {
    FinishReason.STOP: ("completed", "response.completed", None),
    FinishReason.LENGTH: ("incomplete", "response.incomplete", "max_output_tokens"),
    FinishReason.GRAMMAR: ("incomplete", "response.incomplete", "grammar"),
    FinishReason.REPETITION: ("incomplete", "response.incomplete", "repetition"),
    FinishReason.ABORT: ("cancelled", "response.incomplete", None),
    INTERRUPTED: ("incomplete", "response.incomplete", "interrupted"),
}
# Reason of `penstock.cache` → OpenAI's; and by the parameter that changed.
_CHANGED = {"adapter": "model_changed", "tools": "tools_changed"} | dict.fromkeys(
    ("template", "system", "date", "messages"), "input_changed"
)
_CHANGED_PARAMETERS = {
    "reasoning_effort": "reasoning_effort_changed",
    "enable_thinking": "reasoning_effort_changed",
    "verbosity": "verbosity_changed",
}
_STEERED = ("incomplete", "response.incomplete", "steered")
# In a Response object, and once in a stream: storing it failed, so its events are kept no longer.
NOT_RESUMABLE: _Object = {"resumable": False}
_ANY_DELTA = uuid.uuid4().hex.encode()  # stands for the number and the text of a delta event


class Event(msgspec.Struct, gc=False):
    """One event: its type, and the whole event as JSON."""

    type: str
    json: bytes


Payloads = Callable[[Sequence[Event]], Iterable[bytes]]


class EventWriter:
    """Makes the events of one response for one reader.

    Args:
        payloads: encodes events that arrive together, each by itself.
        notices: kinds of `penstock.*` events that the reader asked for.
        after: only events with a higher number.
    """

    __slots__ = (
        "_after",
        "_delta_end",
        "_delta_start",
        "_delta_type",
        "_frame",
        "_has_told",
        "_header",
        "_is_silent",
        "_log",
        "_notices",
        "_output_index",
        "_payloads",
    )

    def __init__(
        self,
        log: ResponseLog,
        payloads: Payloads,
        *,
        notices: Collection[str] = (),
        after: int = -1,
    ) -> None:
        self._log = log
        self._header = log.header
        self._payloads = payloads
        self._notices = notices
        self._after = after
        self._has_told = False  # that it cannot be resumed
        self._output_index = -1  # of the item whose delta events look like this:
        self._delta_type, self._delta_start, self._delta_end = "", b"", b""
        self._frame = b"", b""  # a payload around the number and the text of such an event
        self._is_silent = False

    def opening(self) -> Iterable[bytes]:
        """What is to be written before the first entry."""
        events = _numbered(_opening(self._header), first=0, after=self._after)
        return self._payloads(events) if events else ()

    def of(self, entries: Sequence[Entry | LogNotice]) -> Iterable[bytes]:
        """What is to be written for some of the log's entries."""
        events = self._events(entries)
        return self._payloads(events) if events else ()

    def of_next_delta(self, entry: Entry | LogNotice) -> bytes | None:
        """What is to be written for one more delta of the newest item, whose surroundings are
        known. None: it is something else, for `of`."""
        if (
            type(entry) is not DeltaEntry
            or entry.output_index != self._output_index
            or entry.logprobs
            or self._is_silent
            or not (self._log.replica.is_resumable or self._has_told)
        ):
            return None
        start, end = self._frame  # as `_delta`, without a call for each token
        return b"".join(
            (start, orjson.dumps(entry.number), b',"delta":', orjson.dumps(entry.text), end)
        )

    def _events(self, entries: Sequence[Entry | LogNotice]) -> list[Event]:
        """The events of some of the log's entries."""
        log = self._log
        found: list[Event] = []
        for entry in entries:
            if isinstance(entry, DeltaEntry):
                if entry.output_index != self._output_index:
                    found += self._begin_item(entry)
                found.append(self._delta_event(entry))
            elif isinstance(entry, SteerEntry):
                told = [("response.steer.accepted", {"steer": _steer(self._header, entry)})]
                found += _numbered(told, first=entry.number, after=self._after)
            elif isinstance(entry, EndEntry):
                closing = _closing(log, entry)
                found += _numbered(closing, first=entry.number, after=self._after)
            elif entry.kind in self._notices:
                found.append(self._notice(entry))
        if found and not (log.is_resumable or self._has_told):
            self._has_told = True
            found[0] = Event(found[0].type, _merged(found[0].json))
        return found

    def _begin_item(self, entry: DeltaEntry) -> list[Event]:
        """The events of an entry before its delta, which is the first that this reader gets of its
        item."""
        kind, index = kind_of(self._header, entry.kind), entry.output_index
        item = _item(self._header, index, (_begun(entry),), "in_progress")
        self._output_index, self._delta_type, self._delta_end = index, kind.delta, kind.delta_end
        self._is_silent = kind.is_silent
        begun = orjson.dumps({"type": kind.delta, **_place(kind, item, index)})
        self._delta_start = begun[:-1] + b',"sequence_number":'
        any_event = Event(kind.delta, self._delta_start + _ANY_DELTA + self._delta_end)
        start, end = b"".join(self._payloads([any_event])).split(_ANY_DELTA)
        self._frame = start, end
        if entry.num_events == 1:
            return []
        closed = []
        if index:
            closed_item = _output(self._log, "completed")[index - 1]
            closed = _closing_item(self._header, closed_item, index - 1)
        events = [*closed, *_opening_item(self._header, item, index)]
        return _numbered(events, first=entry.number, after=self._after)

    def _delta_event(self, entry: DeltaEntry) -> Event:
        start, end = self._delta_start, self._delta_end
        if self._is_silent:
            return Event(self._delta_type, b"%b%d}" % (start, entry.last_number))
        if entry.logprobs:
            end = b',"logprobs":%b}' % orjson.dumps(entry.logprobs)
        return Event(self._delta_type, _delta(start, entry.last_number, entry.text, end))

    def _notice(self, notice: LogNotice) -> Event:
        kind = f"penstock.{notice.kind}"
        response_id = self._header.response_id
        return Event(
            kind, orjson.dumps({"type": kind, "response_id": response_id, **notice.values})
        )


def _delta(start: bytes, number: int, text: str, end: bytes) -> bytes:
    """A delta event, or a payload with one, from what is the same in all of an item."""
    return b"".join((start, orjson.dumps(number), b',"delta":', orjson.dumps(text), end))


def _merged(event: bytes) -> bytes:
    """An event that also says that its response cannot be resumed. The last one says it in its
    Response object too."""
    return event[:-1] + b',"penstock":%b}' % orjson.dumps(NOT_RESUMABLE)


def num_closing_events(
    log: ResponseLog, reason: FinishReason | None, steered: Steered | None = None
) -> int:
    """How many events end a response for this reason; None for a failure."""
    newest = None if reason is None else log.open_item
    num = 1 if newest is None else log.header.item_events(newest[1]).closing + 1
    return num + (0 if steered is None or steered.status == "committed" else len(log.steers))


def failed_end(log: ResponseLog, message: str) -> EndEntry:
    """The end of a response that cannot go on, as of now."""
    return EndEntry(
        number=log.next_number,
        num_events=num_closing_events(log, None),
        reason=None,
        usage=(len(log.header.request.prompt_token_ids), 0, len(log.token_ids)),
        ended_at=int(time.time()),
        error=("server_error", message),
    )


def response_object(log: ResponseLog, end: EndEntry | None = None) -> _Object:
    """The Response object as it is now, or as it will be once `end` is appended."""
    end = end or log.end
    if end is not None:
        return _ended(log, end)
    status = "queued" if log.header.is_background and not log.entries else "in_progress"
    return _response(log, status, output=_output(log, status) if log.entries else [])


def _numbered(events: Sequence[tuple[str, _Object]], *, first: int, after: int) -> list[Event]:
    return [
        Event(kind, orjson.dumps({"type": kind, "sequence_number": number, **values}))
        for number, (kind, values) in enumerate(events, first)
        if number > after
    ]


def _opening(header: LogHeader) -> list[tuple[str, _Object]]:
    response = _new_response(header, "in_progress", output=[])
    events: list[tuple[str, _Object]] = [("response.created", {"response": response})]
    if header.is_background:
        queued = {"response": {**response, "status": "queued"}}
        events = [("response.created", queued), ("response.queued", queued)]
    events.append(("response.in_progress", {"response": response}))
    if header.begins_message:
        events += _opening_item(header, _item(header, 0, (), "in_progress"), 0)
    assert len(events) == header.num_opening_events
    return events


def _opening_item(header: LogHeader, item: _Object, output_index: int) -> list[tuple[str, _Object]]:
    """The events before an item's first delta.

    Args:
        item: without text.
    """
    kind = kind_of(header, item["type"])
    place = _place(kind, item, output_index)
    added = {"output_index": output_index, "item": {**item, **kind.begun}}
    parts = [(name, {**place, **fields(item)}) for name, fields in kind.opening.items()]
    return [("response.output_item.added", added), *parts]


def _closing_item(header: LogHeader, item: _Object, output_index: int) -> list[tuple[str, _Object]]:
    """The events after an item's last delta."""
    kind = kind_of(header, item["type"])
    place = _place(kind, item, output_index)
    parts = [(name, {**place, **fields(item)}) for name, fields in kind.closing.items()]
    return [*parts, ("response.output_item.done", {"output_index": output_index, "item": item})]


def _closing(log: ResponseLog, end: EndEntry) -> list[tuple[str, _Object]]:
    response = _ended(log, end)
    outcomes = _outcomes(log, end)
    if end.reason is None:
        return [("response.failed", {"response": response}), *outcomes]
    _, terminal, _ = _ending(log.header, end)
    output = _ended_output(log, end)
    closing = _closing_item(log.header, output[-1], len(output) - 1) if output else []
    return [*closing, (terminal, {"response": response}), *outcomes]


def _ending(header: LogHeader, end: EndEntry) -> tuple[str, str, str | None]:
    assert end.reason is not None
    if end.steered is None or not end.steered.is_cut:
        return _ENDINGS[_reason(header, end.reason)]
    return _ENDINGS[FinishReason.STOP] if end.steered.status == "pending" else _STEERED


def _ended_output(log: ResponseLog, end: EndEntry) -> list[_Object]:
    """All items, half a call among them that is dropped."""
    status, _, _ = _ending(log.header, end)
    steered = end.steered
    if steered is not None and steered.is_cut:
        newest = log.open_item
        is_whole = newest is not None and newest[1] in CALLS and not steered.drops_call
        status = "completed" if is_whole else "incomplete"
    return _output(log, "completed" if status == "completed" else "incomplete")


def steers_objects(log: ResponseLog, end: EndEntry | None = None) -> list[_Object]:
    """What is known of a response's steers, in order, as it is now or once `end` is appended."""
    end = end or log.end
    steered = None if end is None else end.steered
    status = "accepted" if steered is None else steered.status
    more: _Object = {}
    if status == "committed":
        more["successor_id"] = successor_id(log.response_id)
    elif status == "failed" and steered is not None:
        more["error"] = _steer_error(steered)
    if status in ("pending", "failed"):
        return [
            {"id": entry.name, "status": status, **more, "input": entry.input}
            for entry in log.steers
        ]
    return [{"id": entry.name, "status": status, **more} for entry in log.steers]


def _outcomes(log: ResponseLog, end: EndEntry) -> list[tuple[str, _Object]]:
    """The events that say what became of steers that have no successor."""
    steered = end.steered
    if steered is None or steered.status == "committed":
        return []
    if steered.status == "failed":
        error = _steer_error(steered)
        return [
            (
                "response.steer.failed",
                {"error": error, "steer": {**_steer(log.header, entry), "input": entry.input}},
            )
            for entry in log.steers
        ]
    wanted = [
        {"type": f"{item['type']}_output", "call_id": item["call_id"]}
        | ({"name": item["name"]} if item["type"] == FUNCTION_CALL.type else {})
        for item in _ended(log, end)["output"]
        if item["type"] in CALLS
    ]
    reason = {"reason": "waiting_for_required_input", "required_input": wanted}
    return [
        ("response.steer.pending", {**reason, "steer": _steer(log.header, entry)})
        for entry in log.steers
    ]


def _steer(header: LogHeader, entry: SteerEntry) -> _Object:
    return {"id": entry.name, "previous_response_id": header.response_id}


def _steer_error(steered: Steered) -> _Object:
    assert steered.error is not None
    code, message = steered.error
    return {"type": "invalid_request_error", "code": code, "message": message}


def _ended(log: ResponseLog, end: EndEntry) -> _Object:
    response = _ended_response(log, end)
    if end.steered is not None:
        told = {**response.get("penstock", {}), "steers": steers_objects(log, end)}
        response["penstock"] = told
    return response


def _ended_response(log: ResponseLog, end: EndEntry) -> _Object:
    if end.reason is None:
        assert end.error is not None
        code, message = end.error
        return _response(
            log,
            "failed",
            output=_output(log, "incomplete"),
            end=end,
            error={"code": code, "message": message},
        )
    status, _, why = _ending(log.header, end)
    output = _ended_output(log, end)
    drops_call = end.steered is not None and end.steered.drops_call
    return _response(
        log,
        status,
        output=output[:-1] if drops_call else output,
        end=end,
        incomplete_details=None if why is None else {"reason": why},
    )


def _reason(header: LogHeader, reason: FinishReason) -> FinishReason:
    if not header.generates and reason is FinishReason.LENGTH:
        return FinishReason.STOP  # only the prompt was to be prepared: it is complete
    return reason


def _output(log: ResponseLog, status: str) -> list[_Object]:
    """All items. The last one has this status, the others are completed."""
    header = log.header
    deltas = [entry for entry in log.entries if isinstance(entry, DeltaEntry)]
    items = [list(of_item) for _, of_item in groupby(deltas, attrgetter("output_index"))]
    if not items and header.begins_message:
        return [_item(header, 0, (), status)]
    return [
        _item(header, index, said, status if said is items[-1] else "completed")
        for index, said in enumerate(items)
    ]


def _item(header: LogHeader, output_index: int, said: Sequence[DeltaEntry], status: str) -> _Object:
    """An item from its deltas; without any it is an empty message."""
    kind = kind_of(header, said[0].kind if said else MESSAGE.type)
    number = item_number(header, output_index)
    return kind.item(
        ItemContent(
            id=kind.id_prefix + number,
            number=number,
            status=status,
            text="".join([entry.text for entry in said]),
            logprobs=[token for entry in said for token in entry.logprobs],
            name=said[0].name if said else "",
        )
    )


def _begun(entry: DeltaEntry) -> DeltaEntry:
    """The beginning of an item, without text."""
    return msgspec.structs.replace(entry, text="", logprobs=())


def _place(kind: ItemKind, item: _Object, output_index: int) -> _Object:
    """The fields that say which part an event is about."""
    return {"item_id": item["id"], "output_index": output_index, **kind.part_index}


def _response(log: ResponseLog, status: str, **fields: Any) -> _Object:
    response = _new_response(log.header, status, **fields)
    if not log.is_resumable:
        response["penstock"] = {**response.get("penstock", {}), **NOT_RESUMABLE}
    return response


def _new_response(
    header: LogHeader,
    status: str,
    *,
    output: list[_Object],
    end: EndEntry | None = None,
    error: _Object | None = None,
    incomplete_details: _Object | None = None,
) -> _Object:
    told: _Object = {}
    if end is not None:
        told["penstock"] = penstock_object(usage_of(end), end.cache)
        options = header.echo.get("prompt_cache_options") or {}
        if options.get("comparison_response_id") is not None:
            told["prompt_cache_diagnostics"] = diagnostics_object(end.cache)
    return {
        "id": header.response_id,
        "object": "response",
        "created_at": header.created_at,
        **header.echo,
        "status": status,
        "output": output,
        "usage": None if end is None else usage_object(usage_of(end)),
        "error": error,
        "incomplete_details": incomplete_details,
        "completed_at": end.ended_at if end is not None and status == "completed" else None,
        **told,
    }


def diagnostics_object(cache: Mapping[str, Any] | None) -> _Object:
    """`prompt_cache_diagnostics`. OpenAI has no word for a prompt that has not changed and was not
    found: `unavailable`."""
    reason = "unavailable" if cache is None else cache["reason"]
    if reason == "hit":
        return {"type": "cache_hit"}
    if reason == "not_found":
        return {"type": "comparison_response_not_found"}
    if reason == "parameter":
        reason = _CHANGED_PARAMETERS.get(cache["field"] or "", "input_changed") if cache else ""
    else:
        reason = _CHANGED.get(reason, "")
    if cache is None or not reason:
        return {"type": "unavailable"}
    return {
        "type": "cache_miss",
        "reason": reason,
        "cache_missed_tokens": cache["missed_tokens"],
        "comparison_reusable_tokens": cache["reusable_tokens"],
    }


def usage_object(used: Usage) -> _Object:
    counts = {
        "draft_tokens": used.draft_tokens,
        "accepted_draft_tokens": used.accepted_draft_tokens,
    }
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": used.output_tokens,
        "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
        "total_tokens": used.prompt_tokens + used.output_tokens,
        **({"penstock": counts} if used.draft_tokens else {}),
    }
