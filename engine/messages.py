"""The wire between gateway and engine: msgpack frames over ZeroMQ.

    gateway (DEALER, fresh random identity)            engine (ROUTER, mandatory)
      Hello        ─────────────────────────────►
                   ◄─────────────────────────────      EngineInfo
      Submit, Abort, Heartbeat  ────────────────►
                   ◄─────────────────────────────      Step (numbered), Heartbeat, Failure

A frame is one msgpack array, its first element the type's tag. Frames are versioned by
`PROTOCOL_VERSION` in `Hello` and in every `Submit`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import msgpack

from penstock.engine.errors import EngineError
from penstock.engine.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)

PROTOCOL_VERSION = 1
HEARTBEAT_INTERVAL_S = 1.0
SILENCE_LIMIT_S = 5.0  # a peer not heard of for this long is declared dead


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is, told once to each gateway.

    Attributes:
        model: as the user named it.
        model_path: the directory its files lie in.
        num_blocks, block_size: the device KV pool; their product is its size in tokens.
    """

    model: str
    model_path: str
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    dtype: str
    device: str
    eos_token_ids: tuple[int, ...]
    pid: int
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    request: Request
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine. Counters (`*_total`) only grow."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_requests_swapped: int = 0
    num_blocks_used: int = 0
    num_blocks: int = 0
    num_preemptions_total: int = 0
    num_steps_total: int = 0
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefix_cache_queries_total: int = 0  # tokens looked up, as vLLM counts
    prefix_cache_hits_total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One iteration's outputs of all streams of one gateway.

    `number` counts this gateway's frames from 1 without gaps: a gap is a bug or a lost frame.
    """

    number: int
    outputs: tuple[RequestOutput, ...]
    stats: EngineStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A sign of life; from the engine it carries stats."""

    stats: EngineStats | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The engine cannot go on, or refuses this gateway; the last frame it sends."""

    message: str


Message = Hello | EngineInfo | Submit | Abort | Step | Heartbeat | Failure


def encode(message: Message) -> bytes:
    """One frame."""
    frame: bytes = msgpack.packb([_TAGS[type(message)], *_ENCODERS[type(message)](message)])
    return frame


def decode(frame: bytes) -> Message:
    """The message in a frame; ValueError if it is none of ours."""
    try:
        tag, *values = msgpack.unpackb(frame, strict_map_key=False)
        message: Message = _DECODERS[tag](values)
    except (KeyError, TypeError, ValueError, EngineError, msgpack.UnpackException) as error:
        raise ValueError(f"not a penstock frame: {error!r}") from error
    return message


def _values(instance: Any) -> list[Any]:
    # Not dataclasses.asdict: it copies deeply, and this runs for every frame.
    return [getattr(instance, field.name) for field in fields(instance)]


def _encode_params(params: SamplingParams) -> list[Any]:
    return [
        *(getattr(params, name) for name in _PARAM_FIELDS),
        dict(params.logit_bias),
    ]


# Text-level fields stay with whoever turns ids into text.
_TEXT_FIELDS = frozenset({"stop", "include_stop_str_in_output", "skip_special_tokens"})
_PARAM_FIELDS = tuple(
    field.name
    for field in fields(SamplingParams)
    if field.name not in _TEXT_FIELDS and field.name != "logit_bias"
)
_REQUEST_FIELDS = tuple(field.name for field in fields(Request) if field.name != "sampling_params")
_STATS_FIELDS = tuple(field.name for field in fields(EngineStats))


def _decode_params(values: list[Any]) -> SamplingParams:
    named = dict(zip(_PARAM_FIELDS, values[:-1], strict=True))
    named["stop_token_ids"] = tuple(named["stop_token_ids"])
    return SamplingParams(**named, logit_bias=values[-1])


def _encode_submit(message: Submit) -> list[Any]:
    request = message.request
    return [
        message.protocol_version,
        [getattr(request, name) for name in _REQUEST_FIELDS],
        _encode_params(request.sampling_params),
    ]


def _decode_submit(values: list[Any]) -> Submit:
    version, request_values, params = values
    named = dict(zip(_REQUEST_FIELDS, request_values, strict=True))
    named["prompt_token_ids"] = tuple(named["prompt_token_ids"])
    named["output_token_ids"] = tuple(named["output_token_ids"])
    return Submit(
        request=Request(**named, sampling_params=_decode_params(params)),
        protocol_version=version,
    )


def _encode_output(output: RequestOutput) -> list[Any]:
    reason = output.finish_reason
    return [
        output.request_id,
        output.token_ids,
        [_values(entry) for entry in output.logprobs],
        None if reason is None else reason.value,
        output.stop_token_id,
        output.num_cached_tokens,
        output.error,
    ]


def _decode_output(values: list[Any]) -> RequestOutput:
    request_id, token_ids, logprobs, reason, stop_token_id, num_cached, error = values
    return RequestOutput(
        request_id=request_id,
        token_ids=tuple(token_ids),
        logprobs=tuple(_decode_logprobs(entry) for entry in logprobs),
        finish_reason=None if reason is None else FinishReason(reason),
        stop_token_id=stop_token_id,
        num_cached_tokens=num_cached,
        error=error,
    )


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
        _values(message.stats),
    ]


def _decode_step(values: list[Any]) -> Step:
    number, outputs, stats = values
    return Step(
        number=number,
        outputs=tuple(_decode_output(output) for output in outputs),
        stats=_decode_stats(stats),
    )


def _decode_stats(values: list[Any]) -> EngineStats:
    return EngineStats(**dict(zip(_STATS_FIELDS, values, strict=True)))


def _decode_info(values: list[Any]) -> EngineInfo:
    named = dict(zip((field.name for field in fields(EngineInfo)), values, strict=True))
    named["eos_token_ids"] = tuple(named["eos_token_ids"])
    return EngineInfo(**named)


def _encode_heartbeat(message: Heartbeat) -> list[Any]:
    return [None if message.stats is None else _values(message.stats)]


_TAGS: dict[type, str] = {
    Hello: "hello",
    EngineInfo: "info",
    Submit: "submit",
    Abort: "abort",
    Step: "step",
    Heartbeat: "heartbeat",
    Failure: "failure",
}
_ENCODERS: dict[type, Any] = {
    Hello: _values,
    EngineInfo: _values,
    Submit: _encode_submit,
    Abort: _values,
    Step: _encode_step,
    Heartbeat: _encode_heartbeat,
    Failure: _values,
}
_DECODERS: dict[str, Any] = {
    "hello": lambda values: Hello(protocol_version=values[0]),
    "info": _decode_info,
    "submit": _decode_submit,
    "abort": lambda values: Abort(request_ids=tuple(values[0])),
    "step": _decode_step,
    "heartbeat": lambda values: Heartbeat(
        stats=None if values[0] is None else _decode_stats(values[0])
    ),
    "failure": lambda values: Failure(message=values[0]),
}
