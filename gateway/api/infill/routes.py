"""`POST /infill`: what fills the gap between two texts, in llama.cpp's format, for editors."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.request import FinishReason
from penstock.gateway.api.infill.schema import InfillRequest
from penstock.gateway.api.schema.parsing import parse_request
from penstock.gateway.api.shared.json_api import (
    CLIENT_GONE,
    json_response,
    parsed,
    read_json,
    unless_gone,
)
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of, deadline_of
from penstock.gateway.errors import failure_of
from penstock.gateway.generation.branch import Delta
from penstock.gateway.generation.fill_in_middle import ending_there
from penstock.gateway.generation.generation import Generation, penstock_object
from penstock.gateway.generation.request_planner import RequestPlanner
from penstock.gateway.http.event_stream import EventStream, data
from penstock.gateway.http.raw_writer import RawWriter, pump
from penstock.gateway.sources import next_of
from penstock.gateway.telemetry.request_record import told


class Infill:
    """The endpoint.

    Args:
        ping_s: seconds of silence on a stream before a comment is sent.
    """

    def __init__(self, planner: RequestPlanner, *, max_body_bytes: int, ping_s: float) -> None:
        self._planner = planner
        self._max_body_bytes = max_body_bytes
        self._ping_s = ping_s

    @operation(
        "POST /infill",
        "Fill the gap between two texts.",
        "Infill",
        body=(InfillRequest,),
        statuses=(404, 429),
        streams=True,
    )
    async def create(self, request: Request) -> Response | EventStream:
        body = await read_json(request, max_bytes=self._max_body_bytes)
        asked = await parsed(self._planner.paced_work, InfillRequest, body, parse_request)
        caller = caller_of(request.scope)
        model = await self._planner.adapters.require(asked.model, caller, task="generate")
        fills = self._planner.gaps.require(param="input_suffix")
        prompt = await self._planner.gaps.fitted(
            asked.input_prefix,
            asked.input_suffix,
            written=asked.prompt,
            extra=[(each.filename, each.text) for each in asked.input_extra],
            num_output_tokens=asked.output_limit,
        )
        options = asked.options(self._planner.model.sampling_defaults())
        generation = await self._planner.plan(
            f"infill-{uuid.uuid4().hex}",
            prompt.token_ids,
            ending_there(options, fills),
            param="input_prefix",
            caller=caller,
            deadline_s=deadline_of(request.scope),
        )
        answer = _Answer(generation, asked, model=model, is_cut=prompt.is_cut, ends=fills.ends)
        if asked.stream:
            return EventStream(answer.write_to, ping_s=self._ping_s, on_error=_broken)
        whole = await unless_gone(request, answer.whole())
        return Response(status_code=CLIENT_GONE) if whole is None else json_response(whole)


class _Answer:
    """One answer, to be read once."""

    def __init__(
        self,
        generation: Generation,
        asked: InfillRequest,
        *,
        model: str,
        is_cut: bool,
        ends: Sequence[int],
    ) -> None:
        self._generation = generation
        self._asked = asked
        self._model = model
        self._is_cut = is_cut
        self._ends = frozenset(ends)
        self._began_s = time.perf_counter()
        self._first_s: float | None = None

    async def whole(self) -> dict[str, Any]:
        texts: list[str] = []
        with self._generation as generation:
            while (deltas := await next_of(generation)) is not None:
                texts += map(self._text, deltas)
        await self._generation.settle()
        return self._selected(self._last("".join(texts)))

    async def write_to(self, out: RawWriter) -> None:
        """Write the answer as events, without OpenAI's `[DONE]`."""
        with self._generation as generation:
            await pump(generation, self._events, out)
        await self._generation.settle()
        out.write(self._event(self._last("")))

    def _text(self, delta: Delta) -> str:
        if self._first_s is None:
            self._first_s = time.perf_counter()
        return delta.text

    def _events(self, deltas: Sequence[Delta]) -> list[bytes]:
        usage = self._generation.usage
        counts = {"tokens_predicted": usage.output_tokens, "tokens_evaluated": usage.prompt_tokens}
        return [
            self._event({"index": 0, "content": text, "tokens": [], "stop": False, **counts})
            for text in map(self._text, deltas)
            if text
        ]

    def _event(self, event: dict[str, Any]) -> bytes:
        return data(orjson.dumps(self._selected(event)))

    def _last(self, text: str) -> dict[str, Any]:
        """The whole answer, or the end of a stream."""
        usage, now_s = self._generation.usage, time.perf_counter()
        first_s = now_s if self._first_s is None else self._first_s
        num_computed = usage.prompt_tokens - usage.cached_tokens
        return {
            "index": 0,
            "content": text,
            "tokens": [],
            "stop": True,
            "model": self._model,
            "tokens_predicted": usage.output_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_tokens,
            "truncated": self._is_cut,
            "stop_type": self._stop_type(),
            "stopping_word": "",
            "timings": {
                "cache_n": usage.cached_tokens,
                **_speed("prompt", num_computed, first_s - self._began_s),
                **_speed("predicted", usage.output_tokens, now_s - first_s),
            },
            "penstock": penstock_object(usage, None),
        }

    def _stop_type(self) -> str:
        reason = self._generation.branches[0].finish_reason
        if reason is not FinishReason.STOP:  # of a loop: "none"
            return "limit" if reason is FinishReason.LENGTH else "none"
        newest = self._generation.output_token_ids(0)[-1:]
        return "word" if self._asked.stop and not self._ends & {*newest} else "eos"

    def _selected(self, answer: dict[str, Any]) -> dict[str, Any]:
        """What the caller wants of it."""
        if not self._asked.response_fields:
            return answer
        return {
            name: value
            for name in self._asked.response_fields
            if (value := _at(answer, name.split("/"))) is not None
        }


def _at(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _speed(name: str, num_tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / num_tokens if num_tokens else 0.0,
        f"{name}_per_second": num_tokens / seconds if seconds else 0.0,
    }


def _broken(error: Exception) -> bytes:
    return data(orjson.dumps(told(failure_of(error))))
