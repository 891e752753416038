"""Drives the core's steps with blocking I/O: httpx and `websockets.sync`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any

import httpx
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

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


class SyncIO:
    """A `SyncRunner`. Threads may share it.

    Args:
        is_loopback: the server is on this machine; use no proxy.
    """

    def __init__(self, *, is_loopback: bool) -> None:
        self._is_loopback = is_loopback
        self._http = httpx.Client(trust_env=not is_loopback)

    def new_lock(self) -> threading.Lock:
        return threading.Lock()

    def close(self) -> None:
        self._http.close()

    def run(self, steps: Steps[T]) -> T:
        try:
            action = next(steps)
            while True:
                try:
                    result = self._perform(action)
                except BaseException as error:
                    action = steps.throw(error)
                else:
                    action = steps.send(result)
        except StopIteration as stop:
            returned: T = stop.value
            return returned

    def _perform(self, action: Action) -> Any:
        match action:
            case Ask(request):
                return self._ask(request)
            case Dial(url, headers):
                return self._dial(url, headers)
            case Read(source):
                return source.read()
            case Send(socket, text):
                return socket.send(text)
            case Close(source):
                return source.close()
            case Sleep(seconds):
                return time.sleep(seconds)
            case Invoke(function, arguments):
                return function(**arguments)
            case Locked(lock, steps):
                with lock:
                    return self.run(steps)

    def _ask(self, request: Request) -> Answer:
        built = http_request(self._http, request)
        try:
            response = self._http.send(built, stream=request.is_stream)
            if request.is_stream and response.status_code == 200:
                return Answer(status=200, headers=response.headers, stream=_Body(response))
            body = response.read()
        except httpx.TransportError as error:
            raise http_failure(error) from None
        return Answer(status=response.status_code, headers=response.headers, body=body)

    def _dial(self, url: str, headers: Mapping[str, str]) -> _Socket:
        try:
            options = socket_options(headers, is_loopback=self._is_loopback)
            # Entered here, closed elsewhere: what `connect` itself returns will change.
            connection = connect(url, **options).__enter__()
        except InvalidStatus as error:
            raise refused_handshake(error.response) from None
        except (OSError, WebSocketException) as error:
            raise unreachable(error) from None
        return _Socket(connection)


class _Body:
    """The body of an answer, chunk by chunk."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._pieces = response.iter_bytes()

    def read(self) -> bytes:
        try:
            return next(self._pieces, b"")
        except (httpx.TransportError, httpx.StreamError) as error:
            raise lost(error) from None

    def close(self) -> None:
        with contextlib.suppress(httpx.TransportError):
            self._response.close()


class _Socket:
    """A WebSocket's messages."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    def read(self) -> str:
        try:
            return self._connection.recv(decode=True)
        except (OSError, WebSocketException) as error:
            raise lost(error) from None

    def send(self, text: str) -> None:
        try:
            self._connection.send(text)
        except (OSError, WebSocketException) as error:
            raise lost(error) from None

    def close(self) -> None:
        with contextlib.suppress(OSError, WebSocketException):
            self._connection.close()
