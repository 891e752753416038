"""Shared by chat completions and completions: an answer of one or several choices, whole or as a
stream of chunks.

Each endpoint defines the format of its choices.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
import re
import uuid
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

import orjson

from penstock.engine.request import FinishReason
from penstock.gateway.api.schema.fields import StreamOptions
from penstock.gateway.errors import failure_of
from penstock.gateway.generation.branch import Delta
from penstock.gateway.generation.generation import (
    DeltaSource,
    Merged,
    Output,
    Usage,
    collected,
    penstock_object,
    total,
)
from penstock.gateway.generation.prediction import num_accepted
from penstock.gateway.http.event_stream import DONE, EventStream, ResumedEventStream, data
from penstock.gateway.http.raw_writer import RawWriter, pump
from penstock.gateway.sources import consume, next_of
from penstock.gateway.telemetry.request_record import told

_ID = re.compile("[-_]")  # separates a request id's prefix, its random part and the prompt's number
_LONG_PROMPT_TOKENS = 256  # from here on a thread converts the prompt's logprobs to JSON
_LONG_PREDICTION_TOKENS = 4096  # from here on a thread compares it with the output

_ANY_TEXT = uuid.uuid4().hex  # stands for a text

Choice = dict[str, Any]


class Answer(abc.ABC):
    """One answer; to be read once, whole or as a stream.

    Choices are numbered consecutively: first those of the first prompt, then the second's, and so
    on.

    Args:
        generations: one per prompt, each with the same number of choices.
        model: the model name in the answer.
        fingerprint: names the server's version and the weights.
        returns_token_ids: whether choices and chunks list their token ids.
    """

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_name: ClassVar[str]

    def __init__(
        self,
        generations: Sequence[DeltaSource],
        *,
        model: str,
        fingerprint: str,
        options: StreamOptions,
        returns_token_ids: bool,
    ) -> None:
        self.generations = generations
        self.num_each = generations[0].num_wanted
        first = generations[0].request
        self._head = {
            "id": f"{self.id_prefix}-{_ID.split(first.request_id)[1]}",
            "created": int(first.arrival_s),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._usage = StreamUsage(options)
        self._prompts_seen: set[int] = set()
        self._returns_token_ids = returns_token_ids
        self._num_sent: dict[int, int] = {}  # token ids sent in chunks, by choice
        has_logprobs = first.sampling_params.logprobs is not None
        self._tells_every_token = returns_token_ids or options.is_usage_continuous
        self._has_only_text = not (has_logprobs or self._tells_every_token)
        self._frames: dict[int, tuple[bytes, bytes]] = {}  # around the text of a chunk, by choice

    @abc.abstractmethod
    def add_prompt(self, number: int) -> None:
        """A prompt's logprobs are complete. Called once before its choices, maybe in a thread."""

    @abc.abstractmethod
    def choice(self, index: int, output: Output) -> Choice:
        """A whole choice."""

    def is_silence(self, delta: Delta) -> bool:
        """Whether a delta without anything that is shown has a chunk all the same, as there are
        more tokens."""
        return self._tells_every_token and not (delta.text or delta.finish_reason or delta.is_told)

    @abc.abstractmethod
    def pieces(self, index: int, delta: Delta) -> list[Choice]:
        """A delta's choices, each for a chunk of its own."""

    def extras(self) -> dict[str, Any]:
        """Further fields of a whole answer."""
        return {}

    def chunk_extras(self) -> dict[str, Any]:
        """Further fields of the next chunk."""
        return {}

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        outputs = await collected(self.generations)
        for number in range(len(self.generations)):
            await self._see_prompt(number)
        return {
            **self._head,
            "object": self.object_name,
            "choices": [
                self.choice(index, output) | self._next_token_ids(index)
                for index, output in enumerate(itertools.chain.from_iterable(outputs))
            ],
            "usage": await self._total_usage(),
            "penstock": self._penstock(),
            **self.extras(),
        }

    def event_stream(self, *, is_resumed: bool, ping_s: float) -> EventStream:
        """The answer as a response; `is_resumed`: another request has begun it."""
        kind = ResumedEventStream if is_resumed else EventStream
        return kind(self._write_to, ping_s=ping_s, on_error=error_events)

    async def _write_to(self, out: RawWriter) -> None:
        """Write the answer as events, `[DONE]` last; after an exception `error_events` ends it."""
        with Merged(self.generations) as merged:
            # A prompt's logprobs may need a thread, so a task writes until all have been seen.
            while len(self._prompts_seen) < len(self.generations):
                deltas = await next_of(merged)
                if deltas is None:
                    break
                for number, delta in deltas:
                    if not delta.is_told:  # nothing has been computed
                        await self._see_prompt(number)
                for payload in self._encoded(deltas):
                    if not out.write(payload):
                        await out.drained()
            if len(self.generations) == 1:
                await self._write_only(self.generations[0], out)
            else:
                await pump(merged, self._encoded, out)
        last = b""
        if self._usage.is_shown:
            usage = await self._total_usage()
            last = self._event([], usage, penstock=self._penstock())
        out.write(last + DONE)

    def _penstock(self) -> dict[str, Any]:
        """penstock's own part of a whole answer."""
        used = total(each.usage for each in self.generations)
        return penstock_object(used, self.generations[0].cache)

    def _encoded(self, deltas: Sequence[tuple[int, Delta]]) -> Sequence[bytes]:
        """What arrives together is one write."""
        events: list[bytes] = []
        for number, delta in deltas:
            events += self._events(number * self.num_each + delta.index, delta)
        return (b"".join(events),) if events else ()

    async def _write_only(self, generation: DeltaSource, out: RawWriter) -> None:
        """Write the rest of the only generation: as `pump` does, in less time."""
        frames, events_of, write = self._frames, self._events, out.write

        def handle(deltas: Sequence[Delta]) -> bool:
            delta = deltas[0]
            if len(deltas) == 1 and delta.text and delta.finish_reason is None:
                frame = frames.get(delta.index)
                if frame is not None:
                    return write(b"".join((frame[0], orjson.dumps(delta.text), frame[1])))
            events = [event for each in deltas for event in events_of(each.index, each)]
            return not events or write(b"".join(events))

        while not await consume(generation, handle):
            await out.drained()

    def _events(self, index: int, delta: Delta) -> Sequence[bytes]:
        """A delta's events, or pieces of them."""
        if delta.is_told and (delta.progress is not None or delta.queue_position is not None):
            return self._progress(delta)
        frame = self._frames.get(index)
        if frame is None or delta.finish_reason is not None or not delta.text:
            return self._general(index, delta)
        return frame[0], orjson.dumps(delta.text), frame[1]

    def _progress(self, delta: Delta) -> Sequence[bytes]:
        """A chunk without choices about what the request waits for."""
        if delta.progress is None:
            return ()  # `progress` tells the position too
        chunk = {
            **self._head,
            "object": self.chunk_name,
            "choices": [],
            "penstock": {"progress": delta.progress},
        }
        return (data(orjson.dumps(chunk)),)

    def _general(self, index: int, delta: Delta) -> list[bytes]:
        """A delta's events. What surrounds the text is kept, if that is all that will change."""
        pieces = self._pieces(index, delta)
        if delta.text and self._has_only_text and delta.finish_reason is None:
            [piece] = self.pieces(index, Delta(delta.index, _ANY_TEXT))
            start, end = self._event([piece], None).split(orjson.dumps(_ANY_TEXT))
            self._frames[index] = start, end
        return [self._event([piece], self._usage.of_chunk(self.generations)) for piece in pieces]

    def _pieces(self, index: int, delta: Delta) -> list[Choice]:
        pieces = self.pieces(index, delta)
        if pieces and self._returns_token_ids:
            _carrier(pieces, delta).update(self._next_token_ids(index))
        return pieces

    def _next_token_ids(self, index: int) -> dict[str, list[int]]:
        """The token ids of a choice that were not sent yet, if they were asked for."""
        if not self._returns_token_ids:
            return {}
        number, rank = divmod(index, self.num_each)
        token_ids = self.generations[number].output_token_ids(rank)
        first = self._num_sent.get(index, 0)
        self._num_sent[index] = len(token_ids)
        return {"token_ids": list(token_ids[first:])}

    async def _see_prompt(self, number: int) -> None:
        if number in self._prompts_seen:
            return
        self._prompts_seen.add(number)
        num_entries = len(self.generations[number].prompt_logprobs)
        if num_entries >= _LONG_PROMPT_TOKENS:
            await asyncio.to_thread(self.add_prompt, number)
        else:
            self.add_prompt(number)

    def _event(self, choices: list[Choice], usage: dict[str, Any] | None, **more: Any) -> bytes:
        chunk = {
            **self._head,
            "object": self.chunk_name,
            "choices": choices,
            **self.chunk_extras(),
            **more,
        }
        if self._usage.is_shown:
            chunk["usage"] = usage
        return data(orjson.dumps(chunk))

    async def _total_usage(self) -> dict[str, Any]:
        for generation in self.generations:
            await generation.settle()
        usage = usage_object(generation.usage for generation in self.generations)
        predicted = [
            (prediction, generation.output_token_ids(rank))
            for generation in self.generations
            if (prediction := generation.request.prediction_token_ids)
            for rank in range(self.num_each)
        ]
        if predicted:
            num_predicted = sum(len(prediction) for prediction, _ in predicted)
            count = partial(sum, itertools.starmap(num_accepted, predicted))
            is_long = num_predicted >= _LONG_PREDICTION_TOKENS
            num_right = await asyncio.to_thread(count) if is_long else count()
            usage.setdefault("completion_tokens_details", {}).update(
                accepted_prediction_tokens=num_right,
                rejected_prediction_tokens=num_predicted - num_right,
            )
        return usage


def _carrier(pieces: Sequence[Choice], delta: Delta) -> Choice:
    """The piece that a delta's token ids go with: that with the tokens' logprobs, else with their
    text."""
    if delta.text or delta.pieces or delta.logprobs:
        told = [piece for piece in pieces if piece["finish_reason"] is None]
        return next((piece for piece in told if piece["logprobs"]), [*pieces[-1:], *told][-1])
    return pieces[-1]


def ending_of(reason: FinishReason) -> Choice:
    """Why a choice ended."""
    if reason is FinishReason.REPETITION:
        return {"finish_reason": reason.told, "stop_reason": reason.value}
    return {"finish_reason": reason.told}


def error_events(error: Exception) -> bytes:
    """The last events of a stream that failed."""
    return data(orjson.dumps(told(failure_of(error)))) + DONE


def usage_object(usages: Iterable[Usage]) -> dict[str, Any]:
    """The sum of several generations' usage."""
    usages = list(usages)
    num_prompt_tokens = sum(usage.prompt_tokens for usage in usages)
    num_output_tokens = sum(usage.output_tokens for usage in usages)
    num_reasoning_tokens = sum(usage.reasoning_tokens for usage in usages)
    details: dict[str, Any] = {}
    if num_reasoning_tokens:
        details["completion_tokens_details"] = {"reasoning_tokens": num_reasoning_tokens}
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        **details,
    }


class StreamUsage:
    """The `usage` of each chunk of a stream, by `stream_options`."""

    def __init__(self, options: StreamOptions) -> None:
        self.is_shown = options.include_usage
        self._is_continuous = options.is_usage_continuous

    def of_chunk(self, generations: Sequence[DeltaSource]) -> dict[str, Any] | None:
        """Usage in a chunk before the last: null, unless a running count was asked for."""
        if not self._is_continuous:
            return None
        return usage_object(generation.usage for generation in generations)
