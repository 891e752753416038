"""Encodes and decodes a response's header and entries, or the whole log of an ended response.

Each is one msgpack array that begins with the format's version. A header in it is a map by field
name, so that a field with a default can be added and old headers still be read. Entries, of which
there are many, are plain arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import msgpack
from msgspec import Struct
from msgspec.structs import asdict

from penstock.engine.errors import EngineError
from penstock.engine.request import (
    SAMPLING_PARAMETERS,
    BeamSearch,
    FinishReason,
    Request,
    Retention,
    SamplingParams,
)
from penstock.gateway.storage.response_log.record import DeltaEntry, EndEntry, Entry, ResponseHeader

VERSION = 1
_NEEDED_PARAMS = frozenset({"beam_search", "stop", "stop_token_ids"})  # 83f2e9f reads them by name
_T = TypeVar("_T")


class UnreadableEntryError(ValueError):
    """The bytes are not a header or entry of this version."""


def encode_header(header: ResponseHeader) -> bytes:
    return _pack(VERSION, _header_fields(header))


def decode_header(data: bytes) -> ResponseHeader:
    """Raises: UnreadableEntryError."""
    return _decode(data, _read_header)


def encode_delta(entry: DeltaEntry) -> bytes:
    if entry.logprobs:
        return _pack(VERSION, entry.number, entry.text, entry.token_ids, entry.logprobs)
    return _pack(VERSION, entry.number, entry.text, entry.token_ids)


def decode_delta(data: bytes) -> DeltaEntry:
    """Raises: UnreadableEntryError."""
    return _decode(data, _read_delta)


def encode_end(entry: EndEntry) -> bytes:
    return _pack(VERSION, *_end_fields(entry))


def decode_end(data: bytes) -> EndEntry:
    """Raises: UnreadableEntryError."""
    return _decode(data, _read_end)


def encode_log(header: ResponseHeader, entries: Sequence[Entry]) -> bytes:
    """Encode an ended response: deltas, and the end."""
    *deltas, end = entries
    assert isinstance(end, EndEntry)
    rows = [
        (entry.text, entry.token_ids, entry.logprobs)
        for entry in deltas
        if isinstance(entry, DeltaEntry)
    ]
    return _pack(VERSION, _header_fields(header), rows, _end_fields(end))


def decode_log(data: bytes) -> tuple[ResponseHeader, list[Entry]]:
    """Raises: UnreadableEntryError."""
    return _decode(data, _read_log)


def _pack(*values: Any) -> bytes:
    data: bytes = msgpack.packb(values)
    return data


def _decode(data: bytes, read: Callable[..., _T]) -> _T:
    try:
        version, *values = msgpack.unpackb(data, strict_map_key=False)
        if version != VERSION:
            raise UnreadableEntryError(f"version {version}, not {VERSION}")
        return read(*values)
    except UnreadableEntryError:
        raise
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        EngineError,
        msgpack.UnpackException,
    ) as error:
        raise UnreadableEntryError(f"not part of a response log: {error!r}") from error


def _read_delta(
    number: int, text: str, token_ids: list[int], logprobs: list[Any] | None = None
) -> DeltaEntry:
    return DeltaEntry(number, text, tuple(token_ids), tuple(logprobs or ()))


def _read_log(
    named: dict[str, Any], rows: list[Any], end: list[Any]
) -> tuple[ResponseHeader, list[Entry]]:
    header = _read_header(named)
    deltas = (
        _read_delta(number, *row) for number, row in enumerate(rows, header.num_opening_events)
    )
    return header, [*deltas, _read_end(*end)]


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
    )


def _read_end(number: int, num_events: int, reason: str | None, *rest: Any) -> EndEntry:
    usage, ended_at, error, prefix_id = rest
    prompt, cached, output = usage
    return EndEntry(
        number=number,
        num_events=num_events,
        reason=None if reason is None else FinishReason(reason),
        usage=(prompt, cached, output),
        ended_at=ended_at,
        error=None if error is None else (error[0], error[1]),
        prefix_id=prefix_id,
    )


def _header_fields(header: ResponseHeader) -> dict[str, Any]:
    # Neither copies deeply, as dataclasses.asdict does.
    named = {field.name: getattr(header, field.name) for field in fields(header)}
    # Without what is as by default: during a rolling restart an earlier release reads this, and
    # could not read parameters that it does not know.
    params = {
        name: value
        for name, value in asdict(header.request.sampling_params).items()
        if name in _NEEDED_PARAMS or value != SAMPLING_PARAMETERS[name].default
    }
    params["logit_bias"] = dict(params["logit_bias"])
    params["beam_search"] = _optional_fields(params["beam_search"])
    request = asdict(header.request)
    request["sampling_params"] = params
    request["retention"] = _optional_fields(request["retention"])
    return {**named, "echo": dict(header.echo), "request": request}


def _read_header(named: dict[str, Any]) -> ResponseHeader:
    rendering = named["rendering"]
    return ResponseHeader(
        **{
            **named,
            "request": _read_request(named["request"]),
            "input_items": tuple(named["input_items"]),
            "rendering": None if rendering is None else (rendering[0], rendering[1]),
        }
    )


def _read_request(named: dict[str, Any]) -> Request:
    params, retention = named["sampling_params"], named["retention"]
    beams = params["beam_search"]
    return Request(
        **{
            **named,
            "prompt_token_ids": tuple(named["prompt_token_ids"]),
            "output_token_ids": tuple(named["output_token_ids"]),
            "retention": None if retention is None else Retention(**retention),
            "sampling_params": SamplingParams(
                **{
                    **params,
                    "stop": tuple(params["stop"]),
                    "stop_token_ids": tuple(params["stop_token_ids"]),
                    "beam_search": None if beams is None else BeamSearch(**beams),
                }
            ),
        }
    )


def _optional_fields(instance: Struct | None) -> Mapping[str, Any] | None:
    return None if instance is None else asdict(instance)
