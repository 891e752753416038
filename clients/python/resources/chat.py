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
from ..objects import ChatChunk, ChatCompletion
from ..operation import AsyncRunner, R, Resource, SyncRunner, operation
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
        self, *, model: str, messages: Messages, **params: Unpack[ChatParams]
    ) -> Steps[ChatCompletion]:
        """A whole answer. A retry after a lost connection gets the same one."""
        body = body_of(params, model=model, messages=messages)
        request = self._request(body)
        if self._server.retries.max_retries > 0 and has_one_output(body):
            key = {"Idempotency-Key": uuid.uuid4().hex}
            request = replace(request, headers={**request.headers, **key})
        answer: ChatCompletion = yield from self._server.call(request)
        return answer

    def stream(
        self, *, model: str, messages: Messages, **params: Unpack[ChatParams]
    ) -> ChatStream[R]:
        """A streamed completion, requested with the first read."""
        body = body_of(params, model=model, messages=messages, stream=True)
        return ChatStream(self._runner, self._server, self._request(body))

    def _request(self, body: Mapping[str, Any]) -> Request:
        return self._server.request("POST", "/chat/completions", body=body)


class ChatStream(Resource[R], Generic[R]):
    """The chunks of one completion. Closing the stream stops the completion.

    Reading raises `ConnectionLostError` if the connection is lost; there is no retry then.
    """

    def __init__(self, runner: R, server: Server, request: Request) -> None:
        super().__init__(runner)
        self._server = server
        self._request = replace(request, is_stream=True)
        self._parser = SseParser()
        self._ready: deque[str] = deque()
        self._stream: Any = None
        self._is_over = False

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
            yield from self._close()
        return cast("ChatChunk | None", chunk)

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
