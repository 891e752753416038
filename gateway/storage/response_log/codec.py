"""Encodes and decodes a response's header and entries, a whole log, or what was added to several.

Each is one msgpack array that begins with the format's version. A header in it is a map by field
name, so that a field with a default can be added and old headers still be read. Entries, of which
there are many, are plain arrays.

Version 1 holds responses of one message. Version 2 holds those of any items, and adds to a delta
its item's output index and kind and its number of events. What version 1 can hold is written in
version 1, because older gateways, which read no other, may share this one's Redis. For the same
reason a header has the settings of a successor, and the id of its API key, among the fields of its
`echo`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from operator import attrgetter
from typing import Any, TypeVar

import msgpack
import msgspec
from msgspec import Struct, structs

from penstock.engine.chat_formats import OutputFormat
from penstock.engine.errors import EngineError
from penstock.engine.request import (
    Adapter,
    BeamSearch,
    FinishReason,
    ImageInput,
    RepetitionDetection,
    Request,
    Retention,
    SamplingParams,
    StructuredOutputs,
    ThoughtLimit,
)
from penstock.gateway.storage.response_log.record import (
    ITEM_EVENTS,
    MESSAGE,
    STEER,
    Compaction,
    DeltaEntry,
    EndEntry,
    Entry,
    LogHeader,
    Steered,
    SteerEntry,
)

VERSION = 2
_TEXT_VERSION = 1
# All that readers of version 1 know of a request and its parameters. They cannot read a header with
# any other field, so those that came later are only written if they do not have their default.
_REQUEST_FIELDS = frozenset(
    """
    request_id prompt_token_ids sampling_params arrival_s output_token_ids tenant weight priority
    cache_salt wants_queue_position adapter retention

    temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty logit_bias
    seed max_tokens min_tokens ignore_eos stop_token_ids logprobs prompt_logprobs n best_of
    beam_search stop include_stop_str_in_output skip_special_tokens
    """.split()  # noqa: SIM905
)
LATER_FIELDS = {
    field.name: field.default
    for record in (Request, SamplingParams)
    for field in structs.fields(record)
    if field.name not in _REQUEST_FIELDS
}
_MESSAGE_PREFIX = "msg_"  # of the first item's id
_ITEM_ID = "item_id"  # of the message: in a header it stands for the nonce
_SETTINGS, _KEY_ID = "penstock_settings", "penstock_key_id"  # in an echo
_HEADER_FIELDS = {
    field.name: field.name
    for field in fields(LogHeader)
    if field.name not in ("settings", "key_id")
} | {"nonce": _ITEM_ID}
_text_fields = attrgetter("text", "token_ids", "logprobs")
_item_fields = attrgetter("text", "token_ids", "logprobs", "output_index", "kind", "num_events")
_ENCODER = msgspec.msgpack.Encoder()
_T = TypeVar("_T")


class UnreadableEntryError(ValueError):
    """The bytes are not a header or entry of this version."""


def encode_header(header: LogHeader) -> bytes:
    return _pack(_version_of(header), _header_fields(header))


def decode_header(data: bytes) -> LogHeader:
    """Raises: UnreadableEntryError."""
    return _decode(data, _read_header)


def _delta_fields(entry: DeltaEntry | SteerEntry) -> tuple[Any, ...]:
    fields = _item_fields(entry)
    return (*fields, entry.name) if entry.name else fields


def encode_delta(entry: DeltaEntry | SteerEntry) -> bytes:
    if entry.output_index or entry.num_events > 1 or entry.kind != MESSAGE:
        return _pack(VERSION, entry.number, *_delta_fields(entry))
    if entry.logprobs:
        return _pack(_TEXT_VERSION, entry.number, entry.text, entry.token_ids, entry.logprobs)
    return _pack(_TEXT_VERSION, entry.number, entry.text, entry.token_ids)


def decode_delta(data: bytes) -> DeltaEntry | SteerEntry:
    """Raises: UnreadableEntryError."""
    return _decode(data, _read_delta)


def encode_end(entry: EndEntry) -> bytes:
    return _pack(_TEXT_VERSION, *_end_fields(entry))


def decode_end(data: bytes) -> EndEntry:
    """Raises: UnreadableEntryError."""
    return _decode(data, _read_end)


def encode_log(header: LogHeader, entries: Sequence[Entry]) -> bytes:
    """Encode a response: deltas and steers, and the end if it has ended."""
    end = entries[-1] if entries else None
    row_of: Callable[[Any], tuple[Any, ...]] = _text_fields
    version = _version_of(header)
    if not header.is_text_only or any(isinstance(entry, SteerEntry) for entry in entries):
        row_of, version = _delta_fields, VERSION
    rows = [row_of(entry) for entry in entries if not isinstance(entry, EndEntry)]
    last = _end_fields(end) if isinstance(end, EndEntry) else None
    return _pack(version, _header_fields(header), rows, last)


def decode_log(data: bytes) -> tuple[LogHeader, list[Entry]]:
    """Raises: UnreadableEntryError."""
    return _decode(data, _read_log)


def encode_appended(appended: Sequence[tuple[int, Sequence[Entry]]]) -> bytes:
    """Encode deltas and steers that were appended to several logs, each under a key of its own."""
    return _ENCODER.encode((VERSION, appended))


def decode_appended(data: bytes) -> list[tuple[int, list[DeltaEntry | SteerEntry]]]:
    """Raises: UnreadableEntryError."""
    return _decode(
        data, lambda logs: [(key, [_read_delta(*row) for row in rows]) for key, rows in logs]
    )


def _pack(*values: Any) -> bytes:
    data: bytes = msgpack.packb(values)
    return data


def _decode(data: bytes, read: Callable[..., _T]) -> _T:
    try:
        version, *values = msgpack.unpackb(data, strict_map_key=False)
        if version not in (_TEXT_VERSION, VERSION):
            raise UnreadableEntryError(f"version {version}, not {_TEXT_VERSION} or {VERSION}")
        return read(*values)
    except UnreadableEntryError:
        raise
    except (
        AttributeError,
        LookupError,
        OverflowError,
        TypeError,
        ValueError,
        EngineError,
        msgpack.UnpackException,
    ) as error:
        raise UnreadableEntryError(f"not part of a response log: {error!r:.200}") from error


def _version_of(header: LogHeader) -> int:
    return _TEXT_VERSION if header.is_text_only else VERSION


def _read_delta(
    number: int,
    text: str,
    token_ids: list[int],
    logprobs: Sequence[Any] = (),
    output_index: int = 0,
    kind: str = MESSAGE,
    num_events: int = 1,
    name: str = "",
) -> DeltaEntry | SteerEntry:
    if kind == STEER:
        return SteerEntry(number, text, name=name)
    known = ITEM_EVENTS[kind].type
    ids = tuple(token_ids)
    return DeltaEntry(number, text, ids, tuple(logprobs), output_index, known, num_events, name)


def _read_log(
    named: dict[str, Any], rows: list[Any], end: list[Any] | None
) -> tuple[LogHeader, list[Entry]]:
    header = _read_header(named)
    number, entries = header.num_opening_events, list[Entry]()
    for row in rows:
        entries.append(_read_delta(number, *row))
        number = entries[-1].last_number + 1
    return header, [*entries, *([] if end is None else [_read_end(*end)])]


def _end_fields(entry: EndEntry) -> tuple[Any, ...]:
    reason = None if entry.reason is None else entry.reason.value
    return (
        entry.number,
        entry.num_events,
        reason,
        entry.usage,
        entry.ended_at,
        entry.error,
        entry.prefix_id,
        *_rest_of(entry),
    )


def _rest_of(entry: EndEntry) -> tuple[Any, ...]:
    """Fields that came later, as far as they have no default."""
    steered = None if entry.steered is None else astuple(entry.steered)
    if entry.cache is not None:
        return steered, entry.cache
    return () if steered is None else (steered,)


def _read_end(number: int, num_events: int, reason: str | None, *rest: Any) -> EndEntry:
    usage, ended_at, error, prefix_id, *more = rest
    steered, cache, *_ = *more, None, None
    return EndEntry(
        number=number,
        num_events=num_events,
        reason=None if reason is None else FinishReason(reason),
        usage=tuple(usage),
        ended_at=ended_at,
        error=None if error is None else (error[0], error[1]),
        prefix_id=prefix_id,
        steered=None if steered is None else _read_steered(*steered),
        cache=cache,
    )


def _read_steered(
    status: Any, is_cut: bool, drops_call: bool, error: Sequence[str] | None
) -> Steered:
    return Steered(
        status=status,
        is_cut=is_cut,
        drops_call=drops_call,
        error=None if error is None else (error[0], error[1]),
    )


def _header_fields(header: LogHeader) -> dict[str, Any]:
    # Neither this nor `structs.asdict` copies deeply, as dataclasses.asdict does.
    named = {wire: getattr(header, name) for name, wire in _HEADER_FIELDS.items()}
    named[_ITEM_ID] = _MESSAGE_PREFIX + header.nonce
    if header.output_format is None:  # which version 1 does not know
        del named["output_format"]
    else:
        named["output_format"] = header.output_format.as_fields()
    if header.compaction is None:
        del named["compaction"]
    else:
        named["compaction"] = _compaction_fields(header.compaction)
    request = _all_request_fields(header.request)
    echo = dict(header.echo)
    if header.settings is not None:
        echo[_SETTINGS] = header.settings
    if header.key_id:
        echo[_KEY_ID] = header.key_id
    return {**named, "echo": echo, "request": request}


def _compaction_fields(compaction: Compaction) -> dict[str, Any]:
    output_format = compaction.output_format
    return {
        "request": _all_request_fields(compaction.request),
        "output_format": None if output_format is None else output_format.as_fields(),
        "around": compaction.around,
    }


def _all_request_fields(asked: Request) -> dict[str, Any]:
    params = _request_fields(asked.sampling_params)
    params["logit_bias"] = dict(params["logit_bias"])
    params["beam_search"] = _optional_fields(params["beam_search"])
    grammar = params.get("structured_outputs")
    if grammar is not None:
        fields = structs.asdict(grammar)
        if not grammar.triggers:  # of which older gateways know nothing
            fields = {name: fields[name] for name in ("kind", "text")}
        params["structured_outputs"] = fields
    for name in {"repetition_detection", "thought_limit"} & params.keys():
        params[name] = structs.asdict(params[name])
    request = _request_fields(asked)
    request["sampling_params"] = params
    request["retention"] = _optional_fields(request["retention"])
    request["adapter"] = _optional_fields(request["adapter"])
    if "images" in request:
        request["images"] = [structs.asdict(image) for image in request["images"]]
    return request


def _grammar(fields: Mapping[str, Any]) -> StructuredOutputs:
    lists = {name: tuple(fields[name]) for name in ("triggers", "thought") if name in fields}
    return StructuredOutputs(**{**fields, **lists})


def _request_fields(record: Struct) -> dict[str, Any]:
    named = structs.asdict(record)
    for name, default in LATER_FIELDS.items():
        if named.get(name, default) == default:
            named.pop(name, None)
    return named


def _read_header(named: dict[str, Any]) -> LogHeader:
    rendering = named["rendering"]
    compaction = named.get("compaction")
    nonce = named.pop(_ITEM_ID).removeprefix(_MESSAGE_PREFIX)
    return LogHeader(
        **{
            **named,
            "nonce": nonce,
            "request": _read_request(named["request"]),
            "input_items": tuple(named["input_items"]),
            "rendering": None if rendering is None else tuple(rendering),
            "output_format": _read_format(named.get("output_format")),
            "compaction": None if compaction is None else _read_compaction(**compaction),
            "settings": named["echo"].pop(_SETTINGS, None),
            "key_id": named["echo"].pop(_KEY_ID, ""),
        }
    )


def _read_format(fields: Mapping[str, Any] | None) -> OutputFormat | None:
    return None if fields is None else OutputFormat.from_fields(fields)


def _read_compaction(
    request: dict[str, Any], output_format: Mapping[str, Any] | None, around: Sequence[str]
) -> Compaction:
    before, after = around
    return Compaction(
        request=_read_request(request),
        output_format=_read_format(output_format),
        around=(before, after),
    )


def _read_request(named: dict[str, Any]) -> Request:
    named.pop("deadline_s", None)  # which the engine never read, and older gateways wrote
    params, retention = named["sampling_params"], named["retention"]
    beams, grammar = params["beam_search"], params.get("structured_outputs")
    for name in {"allowed_token_ids", "bad_words"} & params.keys():
        params[name] = tuple(params[name])
    if "bad_words_token_ids" in params:
        params["bad_words_token_ids"] = tuple(map(tuple, params["bad_words_token_ids"]))
    if "repetition_detection" in params:
        loops = params["repetition_detection"]
        params["repetition_detection"] = RepetitionDetection(**loops)
    if "thought_limit" in params:
        limit = params["thought_limit"]
        params["thought_limit"] = ThoughtLimit(**{name: _tuples(limit[name]) for name in limit})
    return Request(
        **{
            **named,
            "prompt_token_ids": tuple(named["prompt_token_ids"]),
            "output_token_ids": tuple(named["output_token_ids"]),
            "prediction_token_ids": tuple(named.get("prediction_token_ids", ())),
            "images": tuple(ImageInput(**image) for image in named.get("images", ())),
            "adapter": None if named["adapter"] is None else Adapter(**named["adapter"]),
            "retention": None if retention is None else Retention(**retention),
            "sampling_params": SamplingParams(
                **{
                    **params,
                    "stop": tuple(params["stop"]),
                    "stop_token_ids": tuple(params["stop_token_ids"]),
                    "beam_search": None if beams is None else BeamSearch(**beams),
                    "structured_outputs": None if grammar is None else _grammar(grammar),
                }
            ),
        }
    )


def _tuples(value: Any) -> Any:
    """The value with tuples in place of its lists."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value


def _optional_fields(instance: Struct | None) -> Mapping[str, Any] | None:
    return None if instance is None else structs.asdict(instance)
