"""`POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.api.anthropic.answer import MessageAnswer
from penstock.gateway.api.anthropic.conversation import chat_messages, marks_cache
from penstock.gateway.api.anthropic.schema import (
    Conversation,
    CountTokensRequest,
    MessagesRequest,
)
from penstock.gateway.api.chat.planning import planned, rendered
from penstock.gateway.api.schema.parsing import parse_request
from penstock.gateway.api.shared.idempotency import IdempotentAnswers
from penstock.gateway.api.shared.json_api import (
    CLIENT_GONE,
    json_response,
    parsed,
    read_json,
    unless_gone,
)
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.generation.generation import Generation
from penstock.gateway.generation.request_planner import ChatPrompt, RequestPlanner
from penstock.gateway.http.event_stream import EventStream


class Messages:
    """The endpoints.

    Args:
        answers: answers to requests with an `Idempotency-Key`.
        drops_billing_line: see `conversation.chat_messages`.
        ping_s: seconds of silence on a stream before a ping is sent.
    """

    def __init__(
        self,
        planner: RequestPlanner,
        engine: EnginePool,
        answers: IdempotentAnswers,
        *,
        drops_billing_line: bool,
        max_body_bytes: int,
        ping_s: float,
    ) -> None:
        self._planner = planner
        self._engine = engine
        self._answers = answers
        self._drops_billing_line = drops_billing_line
        self._max_body_bytes = max_body_bytes
        self._ping_s = ping_s

    @operation(
        "POST /v1/messages",
        "Create a message, in Anthropic's API.",
        "Message",
        body=(MessagesRequest,),
        statuses=(404, 409, 429),
        streams=True,
        failure="AnthropicError",
        example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
    )
    async def create(self, request: Request) -> Response | EventStream:
        body = await read_json(request, max_bytes=self._max_body_bytes)
        asked = await parsed(self._planner.paced_work, MessagesRequest, body, parse_request)
        caller = caller_of(request.scope)
        model = await self._planner.adapters.require(asked.model, caller, task="generate")
        source, is_resumed = await self._answers.source(
            request,
            body,
            partial(self._planned, request, asked),
            new_id=f"msg_{uuid.uuid4().hex}",
            continues_prompt=asked.continues_prompt,
        )
        info = self._engine.info_for_running()
        answer = MessageAnswer(
            asked,
            source,
            self._planner,
            model=model,
            marks_cache=marks_cache(body),
            block_size=info.block_size,
            max_model_len=info.max_model_len,
        )
        if asked.stream:
            return answer.event_stream(is_resumed=is_resumed, ping_s=self._ping_s)
        whole = await unless_gone(request, answer.whole())
        return Response(status_code=CLIENT_GONE) if whole is None else json_response(whole)

    @operation(
        "POST /v1/messages/count_tokens",
        "Count the tokens of a message's prompt, in Anthropic's API.",
        "MessageTokens",
        body=(CountTokensRequest,),
        statuses=(404,),
        failure="AnthropicError",
        example={"messages": [{"role": "user", "content": "Hello"}]},
    )
    async def count_tokens(self, request: Request) -> Response:
        body = await read_json(request, max_bytes=self._max_body_bytes)
        asked = await parsed(self._planner.paced_work, CountTokensRequest, body, parse_request)
        caller = caller_of(request.scope)
        await self._planner.adapters.require(asked.model, caller, task="generate")
        num_tokens = await unless_gone(request, self._num_tokens(request, asked))
        if num_tokens is None:
            return Response(status_code=CLIENT_GONE)
        return json_response({"input_tokens": num_tokens})

    async def _num_tokens(self, request: Request, asked: Conversation) -> int:
        prompt = await self._prompt(asked, generates=True)
        chat = await rendered(self._planner, prompt, must_fit=False, scope=request.scope)
        return len(chat.token_ids)

    async def _planned(
        self, request: Request, asked: MessagesRequest, request_id: str
    ) -> Generation:
        return await planned(
            self._planner,
            request_id,
            await self._prompt(asked, generates=asked.max_tokens > 0),
            asked,
            scope=request.scope,
            predecessor=asked.predecessor,
        )

    async def _prompt(self, asked: Conversation, *, generates: bool) -> ChatPrompt:
        messages, sources, dropped = chat_messages(
            asked, drops_billing_line=self._drops_billing_line
        )
        return ChatPrompt(
            messages=messages,
            # A prompt that is only prepared may be extended, so it does not end with the answer's
            # header.
            add_generation_prompt=generates and not asked.continues_prompt,
            continue_final_message=asked.continues_prompt,
            kwargs=asked.template_kwargs,
            tools=asked.offered.for_template,
            images=await self._planner.images.load(sources),
            keeps_places=True,
            dropped=dropped,
        )
