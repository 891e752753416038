"""`POST /v1/completions`: one prompt or several, each a choice of its own."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.text import Tokenizer
from penstock.gateway.endpoints.http import CLIENT_GONE, json_response, read_json, unless_gone
from penstock.gateway.endpoints.usage import StreamUsage, usage_object
from penstock.gateway.errors import failure_of
from penstock.gateway.generation import Delta, Generation, Generator, merged
from penstock.gateway.logprobs import TokenLists
from penstock.gateway.schemas import CompletionRequest, parse_request
from penstock.gateway.sse import DONE, EventStream, data


class Completions:
    """The endpoint.

    Args:
        ping_s: silence on a stream after which a comment is sent.
    """

    def __init__(self, generator: Generator, *, max_body_bytes: int, ping_s: float) -> None:
        self._generator = generator
        self._max_body_bytes = max_body_bytes
        self._ping_s = ping_s

    async def create(self, request: Request) -> Response | EventStream:
        body = await read_json(request, max_bytes=self._max_body_bytes)
        completion = parse_request(CompletionRequest, body)
        model = self._generator.model.require(completion.model)
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        generations = [
            self._generator.plan(
                f"{completion_id}-{index}",
                await self._token_ids(prompt, completion.add_special_tokens),
                request=completion,
                param="prompt",
            )
            for index, prompt in enumerate(completion.prompts)
        ]
        answer = _Answer(
            completion, generations, model=model, tokenizer=self._generator.model.tokenizer
        )
        if completion.stream:
            return EventStream(answer.stream(), ping_s=self._ping_s)
        whole = await unless_gone(request, answer.whole())
        return Response(status_code=CLIENT_GONE) if whole is None else json_response(whole)

    async def _token_ids(
        self, prompt: str | Sequence[int], add_special_tokens: bool
    ) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        return await self._generator.tokenise(prompt, add_special_tokens=add_special_tokens)


class _Answer:
    """One completion, of one choice per prompt."""

    def __init__(
        self,
        completion: CompletionRequest,
        generations: Sequence[Generation],
        *,
        model: str,
        tokenizer: Tokenizer,
    ) -> None:
        self._generations = generations
        self._wants_logprobs = completion.logprobs is not None
        self._token_lists = [TokenLists(tokenizer) for _ in generations]
        self._includes_usage = completion.stream_options.include_usage
        self._usage = StreamUsage(completion.stream_options)
        self._head = {
            "id": generations[0].request.request_id.rpartition("-")[0],
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    async def whole(self) -> dict[str, Any]:
        """The completion as one object."""
        pieces: list[list[str]] = [[] for _ in self._generations]
        entries: list[list[Any]] = [[] for _ in self._generations]
        async with contextlib.aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                pieces[index].append(delta.text)
                entries[index] += delta.logprobs
        choices = [
            self._choice(index, Delta("".join(pieces[index]), tuple(entries[index])), is_last=True)
            for index in range(len(self._generations))
        ]
        return {**self._head, "choices": choices, "usage": self._total_usage()}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The completion as events; `[DONE]` comes last whatever happens."""
        try:
            async with contextlib.aclosing(self._deltas()) as deltas:
                async for index, delta in deltas:
                    yield self._chunk([self._choice(index, delta)])
            last = b"".join(
                self._chunk([self._choice(index, Delta(""), is_last=True)])
                for index in range(len(self._generations))
            )
            if self._includes_usage:
                last += self._event([], self._total_usage())
        except Exception as error:
            last = data(orjson.dumps(failure_of(error).body()))
        yield last + DONE

    async def _deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        with contextlib.ExitStack() as stack:
            for generation in self._generations:
                stack.enter_context(generation)
            async with contextlib.aclosing(merged(self._generations)) as deltas:
                async for index, delta in deltas:
                    yield index, delta

    def _choice(self, index: int, delta: Delta, *, is_last: bool = False) -> dict[str, Any]:
        reason = self._generations[index].finish_reason if is_last else None
        has_logprobs = self._wants_logprobs and bool(delta.logprobs or delta.text)
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._token_lists[index].take(delta.logprobs) if has_logprobs else None,
            "finish_reason": None if reason is None else reason.value,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return self._event(choices, self._usage.of_chunk(self._generations))

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        chunk = {**self._head, "choices": choices}
        if self._usage.is_shown:
            chunk["usage"] = usage
        return data(orjson.dumps(chunk))

    def _total_usage(self) -> dict[str, Any]:
        return usage_object(generation.usage for generation in self._generations)
