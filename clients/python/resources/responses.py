"""`/v1/responses` over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, Unpack

from ..event_stream import EventStream
from ..objects import Deleted, ItemPage, Response
from ..operation import R, Resource, operation
from ..output_format import OutputFormat, OutputType
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
        return (yield from self._create(body_of(params, model=model, input=input)))

    @operation
    def parse(
        self,
        *,
        model: str,
        text_format: OutputType,
        input: str | Messages | None = None,  # noqa: A002
        **params: Unpack[ResponseParams],
    ) -> Steps[Response]:
        """A whole answer; its `output_parsed` is of the `text_format`.

        Raises:
            UnfinishedOutputError: it did not complete.
            ValueError: `text_format` is of no known kind, or refuses the text.
        """
        body = body_of(params, model=model, input=input)
        output_format = OutputFormat(text_format)
        body["text"] = output_format.text(body.get("text"))
        return output_format.parse_response((yield from self._create(body)))

    def stream(
        self,
        *,
        model: str,
        input: str | Messages | None = None,  # noqa: A002
        text_format: OutputType | None = None,
        **params: Unpack[ResponseParams],
    ) -> EventStream[R]:
        """A streamed answer, requested with the first read; with a `text_format`, `final` parses
        its output."""
        body = body_of(params, model=model, input=input)
        output_format = None if text_format is None else OutputFormat(text_format)
        if output_format is not None:
            body["text"] = output_format.text(body.get("text"))
        source = SseSource(self._server, body, Track())
        return EventStream(self._runner, source, self._server.retries, output_format)

    def follow(
        self, response_id: str, *, starting_after: int = -1, text_format: OutputType | None = None
    ) -> EventStream[R]:
        """The events of an existing response, after an event's number. `text_format` is the one
        that was requested.

        Reading raises `ResponseExpiredError` if the server no longer keeps them.
        """
        output_format = None if text_format is None else OutputFormat(text_format)
        track = Track(response_id, starting_after=starting_after)
        source = SseSource(self._server, None, track)
        return EventStream(self._runner, source, self._server.retries, output_format)

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

    def _create(self, body: Mapping[str, Any]) -> Steps[Response]:
        answer: Response = yield from self._server.call(
            self._server.request(
                "POST", "/responses", body=body, is_repeatable=not leaves_a_turn(body)
            )
        )
        return answer
