"""`/v1/responses` over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, Unpack

from ..event_stream import EventStream
from ..objects import Deleted, ItemPage, Response, Steer
from ..operation import R, Resource, operation
from ..output_format import OutputFormat, OutputType
from ..parameters import Messages, ResponseParams, ToolResponseParams, body_of
from ..server import Server
from ..sources import SseSource, leaves_a_turn
from ..steps import Steps
from ..tools import Tool, ToolRun
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
        **params: Unpack[ToolResponseParams],
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
        **params: Unpack[ToolResponseParams],
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
        **params: Unpack[ToolResponseParams],
    ) -> EventStream[R]:
        """A streamed answer, requested with the first read; with a `text_format`, `final` parses
        its output."""
        body = body_of(params, model=model, input=input)
        output_format = None if text_format is None else OutputFormat(text_format)
        if output_format is not None:
            body["text"] = output_format.text(body.get("text"))
        source = SseSource(self._server, body, Track())
        return EventStream(self._runner, source, self._server.retries, output_format)

    def run_tools(
        self,
        *,
        model: str,
        tools: Sequence[Tool | Callable[..., Any]],
        input: str | Messages | None = None,  # noqa: A002
        max_rounds: int = 16,
        **params: Unpack[ResponseParams],
    ) -> ToolRun[R]:
        """An answer for which the model may call these functions; each call is executed once.

        Iterate over it for the events of all rounds, or call `final` for the last response.

        Args:
            tools: functions with annotations and documentation, or `Tool`s.
            max_rounds: answers, of which the last one's calls are not executed.
        """
        known = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in tools]
        body = body_of(params, model=model, input=input)
        body["tools"] = [tool.definition for tool in known]

        def ask(body: Mapping[str, Any]) -> EventStream[R]:
            source = SseSource(self._server, dict(body), Track())
            return EventStream(self._runner, source, self._server.retries)

        return ToolRun(self._runner, ask, body, known, max_rounds=max_rounds)

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
    def steer(self, response_id: str, input: str | Messages) -> Steps[Steer]:  # noqa: A002
        """Have a response that runs end for this input (a text, or messages of the user), which its
        successor answers. It is sent until the server has said what became of it, and takes effect
        once.

        Raises:
            RefusedError: nothing was taken; `code` says why: `response_already_completed`, ….
        """
        told: Steer = yield from self._server.steer(response_id, input)
        return told

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
