"""`/v1/chat/completions`. A stream cannot be resumed, since the server does not keep it. Requests
without a stream carry an idempotency key, by which a retry gets the same answer.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, Self, Unpack, cast

from ..errors import ConnectionLostError
from ..objects import ChatChoice, ChatChunk, ChatCompletion, ChatUsage
from ..operation import AsyncRunner, R, Resource, SyncRunner, operation
from ..output_format import OutputFormat, OutputType
from ..parameters import ChatParams, Messages, body_of
from ..server import Server, error_of
from ..sources import parse_json
from ..sse import SseParser
from ..steps import Close, Request, Steps, read_bytes


class Chat(Resource[R], Generic[R]):
    """Chat completions."""

    def __init__(self, runner: R, server: Server) -> None:
        super().__init__(runner)
        self._server = server

    @operation
    def create(
        self,
        *,
        model: str,
        messages: Messages,
        response_format: Mapping[str, Any] | None = None,
        **params: Unpack[ChatParams],
    ) -> Steps[ChatCompletion]:
        """A whole answer. A retry after a lost connection gets the same one."""
        body = body_of(params, model=model, messages=messages, response_format=response_format)
        return (yield from self._create(body))

    @operation
    def parse(
        self,
        *,
        model: str,
        messages: Messages,
        response_format: OutputType,
        **params: Unpack[ChatParams],
    ) -> Steps[ChatCompletion]:
        """A whole answer; `parsed` in each of its messages is of the `response_format`.

        Raises:
            UnfinishedOutputError: it did not end with `stop`.
            ValueError: `response_format` is of no known kind, or refuses the content.
        """
        output_format = OutputFormat(response_format)
        body = body_of(
            params,
            model=model,
            messages=messages,
            response_format=output_format.response_format(),
        )
        return output_format.parse_chat((yield from self._create(body)))

    def stream(
        self,
        *,
        model: str,
        messages: Messages,
        response_format: OutputType | None = None,
        **params: Unpack[ChatParams],
    ) -> ChatStream[R]:
        """A streamed completion, requested with the first read; with a `response_format`, `final`
        parses its content."""
        body = body_of(params, model=model, messages=messages, stream=True)
        output_format = None if response_format is None else OutputFormat(response_format)
        if output_format is not None:
            body["response_format"] = output_format.response_format()
        return ChatStream(self._runner, self._server, self._request(body), output_format)

    def _create(self, body: Mapping[str, Any]) -> Steps[ChatCompletion]:
        request = self._request(body)
        if self._server.retries.max_retries > 0 and has_one_output(body):
            key = {"Idempotency-Key": uuid.uuid4().hex}
            request = replace(request, headers={**request.headers, **key})
        answer: ChatCompletion = yield from self._server.call(request)
        return answer

    def _request(self, body: Mapping[str, Any]) -> Request:
        return self._server.request("POST", "/chat/completions", body=body)


class ChatStream(Resource[R], Generic[R]):
    """The chunks of one completion. Closing the stream stops the completion.

    Reading raises `ConnectionLostError` if the connection is lost; there is no retry then.

    Attributes:
        text: content of the first choice that was read.
    """

    def __init__(
        self,
        runner: R,
        server: Server,
        request: Request,
        output_format: OutputFormat | None = None,
    ) -> None:
        super().__init__(runner)
        self.text = ""
        self._output_format = output_format
        self._first: ChatChunk | None = None
        self._usage: ChatUsage | None = None
        self._choices: dict[int, ChatChoice] = {}
        self._server = server
        self._request = replace(request, is_stream=True)
        self._parser = SseParser()
        self._ready: deque[str] = deque()
        self._stream: Any = None
        self._is_over = False
        self._has_ended = False  # with [DONE]

    @operation
    def final(self) -> Steps[ChatCompletion]:
        """Read to the end and return the completion, parsed if there is a `response_format`.
        Its `usage` is None unless `stream_options` asks for it.

        Raises:
            UnfinishedOutputError: it has a `response_format`, and did not end with `stop`.
            ValueError: the stream was closed before its end, or `response_format` refuses the
                content.
        """
        while (yield from self._next()) is not None:
            pass
        if self._first is None or not self._has_ended:
            raise ValueError("the stream was closed before its end")
        whole: dict[str, Any] = {**self._first, "object": "chat.completion", "usage": self._usage}
        whole["choices"] = [choice for _, choice in sorted(self._choices.items())]
        completion = cast("ChatCompletion", whole)
        if self._output_format is not None:
            return self._output_format.parse_chat(completion)
        return completion

    @operation
    def close(self) -> Steps[None]:
        yield from self._close()

    def __iter__(self) -> Self:
        return self

    def __next__(self: ChatStream[SyncRunner]) -> ChatChunk:
        chunk = self._runner.run(self._next())
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(self: ChatStream[SyncRunner], *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self: ChatStream[AsyncRunner]) -> ChatChunk:
        chunk = await self._runner.run(self._next())
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self: ChatStream[AsyncRunner], *_: object) -> None:
        await self.close()

    def _next(self) -> Steps[ChatChunk | None]:
        if self._is_over:
            return None
        try:
            data = yield from self._data()
            chunk = None if data == "[DONE]" else parse_json(data)
            if chunk is not None and "error" in chunk:
                raise error_of({"status": 500, **chunk})
        except GeneratorExit:
            raise
        except BaseException:
            yield from self._close()
            raise
        if chunk is None:
            self._has_ended = True
            yield from self._close()
            return None
        self._gather(cast("ChatChunk", chunk))
        return cast("ChatChunk", chunk)

    def _gather(self, chunk: ChatChunk) -> None:
        self._first = self._first or chunk
        self._usage = chunk.get("usage") or self._usage
        for piece in chunk["choices"]:
            index, content = piece["index"], piece["delta"].get("content") or ""
            if index not in self._choices:
                self._choices[index] = {
                    "index": index,
                    "message": {"role": "assistant", "content": ""},
                    "finish_reason": None,
                    "logprobs": None,
                }
            choice = self._choices[index]
            choice["message"]["content"] += content
            for name in ("reasoning_content", "reasoning"):
                if name in piece["delta"]:
                    told = (choice["message"].get(name) or "") + (piece["delta"][name] or "")
                    choice["message"][name] = told or None
            choice["finish_reason"] = choice["finish_reason"] or piece["finish_reason"]
            logprobs = piece.get("logprobs")
            if logprobs and choice["logprobs"]:
                choice["logprobs"]["content"] += logprobs["content"]
            elif logprobs:
                choice["logprobs"] = {**logprobs, "content": [*logprobs["content"]]}
            if index == 0:
                self.text += content

    def _data(self) -> Steps[str]:
        if self._stream is None:
            self._stream = (yield from self._server.carry_through(self._request)).stream
        while not self._ready:
            data = yield from read_bytes(self._stream)
            if not data:
                raise ConnectionLostError("the stream ended without [DONE]")
            self._ready += (event.data for event in self._parser.feed(data))
        return self._ready.popleft()

    def _close(self) -> Steps[None]:
        self._is_over = True
        stream, self._stream = self._stream, None
        if stream is not None:
            yield Close(stream)


def has_one_output(body: Mapping[str, Any]) -> bool:
    """Whether the server accepts an idempotency key for it."""
    return (
        body.get("n", 1) == 1
        and not body.get("use_beam_search")
        and body.get("prompt_logprobs") is None
    )
