"""`Client` and `AsyncClient`: the same core, driven by blocking I/O or on asyncio."""

from __future__ import annotations

import os
from typing import Generic, Self

from .async_io import AsyncIO
from .operation import AsyncRunner, R, SyncRunner
from .resources.chat import Chat
from .resources.conversations import Conversations
from .resources.embeddings import Embeddings
from .resources.models import Models
from .resources.responses import Responses
from .responses_socket import ResponsesSocket
from .retries import RetryPolicy
from .server import Server
from .sync_io import SyncIO

DEFAULT_URL = "http://127.0.0.1:8000"


class _Client(Generic[R]):
    """The common part of both clients.

    Attributes:
        chat: `/v1/chat/completions`.
        conversations: `/v1/conversations`.
        embeddings: `/v1/embeddings`, `/v1/rerank` and `/v1/score`.
        models: `/v1/models`.
        responses: `/v1/responses` over HTTP; use `connect` for a WebSocket.
    """

    def __init__(self, runner: R, server: Server) -> None:
        self.chat = Chat(runner, server)
        self.conversations = Conversations(runner, server)
        self.embeddings = Embeddings(runner, server)
        self.models = Models(runner, server)
        self.responses = Responses(runner, server)
        self._runner = runner
        self._server = server

    @property
    def base_url(self) -> str:
        """Without `/v1`."""
        return self._server.base_url

    def connect(self) -> ResponsesSocket[R]:
        """A WebSocket for many responses at once. It connects on first use."""
        return ResponsesSocket(self._runner, self._server)


class Client(_Client[SyncRunner]):
    """A blocking client of a penstock server. Threads may share it.

    Args:
        base_url: with or without `/v1`.
        api_key: None uses the first key in the environment variable `PENSTOCK_API_KEY`.
        retries: when and how often to retry.

    Raises:
        ValueError: `base_url` is not an address.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        retries: RetryPolicy | None = None,
    ) -> None:
        server = Server.parse(base_url, api_key=api_key or _key(), retries=retries)
        self._io = SyncIO(is_loopback=server.is_loopback)
        super().__init__(self._io, server)

    def close(self) -> None:
        self._io.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(_Client[AsyncRunner]):
    """A client on asyncio, for the tasks of one event loop; arguments as in `Client`."""

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        retries: RetryPolicy | None = None,
    ) -> None:
        server = Server.parse(base_url, api_key=api_key or _key(), retries=retries)
        self._io = AsyncIO(is_loopback=server.is_loopback)
        super().__init__(self._io, server)

    async def close(self) -> None:
        await self._io.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _key() -> str | None:
    return os.environ.get("PENSTOCK_API_KEY", "").split(",")[0].strip() or None
