"""Drives the core's steps on asyncio, with httpx and websockets."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from .steps import (
    Action,
    Answer,
    Ask,
    Close,
    Dial,
    Invoke,
    Locked,
    Read,
    Request,
    Send,
    Sleep,
    Steps,
    T,
)
from .transport import (
    http_failure,
    http_request,
    lost,
    refused_handshake,
    socket_options,
    unreachable,
)


class AsyncIO:
    """An `AsyncRunner`. Tasks of one event loop may share it.

    Args:
        is_loopback: the server is on this machine; use no proxy.
    """

    def __init__(self, *, is_loopback: bool) -> None:
        self._is_loopback = is_loopback
        self._http = httpx.AsyncClient(trust_env=not is_loopback)

    def new_lock(self) -> asyncio.Lock:
        return asyncio.Lock()

    async def close(self) -> None:
        await self._http.aclose()

    async def run(self, steps: Steps[T]) -> T:
        try:
            action = next(steps)
            while True:
                try:
                    result = await self._perform(action)
                except BaseException as error:
                    action = steps.throw(error)
                else:
                    action = steps.send(result)
        except StopIteration as stop:
            returned: T = stop.value
            return returned

    async def _perform(self, action: Action) -> Any:
        match action:
            case Ask(request):
                return await self._ask(request)
            case Dial(url, headers):
                return await self._dial(url, headers)
            case Read(source):
                return await source.read()
            case Send(socket, text):
                return await socket.send(text)
            case Close(source):
                return await source.close()
            case Sleep(seconds):
                return await asyncio.sleep(seconds)
            case Invoke(function, arguments):
                # A function that blocks must not hold up the other streams.
                if inspect.iscoroutinefunction(function):
                    return await function(**arguments)
                return await asyncio.to_thread(function, **arguments)
            case Locked(lock, steps):
                async with lock:
                    return await self.run(steps)

    async def _ask(self, request: Request) -> Answer:
        built = http_request(self._http, request)
        try:
            response = await self._http.send(built, stream=request.is_stream)
            if request.is_stream and response.status_code == 200:
                return Answer(status=200, headers=response.headers, stream=_Body(response))
            body = await response.aread()
        except httpx.TransportError as error:
            raise http_failure(error) from None
        return Answer(status=response.status_code, headers=response.headers, body=body)

    async def _dial(self, url: str, headers: Mapping[str, str]) -> _Socket:
        try:
            connection = await connect(
                url, **socket_options(headers, is_loopback=self._is_loopback)
            )
        except InvalidStatus as error:
            raise refused_handshake(error.response) from None
        except (OSError, WebSocketException) as error:
            raise unreachable(error) from None
        return _Socket(connection)


class _Body:
    """The body of an answer, chunk by chunk."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._pieces = response.aiter_bytes()

    async def read(self) -> bytes:
        try:
            return await anext(self._pieces, b"")
        except (httpx.TransportError, httpx.StreamError) as error:
            raise lost(error) from None

    async def close(self) -> None:
        with contextlib.suppress(httpx.TransportError):
            await self._response.aclose()


class _Socket:
    """A WebSocket's messages."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def read(self) -> str:
        try:
            return await self._connection.recv(decode=True)
        except (OSError, WebSocketException) as error:
            raise lost(error) from None

    async def send(self, text: str) -> None:
        try:
            await self._connection.send(text)
        except (OSError, WebSocketException) as error:
            raise lost(error) from None

    async def close(self) -> None:
        with contextlib.suppress(OSError, WebSocketException):
            await self._connection.close()
