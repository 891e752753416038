"""One turn of the Responses API, whatever carries it: history → prompt → events → stored.

Lives here: what a turn does in which order. Not known here: event shapes (`response_events`),
transports (`endpoints.responses`, `websocket`).
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import orjson

from penstock.engine.text import Tokenizer
from penstock.gateway.errors import Failure, failure_of
from penstock.gateway.generation import ChatPrompt, Generation, Generator
from penstock.gateway.logprobs import token_objects
from penstock.gateway.response_events import Event, ResponseEvents
from penstock.gateway.schemas import ResponsesRequest
from penstock.gateway.sessions import SessionStore, StoredResponse


class Responder:
    """Prepares turns."""

    def __init__(self, generator: Generator, sessions: SessionStore) -> None:
        self._generator = generator
        self._sessions = sessions

    async def prepare(self, request: ResponsesRequest) -> Turn:
        """A turn that can run; nothing has been submitted yet.

        Raises:
            InvalidRequestError: it cannot be served, or what it continues is not here.
            EngineDeadError: no engine answers.
        """
        model = self._generator.model.require(request.model)
        items = [item.for_template() for item in request.items]
        history = (
            self._sessions.history(request.previous_response_id)
            if request.previous_response_id is not None
            else []
        )
        # Instructions are those of this request alone: they are not inherited.
        instructions = (
            [{"role": "system", "content": request.instructions}] if request.instructions else []
        )
        prompt_token_ids = await self._generator.tokenise_chat(
            ChatPrompt(
                messages=[*instructions, *history, *items],
                template=request.chat_template,
                kwargs=request.chat_template_kwargs,
            )
        )
        response_id = f"resp_{uuid.uuid4().hex}"
        generation = self._generator.plan(
            response_id, prompt_token_ids, request=request, param="input"
        )
        events = ResponseEvents(
            response_id, request, model=model, params=generation.request.sampling_params
        )
        return Turn(
            request,
            generation,
            events=events,
            tokenizer=self._generator.model.tokenizer,
            sessions=self._sessions if request.store else None,
        )


class Turn:
    """A turn that can run, once."""

    def __init__(
        self,
        request: ResponsesRequest,
        generation: Generation,
        *,
        events: ResponseEvents,
        tokenizer: Tokenizer,
        sessions: SessionStore | None,
    ) -> None:
        self._request = request
        self._generation = generation
        self._events = events
        self._tokenizer = tokenizer
        self._sessions = sessions
        self.failure: Failure | None = None  # what ended it, if it failed

    @property
    def response_id(self) -> str:
        return self._events.response_id

    def cancel(self) -> None:
        """End it early; its events then end with status `cancelled`."""
        self._generation.cancel()

    async def batches(self) -> AsyncGenerator[list[Event], None]:
        """All events, those that come together in one list; the last one is terminal.

        Closing it before the end aborts the generation, and the turn is not stored.
        """
        generation, events = self._generation, self._events
        try:
            with generation:
                yield events.started()
                while (delta := await generation.next()) is not None:
                    yield [events.delta(delta.text, token_objects(self._tokenizer, delta.logprobs))]
            assert generation.finish_reason is not None
            last = events.ended(generation.finish_reason, generation.usage)
        except Exception as error:  # whatever it was, the stream ends with a terminal event
            self.failure = failure_of(error)
            last = events.failed(self.failure, generation.usage)
        self._store(last[-1]["response"])
        yield last

    def _store(self, response: Mapping[str, Any]) -> None:
        if self._sessions is not None:
            self._sessions.put(
                StoredResponse(
                    response_id=self.response_id,
                    parent_id=self._request.previous_response_id,
                    items=tuple(item.for_template() for item in self._request.items),
                    output_text=self._events.text,
                    output_token_ids=array("I", self._generation.token_ids),
                    body=orjson.dumps(response),
                )
            )
