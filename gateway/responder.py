"""One turn of the Responses API, whatever carries it: history → prompt → events → stored.

Lives here: what a turn does in which order. Not known here: event shapes (`response_events`),
transports (`endpoints.responses`, `websocket`).
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import orjson

from penstock.engine.request import Retention
from penstock.engine.text import Tokenizer
from penstock.gateway.engine_client import EngineClient
from penstock.gateway.errors import Failure, failure_of
from penstock.gateway.generation import Delta, Generation
from penstock.gateway.generator import ChatPrompt, Generator
from penstock.gateway.logprobs import token_objects
from penstock.gateway.response_events import Event, ResponseEvents
from penstock.gateway.schemas import ResponsesRequest
from penstock.gateway.sessions import SessionStore, StoredResponse


class Responder:
    """Prepares turns, and forgets them.

    Args:
        retention_s: how long the KV of a stored turn is worth keeping; 0 gives no hint.
    """

    def __init__(
        self,
        generator: Generator,
        sessions: SessionStore,
        *,
        engine: EngineClient,
        retention_s: float,
    ) -> None:
        self._generator = generator
        self._sessions = sessions
        self._engine = engine
        self._retention = Retention(duration_s=retention_s) if retention_s > 0 else None

    async def prepare(self, request: ResponsesRequest) -> Turn:
        """A turn that can run; nothing has been submitted yet.

        Raises:
            InvalidRequestError: it cannot be served, or what it continues is not here.
            EngineDeadError: no engine answers.
        """
        model = self._generator.model.require(request.model)
        prompt_token_ids = await self._prompt_token_ids(request)
        response_id = f"resp_{uuid.uuid4().hex}"
        generation = self._generator.plan(
            response_id,
            prompt_token_ids,
            request=request,
            param="input",
            retention=self._retention if request.store else None,
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

    async def _prompt_token_ids(self, request: ResponsesRequest) -> list[int]:
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
        return await self._generator.tokenise_chat(
            ChatPrompt(
                messages=[*instructions, *history, *items],
                # What follows a prepared prompt may be more of it.
                add_generation_prompt=request.generates,
                template=request.chat_template,
                kwargs=request.chat_template_kwargs,
            )
        )

    def drop_prefix(self, response_id: str) -> None:
        """Have the engine forget the KV of a conversation up to and including a response.

        Raises:
            RequestRefusedError: no such response is stored.
        """
        stored = self._sessions.get(response_id)
        token_ids = [*stored.prompt_token_ids, *stored.output_token_ids]
        self._engine.drop_prefix(token_ids, stored.cache_salt)

    def delete(self, response_id: str) -> None:
        """Forget a response and its KV; what continued it cannot be continued any more.

        Raises:
            RequestRefusedError: no such response is stored.
        """
        self.drop_prefix(response_id)
        self._sessions.delete(response_id)


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
                while (deltas := await generation.next()) is not None:
                    batch = [event for delta in deltas for event in self._events_of(delta)]
                    if batch:
                        yield batch
            reason = generation.branches[0].finish_reason
            assert reason is not None
            last = events.ended(reason, generation.usage)
        except Exception as error:  # whatever it was, the stream ends with a terminal event
            self.failure = failure_of(error)
            last = events.failed(self.failure, generation.usage)
        self._store(last[-1]["response"])
        yield last

    def _events_of(self, delta: Delta) -> Iterator[Event]:
        if delta.notice is not None and delta.notice.value in self._request.penstock.events:
            yield self._events.notice(delta.notice)
        if delta.text or delta.logprobs:
            yield self._events.delta(delta.text, token_objects(self._tokenizer, delta.logprobs))

    def _store(self, response: Mapping[str, Any]) -> None:
        if self._sessions is None:
            return
        request, engine_request = self._request, self._generation.request
        self._sessions.put(
            StoredResponse(
                response_id=self.response_id,
                parent_id=request.previous_response_id,
                items=tuple(item.for_template() for item in request.items),
                output_text=self._events.text if request.generates else None,
                prompt_token_ids=array("I", engine_request.prompt_token_ids),
                output_token_ids=array("I", self._generation.branches[0].token_ids),
                cache_salt=engine_request.cache_salt,
                body=orjson.dumps(response),
            )
        )
