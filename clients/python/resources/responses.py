"""`/v1/responses` over HTTP."""

from __future__ import annotations

from typing import Generic, Literal, Unpack

from ..event_stream import EventStream
from ..objects import Deleted, ItemPage, Response
from ..operation import R, Resource, operation
from ..parameters import Messages, ResponseParams, body_of
from ..server import Server
from ..sources import SseSource, leaves_a_turn
from ..steps import Steps
from ..track import Track


class Responses(Resource[R], Generic[R]):
    """Responses, which the server keeps and later requests can continue."""

    def __init__(self, runner: R, server: Server) -> None:
        super().__init__(runner)
        self._server = server

    @operation
    def create(
        self,
        *,
        model: str,
        input: str | Messages | None = None,  # noqa: A002 (OpenAI's name)
        **params: Unpack[ResponseParams],
    ) -> Steps[Response]:
        """A whole answer; with `background=True`, returns as soon as it has started."""
        body = body_of(params, model=model, input=input)
        answer: Response = yield from self._server.call(
            self._server.request(
                "POST", "/responses", body=body, is_repeatable=not leaves_a_turn(body)
            )
        )
        return answer

    def stream(
        self,
        *,
        model: str,
        input: str | Messages | None = None,  # noqa: A002
        **params: Unpack[ResponseParams],
    ) -> EventStream[R]:
        """A streamed answer, requested with the first read."""
        source = SseSource(self._server, body_of(params, model=model, input=input), Track())
        return EventStream(self._runner, source, self._server.retries)

    def follow(self, response_id: str, *, starting_after: int = -1) -> EventStream[R]:
        """The events of an existing response, after an event's number.

        Reading raises `ResponseExpiredError` if the server no longer keeps them.
        """
        track = Track(response_id, starting_after=starting_after)
        return EventStream(self._runner, SseSource(self._server, None, track), self._server.retries)

    @operation
    def retrieve(self, response_id: str) -> Steps[Response]:
        answer: Response = yield from self._server.call(
            self._server.request("GET", f"/responses/{response_id}")
        )
        return answer

    @operation
    def cancel(self, response_id: str) -> Steps[Response]:
        """Stop a response, wherever it runs, and return it."""
        answer: Response = yield from self._server.call(
            self._server.request("POST", f"/responses/{response_id}/cancel")
        )
        return answer

    @operation
    def delete(self, response_id: str) -> Steps[Deleted]:
        answer: Deleted = yield from self._server.call(
            self._server.request("DELETE", f"/responses/{response_id}", is_repeatable=False)
        )
        return answer

    @operation
    def input_items(
        self,
        response_id: str,
        *,
        limit: int | None = None,
        after: str | None = None,
        order: Literal["asc", "desc"] | None = None,
    ) -> Steps[ItemPage]:
        """A page of the response's input items."""
        query = {"limit": limit, "after": after, "order": order}
        answer: ItemPage = yield from self._server.call(
            self._server.request("GET", f"/responses/{response_id}/input_items", query=query)
        )
        return answer
