"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.text import Tokenizer
from penstock.gateway.endpoints.http import CLIENT_GONE, json_response, read_json, unless_gone
from penstock.gateway.endpoints.usage import StreamUsage, usage_object
from penstock.gateway.errors import failure_of
from penstock.gateway.generation import ChatPrompt, Generation, Generator
from penstock.gateway.logprobs import token_objects
from penstock.gateway.schemas import ChatRequest, parse_request
from penstock.gateway.sse import DONE, EventStream, data


class ChatCompletions:
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
        chat = parse_request(ChatRequest, body)
        model = self._generator.model.require(chat.model)
        prompt_token_ids = await self._generator.tokenise_chat(
            ChatPrompt(
                messages=[message.for_template() for message in chat.messages],
                add_generation_prompt=chat.add_generation_prompt,
                add_special_tokens=chat.add_special_tokens,
                template=chat.chat_template,
                kwargs=chat.chat_template_kwargs,
            )
        )
        completion_id = f"chatcmpl-{uuid.uuid4().hex}"
        generation = self._generator.plan(
            completion_id, prompt_token_ids, request=chat, param="messages"
        )
        answer = _Answer(chat, generation, model=model, tokenizer=self._generator.model.tokenizer)
        if chat.stream:
            return EventStream(answer.stream(), ping_s=self._ping_s)
        whole = await unless_gone(request, answer.whole())
        return Response(status_code=CLIENT_GONE) if whole is None else json_response(whole)


class _Answer:
    """One completion in chat's shape."""

    def __init__(
        self, chat: ChatRequest, generation: Generation, *, model: str, tokenizer: Tokenizer
    ) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        self._generation = generation
        self._usage = StreamUsage(chat.stream_options)
        self._head = {
            "id": generation.request.request_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    async def whole(self) -> dict[str, Any]:
        """The completion as one object."""
        pieces: list[str] = []
        tokens: list[dict[str, Any]] = []
        with self._generation as generation:
            while (delta := await generation.next()) is not None:
                pieces.append(delta.text)
                tokens += token_objects(self._tokenizer, delta.logprobs)
        assert generation.finish_reason is not None
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(pieces), "refusal": None},
            "logprobs": {"content": tokens, "refusal": None} if self._chat.logprobs else None,
            "finish_reason": generation.finish_reason.value,
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage_object([generation.usage]),
        }

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The completion as events; `[DONE]` comes last whatever happens."""
        try:
            head = self._chunk({"role": "assistant", "content": ""})
            with self._generation as generation:
                while (delta := await generation.next()) is not None:
                    tokens = token_objects(self._tokenizer, delta.logprobs)
                    yield head + self._chunk({"content": delta.text}, tokens=tokens)
                    head = b""  # it came with the first text, so the first event means progress
            assert generation.finish_reason is not None
            last = head + self._chunk({}, finish_reason=generation.finish_reason.value)
            if self._chat.stream_options.include_usage:
                last += self._event([], usage_object([generation.usage]))
        except Exception as error:
            last = data(orjson.dumps(failure_of(error).body()))
        yield last + DONE

    def _chunk(
        self,
        delta: dict[str, Any],
        *,
        tokens: list[dict[str, Any]] | None = None,
        finish_reason: str | None = None,
    ) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": {"content": tokens, "refusal": None} if tokens else None,
            "finish_reason": finish_reason,
        }
        return self._event([choice], self._usage.of_chunk([self._generation]))

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None) -> bytes:
        chunk = {**self._head, "object": "chat.completion.chunk", "choices": choices}
        if self._usage.is_shown:
            chunk["usage"] = usage
        return data(orjson.dumps(chunk))
