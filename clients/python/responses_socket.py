"""Many responses side by side on one WebSocket, for both clients.

with client.connect() as socket:
    first = socket.create(model="demo", input="One.")
    second = socket.create(model="demo", input="Two.")
    print(first.final(), second.final())
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Self, Unpack

from .event_stream import EventStream
from .link import Link
from .operation import AsyncRunner, R, Resource, SyncRunner, operation
from .parameters import Messages, ResponseParams, body_of
from .server import Server
from .steps import Steps
from .track import Track


class ResponsesSocket(Resource[R], Generic[R]):
    """A WebSocket that connects when it is needed, and again when it was lost.

    The server runs at most 16 responses of one at a time, and 16 more wait there. Further ones wait
    here: `create` returns when one of those has ended.
    Its streams may be read by different threads or tasks.
    """

    def __init__(self, runner: R, server: Server) -> None:
        super().__init__(runner)
        self._server = server
        self._link = Link(server, runner.new_lock())

    @operation
    def create(
        self,
        *,
        model: str,
        input: str | Messages | None = None,  # noqa: A002 (OpenAI's name)
        generate: bool | None = None,
        **params: Unpack[ResponseParams],
    ) -> Steps[EventStream[R]]:
        """Ask for a response. Its events come as the result is read.

        Args:
            generate: false prepares the prompt and answers nothing.
        """
        body = body_of(params, model=model, input=input, generate=generate)
        return (yield from self._stream(body, Track()).begin())

    @operation
    def follow(self, response_id: str, *, starting_after: int = -1) -> Steps[EventStream[R]]:
        """The events of a response that is there already, from behind a number."""
        track = Track(response_id, starting_after=starting_after)
        return (yield from self._stream(None, track).begin())

    @operation
    def close(self) -> Steps[None]:
        """Its streams end with `ConnectionLostError` then."""
        yield from self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self: ResponsesSocket[SyncRunner], *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self: ResponsesSocket[AsyncRunner], *_: object) -> None:
        await self.close()

    def _stream(self, body: Mapping[str, Any] | None, track: Track) -> EventStream[R]:
        return EventStream(self._runner, self._link.lane(body, track), self._server.retries)
