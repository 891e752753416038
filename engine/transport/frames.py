"""Messages as frames: one msgpack array each, whose first element is the type's tag.

On a byte stream each frame is preceded by its length. `messages` defines the messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgpack

from penstock.engine.errors import EngineError
from penstock.engine.request import (
    BeamSearch,
    FinishReason,
    Notice,
    Request,
    RequestOutput,
    Retention,
    SamplingParams,
    TokenLogprobs,
)
from penstock.engine.transport.messages import (
    Abort,
    DropPrefix,
    EngineInfo,
    EngineStats,
    Failure,
    Heartbeat,
    Hello,
    Message,
    Step,
    Submit,
)

_LENGTH = struct.Struct(">I")
_MAX_FRAME_BYTES = 1 << 28


def framed(frame: bytes) -> bytes:
    """A frame preceded by its length."""
    return _LENGTH.pack(len(frame)) + frame


class FrameReader:
    """Cuts a connection's bytes into frames."""

    def __init__(self) -> None:
        self._rest = b""  # the start of an incomplete frame

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The frames that are complete now; consume all of them before the next call.

        Raises:
            ValueError: not a stream of frames; the connection cannot be used any further.
        """
        if self._rest:
            data = self._rest + data
        start = 0
        while (begin := start + _LENGTH.size) <= len(data):
            (size,) = _LENGTH.unpack_from(data, start)
            if size > _MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            if begin + size > len(data):
                break
            start = begin + size
            yield data[begin:start]
        self._rest = data[start:]


def encode(message: Message) -> bytes:
    """One frame."""
    frame: bytes = msgpack.packb([_TAGS[type(message)], *_ENCODERS[type(message)](message)])
    return frame


def decode(frame: bytes) -> Message:
    """The message in a frame; ValueError if it is not a valid one."""
    try:
        tag, *values = msgpack.unpackb(frame, strict_map_key=False, use_list=False)
        message: Message = _DECODERS[tag](values)
    except (KeyError, TypeError, ValueError, EngineError, msgpack.UnpackException) as error:
        raise ValueError(f"not a penstock frame: {error!r}") from error
    return message


def _values(instance: Any) -> list[Any]:
    # Not `dataclasses.asdict`, which copies deeply: this runs for every frame.
    return [getattr(instance, field.name) for field in fields(instance)]


def _encode_params(params: SamplingParams) -> list[Any]:
    return [
        *(getattr(params, name) for name in _PARAM_FIELDS),
        dict(params.logit_bias),
        None if params.beam_search is None else _values(params.beam_search),
    ]


# The fields that only `engine.text` reads are not sent.
_TEXT_FIELDS = frozenset({"stop", "include_stop_str_in_output", "skip_special_tokens"})
_PARAM_FIELDS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name not in _TEXT_FIELDS | {"logit_bias", "beam_search"}
)
_REQUEST_FIELDS = tuple(
    field.name for field in fields(Request) if field.name not in {"sampling_params", "retention"}
)
_STATS_FIELDS = tuple(field.name for field in fields(EngineStats))


def _decode_params(values: list[Any]) -> SamplingParams:
    *plain, logit_bias, beams = values
    named = dict(zip(_PARAM_FIELDS, plain, strict=True))
    named["stop_token_ids"] = tuple(named["stop_token_ids"])
    return SamplingParams(
        **named,
        logit_bias=logit_bias,
        beam_search=None if beams is None else BeamSearch(**_named(BeamSearch, beams)),
    )


def _named(kind: type[Any], values: list[Any]) -> dict[str, Any]:
    return dict(zip((field.name for field in fields(kind)), values, strict=True))


def _encode_submit(message: Submit) -> list[Any]:
    request = message.request
    return [
        message.protocol_version,
        [getattr(request, name) for name in _REQUEST_FIELDS],
        _encode_params(request.sampling_params),
        None if request.retention is None else _values(request.retention),
        message.name,
        message.epoch,
    ]


def _decode_submit(values: list[Any]) -> Submit:
    version, request_values, params, retention, name, (owner, attempt) = values
    named = dict(zip(_REQUEST_FIELDS, request_values, strict=True))
    named["prompt_token_ids"] = tuple(named["prompt_token_ids"])
    named["output_token_ids"] = tuple(named["output_token_ids"])
    return Submit(
        request=Request(
            **named,
            sampling_params=_decode_params(params),
            retention=None if retention is None else Retention(**_named(Retention, retention)),
        ),
        name=name,
        epoch=(owner, attempt),
        protocol_version=version,
    )


def _encode_output(output: RequestOutput) -> list[Any]:
    """The request, the branch and its tokens; fields that differ from defaults follow as a map."""
    plain = [output.request_id, output.index, output.token_ids]
    values = _rare_values(output)
    if values == _RARE_DEFAULTS:
        return plain
    rare = {
        name: _RARE_ENCODERS[name](value) if name in _RARE_ENCODERS else value
        for name, value, default in zip(_RARE_FIELDS, values, _RARE_DEFAULTS, strict=True)
        if value != default
    }
    return [*plain, rare]


def _decode_output(values: list[Any]) -> RequestOutput:
    request_id, index, token_ids, *rest = values
    if not rest:  # as in most steps
        return RequestOutput(request_id=request_id, index=index, token_ids=token_ids)
    rare = {
        name: _RARE_DECODERS[name](value) if name in _RARE_DECODERS else value
        for name, value in rest[0].items()
    }
    return RequestOutput(request_id=request_id, index=index, token_ids=token_ids, **rare)


def _encode_entries(entries: tuple[TokenLogprobs, ...]) -> list[Any]:
    return [_values(entry) for entry in entries]


def _decode_entries(values: list[Any]) -> tuple[TokenLogprobs, ...]:
    return tuple(_decode_logprobs(entry) for entry in values)


def _decode_logprobs(values: list[Any]) -> TokenLogprobs:
    token_id, logprob, rank, top = values
    return TokenLogprobs(
        token_id=token_id,
        logprob=logprob,
        rank=rank,
        top=tuple((int(alternative), float(value)) for alternative, value in top),
    )


def _encode_step(message: Step) -> list[Any]:
    return [
        message.number,
        [_encode_output(output) for output in message.outputs],
        _encode_stats(message.stats),
    ]


def _decode_step(values: list[Any]) -> Step:
    number, outputs, stats = values
    return Step(
        number=number,
        outputs=tuple([_decode_output(output) for output in outputs]),
        stats=_decode_stats(stats),
    )


def _encode_stats(stats: EngineStats | None) -> list[Any] | None:
    return None if stats is None else _values(stats)


def _decode_stats(values: list[Any] | None) -> EngineStats | None:
    if values is None:
        return None
    return EngineStats(**dict(zip(_STATS_FIELDS, values, strict=True)))


def _decode_info(values: list[Any]) -> EngineInfo:
    named = dict(zip((field.name for field in fields(EngineInfo)), values, strict=True))
    named["eos_token_ids"] = tuple(named["eos_token_ids"])
    return EngineInfo(**named)


def _encode_heartbeat(message: Heartbeat) -> list[Any]:
    return [_encode_stats(message.stats), message.since_step_s]


_OUTPUT_DEFAULTS = {field.name: field.default for field in fields(RequestOutput)}
_RARE_FIELDS = tuple(
    name for name in _OUTPUT_DEFAULTS if name not in {"request_id", "index", "token_ids"}
)
_RARE_DEFAULTS = tuple(_OUTPUT_DEFAULTS[name] for name in _RARE_FIELDS)
_rare_values = attrgetter(*_RARE_FIELDS)
_RARE_ENCODERS: dict[str, Any] = {
    "logprobs": _encode_entries,
    "prompt_logprobs": _encode_entries,
    "finish_reason": lambda reason: reason.value,
    "notice": lambda notice: notice.value,
}
_RARE_DECODERS: dict[str, Any] = {
    "logprobs": _decode_entries,
    "prompt_logprobs": _decode_entries,
    "finish_reason": FinishReason,
    "notice": Notice,
}
_TAGS: dict[type, str] = {
    Hello: "hello",
    EngineInfo: "info",
    Submit: "submit",
    Abort: "abort",
    DropPrefix: "drop_prefix",
    Step: "step",
    Heartbeat: "heartbeat",
    Failure: "failure",
}
_ENCODERS: dict[type, Any] = {
    Hello: _values,
    EngineInfo: _values,
    Submit: _encode_submit,
    Abort: _values,
    DropPrefix: _values,
    Step: _encode_step,
    Heartbeat: _encode_heartbeat,
    Failure: _values,
}
_DECODERS: dict[str, Any] = {
    "hello": lambda values: Hello(protocol_version=values[0]),
    "info": _decode_info,
    "submit": _decode_submit,
    "abort": lambda values: Abort(
        request_ids=tuple(values[0]),
        branches=tuple((request_id, index) for request_id, index in values[1]),
    ),
    "drop_prefix": lambda values: DropPrefix(token_ids=tuple(values[0]), cache_salt=values[1]),
    "step": _decode_step,
    "heartbeat": lambda values: Heartbeat(
        stats=None if values[0] is None else _decode_stats(values[0]), since_step_s=values[1]
    ),
    "failure": lambda values: Failure(message=values[0]),
}
