"""`/v1/responses`: create, retrieve, resume, cancel and delete responses, list input items, and
count input tokens.

`events` makes the events, which are those that the WebSocket sends.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.api.responses.compaction import compacted
from penstock.gateway.api.responses.events import Event, response_object
from penstock.gateway.api.responses.logged_generation import as_exception
from penstock.gateway.api.responses.prompt import items_of
from penstock.gateway.api.responses.response_task import ResponseTask
from penstock.gateway.api.responses.schema import CompactRequest, ResponsesRequest
from penstock.gateway.api.responses.service import ResponseService
from penstock.gateway.api.responses.steering import (
    SteerRequest,
    derived_steer_id,
    new_steer_id,
)
from penstock.gateway.api.responses.subscriber import Subscriber, check_start, starting_after_of
from penstock.gateway.api.schema.parsing import parse_request
from penstock.gateway.api.shared.idempotency import (
    IdempotencyKey,
    IdempotentAnswers,
    idempotency_key,
    refuse_with_key,
)
from penstock.gateway.api.shared.items import ItemsQuery, item_page
from penstock.gateway.api.shared.json_api import (
    CLIENT_GONE,
    json_response,
    parsed,
    read_json,
    unless_gone,
)
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of, deadline_of
from penstock.gateway.errors import RequestRefusedError, failure_of
from penstock.gateway.http.event_stream import EventStream, ResumedEventStream, named
from penstock.gateway.sources import next_of
from penstock.gateway.storage.conversations.ids import new_response_id
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.telemetry.request_record import told

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_ONE = "/v1/responses/{response_id}"


class Responses:
    """The endpoints.

    Args:
        answers: finds responses to requests with an `Idempotency-Key`.
        ping_s: seconds of silence on a stream before a comment is sent.
    """

    def __init__(
        self,
        service: ResponseService,
        answers: IdempotentAnswers,
        *,
        max_body_bytes: int,
        ping_s: float,
    ) -> None:
        self._service = service
        self._answers = answers
        self._max_body_bytes = max_body_bytes
        self._ping_s = ping_s

    @operation(
        "POST /v1/responses",
        "Create a response.",
        "Response",
        body=(ResponsesRequest,),
        statuses=(404, 409, 429),
        streams=True,
        example={"input": "Hello", "max_output_tokens": 16},
        links={"response_id": "$response.body#/id"},
        next_bodies={
            "POST /v1/responses": {"input": "More", "previous_response_id": "$response.body#/id"},
        },
    )
    async def create(self, request: Request) -> Response | EventStream:
        body = await read_json(request, max_bytes=self._max_body_bytes)
        asked = await parsed(self._service.paced_work, ResponsesRequest, body, parse_request)
        key = idempotency_key(request, body, caller_of(request.scope))
        log, task = await self._started(request, asked, body, key)
        if asked.stream:
            subscriber = Subscriber(log, notices=asked.penstock.events)
            is_live = task is not None and not asked.background
            return self._live(subscriber) if is_live else self._resumed(subscriber)
        if asked.background:
            return json_response(response_object(log))
        whole = await unless_gone(request, self._whole(log))
        if whole is None:
            return Response(status_code=CLIENT_GONE)
        if task is not None and task.failure is not None:
            return task.failure.response()
        if task is None and whole["error"] is not None:
            raise as_exception(whole["error"]["code"], whole["error"]["message"])
        return json_response(whole)

    @operation(
        "POST /v1/responses/input_tokens",
        "Count the tokens of a response's input.",
        "InputTokens",
        body=(ResponsesRequest,),
        statuses=(404, 409),
        example={"input": "Hello"},
    )
    async def input_tokens(self, request: Request) -> Response:
        body = await read_json(request, max_bytes=self._max_body_bytes)
        asked = await parsed(self._service.paced_work, ResponsesRequest, body, parse_request)
        count = self._service.num_input_tokens(asked, caller_of(request.scope))
        num_tokens = await unless_gone(request, count)
        if num_tokens is None:
            return Response(status_code=CLIENT_GONE)
        return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})

    @operation(
        "POST /v1/responses/compact",
        "Summarise a conversation.",
        "CompactedResponse",
        body=(CompactRequest,),
        statuses=(404, 409, 429),
        example={"input": "Hello", "max_output_tokens": 16},
    )
    async def compact(self, request: Request) -> Response:
        body = await read_json(request, max_bytes=self._max_body_bytes)
        asked = await parsed(self._service.paced_work, CompactRequest, body, parse_request)
        prompt, plan = await self._service.compaction(
            asked, caller_of(request.scope), deadline_s=deadline_of(request.scope)
        )
        new_id = new_response_id(prompt.position.conversation_id)
        source, _ = await self._answers.source(request, body, plan, new_id=new_id)
        *said, _ = prompt.all_items  # without the instruction
        whole = await unless_gone(request, compacted(source, said, prompt.files))
        return Response(status_code=CLIENT_GONE) if whole is None else json_response(whole)

    async def _started(
        self,
        request: Request,
        asked: ResponsesRequest,
        body: Mapping[str, Any],
        key: IdempotencyKey | None,
    ) -> tuple[ResponseLog, ResponseTask | None]:
        """The log of a new response and its task, or of the one that the key stands for."""
        caller = caller_of(request.scope)
        deadline_s = deadline_of(request.scope)
        create = partial(self._service.create, asked, caller, deadline_s=deadline_s, body=body)
        if key is None:
            task = await create()
            return task.log, task
        if not asked.store:
            refuse_with_key(["store: false"])
        found = await self._answers.respond(key, caller, lambda claim: create(claim=claim))
        return (found, None) if isinstance(found, ResponseLog) else (found.log, found)

    @operation(
        f"GET {_ONE}", "Retrieve a response, or stream its events.", "Response", streams=True
    )
    async def retrieve(self, request: Request) -> Response | EventStream:
        response_id = request.path_params["response_id"]
        caller = caller_of(request.scope)
        if _flag(request, "stream"):
            after = _starting_after(request)
            log = await self._service.resume(caller, response_id)
            check_start(after, log)
            return self._resumed(Subscriber(log, after=after))
        if "starting_after" in request.query_params:
            raise _invalid("starting_after", "needs stream=true")
        turn = await self._service.turn(caller, response_id)
        if turn.status == "in_progress":
            return json_response(response_object(await self._service.log(caller, response_id)))
        return Response(turn.response, media_type="application/json")

    @operation(f"POST {_ONE}/cancel", "Cancel a response.", "Response")
    async def cancel(self, request: Request) -> Response:
        """Cancel the response, wait for its end and return it."""
        response_id = request.path_params["response_id"]
        caller = caller_of(request.scope)
        turn = await self._service.cancel(caller, response_id)
        if turn.status != "in_progress":
            return Response(turn.response, media_type="application/json")
        log = await self._service.log(caller, response_id)
        whole = await unless_gone(request, self._whole(log))
        return Response(status_code=CLIENT_GONE) if whole is None else json_response(whole)

    @operation(
        f"POST {_ONE}/steer",
        "Steer a response that runs.",
        "Steer",
        body=(SteerRequest,),
        statuses=(404, 409, 429),
        example={"input": "In English, please."},
    )
    async def steer(self, request: Request) -> Response:
        """Queue input for which the response ends, and which its successor answers."""
        body = await read_json(request, max_bytes=self._max_body_bytes)
        for name in body:
            if name != "input":
                raise RequestRefusedError(
                    f"unknown parameter: {name!r}", code="unknown_parameter", param=name
                )
        caller = caller_of(request.scope)
        response_id = request.path_params["response_id"]
        key = idempotency_key(request, body, caller)
        steer_id = new_steer_id()
        if key is not None:
            steer_id = derived_steer_id(caller.tenant, response_id, key.response_id(0))
        told = await self._service.steer(caller, response_id, steer_id, body.get("input"))
        return json_response(
            {"object": "response.steer", "previous_response_id": response_id, **told}
        )

    @operation(f"DELETE {_ONE}", "Delete a response.", "Deleted", statuses=(409,))
    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await self._service.delete(caller_of(request.scope), response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @operation(
        f"GET {_ONE}/input_items", "List the input items of a response.", "Items", query=ItemsQuery
    )
    async def input_items(self, request: Request) -> Response:
        """A page of the response's input: items of earlier turns, then its own."""
        path = await self._service.path(
            caller_of(request.scope), request.path_params["response_id"]
        )
        return json_response(item_page(items_of(path), request.query_params))

    def _live(self, subscriber: Subscriber) -> EventStream:
        source = partial(subscriber.write_to, payloads=_joined)
        return EventStream(source, ping_s=self._ping_s, on_error=_broken)

    def _resumed(self, subscriber: Subscriber) -> ResumedEventStream:
        source = partial(subscriber.write_to, payloads=_joined)
        return ResumedEventStream(source, ping_s=self._ping_s, on_error=_broken)

    async def _whole(self, log: ResponseLog) -> dict[str, Any]:
        """The response at its end, whichever gateway runs it."""
        with log.read() as reader:
            while await next_of(reader) is not None:
                pass
            return response_object(log)


def _joined(events: Sequence[Event]) -> Iterable[bytes]:
    return (b"".join([named(event.type, event.json) for event in events]),)


def _broken(error: Exception) -> bytes:
    """This gateway cannot read the log any further. It sends no terminal event, so that the client
    resumes the stream."""
    return named("error", orjson.dumps({**told(failure_of(error))["error"], "type": "error"}))


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false")
    if value not in ("true", "false"):
        raise _invalid(name, "must be true or false")
    return value == "true"


def _starting_after(request: Request) -> int:
    text = request.query_params.get("starting_after", "-1")
    return starting_after_of(int(text) if _INTEGER.fullmatch(text) else None)


def _invalid(param: str, rule: str) -> RequestRefusedError:
    return RequestRefusedError(f"{param} {rule}", code="invalid_value", param=param)
