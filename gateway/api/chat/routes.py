"""`POST /v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.chat_formats import OutputItem, Piece
from penstock.engine.request import FinishReason, TokenLogprobs
from penstock.engine.text import Tokenizer
from penstock.gateway.api.chat.planning import planned
from penstock.gateway.api.chat.schema import ChatRequest, chat_prompt, image_sources
from penstock.gateway.api.schema.parsing import parse_request
from penstock.gateway.api.shared.choices import Answer, Choice, ending_of
from penstock.gateway.api.shared.idempotency import (
    IdempotentAnswers,
)
from penstock.gateway.api.shared.json_api import (
    CLIENT_GONE,
    json_response,
    parsed,
    read_json,
    unless_gone,
)
from penstock.gateway.api.shared.logprobs import TokenObjects, prompt_dictionaries
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of
from penstock.gateway.generation.branch import Delta
from penstock.gateway.generation.generation import DeltaSource, Generation, Output
from penstock.gateway.generation.request_planner import RequestPlanner
from penstock.gateway.http.event_stream import EventStream


class ChatCompletions:
    """The endpoint.

    Args:
        answers: answers to requests with an `Idempotency-Key`.
        ping_s: seconds of silence on a stream before a comment is sent.
    """

    def __init__(
        self,
        planner: RequestPlanner,
        answers: IdempotentAnswers,
        *,
        max_body_bytes: int,
        ping_s: float,
    ) -> None:
        self._planner = planner
        self._answers = answers
        self._max_body_bytes = max_body_bytes
        self._ping_s = ping_s

    @operation(
        "POST /v1/chat/completions",
        "Create a chat completion.",
        "ChatCompletion",
        body=(ChatRequest,),
        statuses=(404, 409, 429),
        streams=True,
        example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
    )
    async def create(self, request: Request) -> Response | EventStream:
        body = await read_json(request, max_bytes=self._max_body_bytes)
        chat = await parsed(self._planner.paced_work, ChatRequest, body, parse_request)
        caller = caller_of(request.scope)
        model = await self._planner.adapters.require(chat.model, caller, task="generate")
        source, is_resumed = await self._answers.source(
            request,
            body,
            partial(self._planned, request, chat),
            new_id=f"chatcmpl-{uuid.uuid4().hex}",
            continues_prompt=chat.continues_prompt,
            unsupported=chat.beyond_one_output,
        )
        served = self._planner.model
        syntax = None if source.output_format is None else source.output_format.syntax
        answer = _Answer(
            chat,
            source,
            model=model,
            fingerprint=self._planner.fingerprint(source.request.adapter),
            tokenizer=served.tokenizer,
            has_thoughts=bool(served.formats.reasoning or (syntax and syntax.reasoning)),
        )
        if chat.stream:
            return answer.event_stream(is_resumed=is_resumed, ping_s=self._ping_s)
        whole = await unless_gone(request, answer.whole())
        return Response(status_code=CLIENT_GONE) if whole is None else json_response(whole)

    async def _planned(self, request: Request, chat: ChatRequest, request_id: str) -> Generation:
        sources = image_sources(chat.messages)
        images = await self._planner.images.load(sources) if sources else ()
        return await planned(
            self._planner,
            request_id,
            chat_prompt(chat, images),
            chat,
            scope=request.scope,
            cut=None if chat.truncate_prompt_tokens is None else chat.kept,
            predecessor=chat.predecessor,
        )


# Kind of item → a call's type, and the field with what the model writes.
_CALLS = {"function_call": ("function", "arguments"), "custom_tool_call": ("custom", "input")}
_THOUGHTS = ("reasoning_content", "reasoning")  # OpenRouter's and vLLM's newer name


class _Answer(Answer):
    """One answer in chat's format.

    Args:
        has_thoughts: the model has any, so that every delta and message has their fields, null
            where there are none: DeepSeek's documented loop reads them of each.
    """

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self,
        chat: ChatRequest,
        source: DeltaSource,
        *,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        has_thoughts: bool,
    ) -> None:
        super().__init__(
            [source],
            model=model,
            fingerprint=fingerprint,
            options=chat.stream_options,
            returns_token_ids=chat.return_token_ids,
        )
        self._chat = chat
        self._tokenizer = tokenizer
        tells_thoughts = has_thoughts and chat.include_reasoning
        self._no_thoughts: dict[str, None] = dict.fromkeys(_THOUGHTS) if tells_thoughts else {}
        # As at OpenAI: an empty text before a call would be a part of its own.
        self._silence: dict[str, Any] = {} if chat.offered.callable else {"content": ""}
        self._begun: set[int] = set()  # choices whose first chunk was sent
        self._callers: set[int] = set()  # choices with a tool call
        self._num_calls: dict[int, int] = {}  # sent in chunks, by choice
        self._messages: dict[int, int] = {}  # begun in chunks, by choice
        self._token_objects: dict[int, TokenObjects] = {}  # by choice
        self._extras: dict[str, Any] = {}
        self._is_prompt_told = not chat.return_token_ids

    def add_prompt(self, number: int) -> None:
        if self._chat.return_token_ids:
            self._extras["prompt_token_ids"] = self.generations[number].request.prompt_token_ids
        num_top = self._chat.prompt_logprobs
        if num_top is not None:
            self._extras["prompt_logprobs"] = prompt_dictionaries(
                self._tokenizer, self.generations[number].prompt_logprobs, num_top
            )

    def extras(self) -> dict[str, Any]:
        return self._extras

    def chunk_extras(self) -> dict[str, Any]:
        if self._is_prompt_told:
            return {}
        self._is_prompt_told = True
        return self._extras

    def choice(self, index: int, output: Output) -> Choice:
        tokens = self._tokens(index, output.logprobs)
        message: dict[str, Any] = {"role": "assistant", "content": output.text, "refusal": None}
        message |= self._no_thoughts
        calls = [
            _call(self._call_id(index, number), item)
            for number, item in enumerate(i for i in output.items if i.kind in _CALLS)
        ]
        thoughts = [item.text for item in output.items if item.kind == "reasoning"]
        if thoughts and self._chat.include_reasoning:
            message |= dict.fromkeys(_THOUGHTS, "\n".join(thoughts))
        if calls:
            message |= {"content": output.text or None, "tool_calls": calls}
            self._callers.add(index)
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": tokens, "refusal": None} if self._chat.logprobs else None,
            **self._ending(index, output.finish_reason),
        }

    def pieces(self, index: int, delta: Delta) -> list[Choice]:
        pieces: list[Choice] = []
        tokens = self._tokens(index, delta.logprobs)
        changes = [change for piece in delta.pieces if (change := self._change(index, piece))]
        if delta.text:
            changes = [{"content": delta.text}]
        is_silence = not changes and self.is_silence(delta)
        has_content = bool(changes or tokens or delta.pieces or is_silence)
        if index not in self._begun and (has_content or delta.finish_reason):
            self._begun.add(index)  # not before the first text: the first event means progress
            opening = {"role": "assistant", "content": None}
            if changes and "content" not in changes[0]:
                changes[0] = opening | changes[0]
            else:
                opening |= {"content": ""} if changes or delta.finish_reason else self._silence
                pieces.append(self._piece(index, opening))
        # Of text that is held back, or not shown:
        if not changes and (tokens or (is_silence and not pieces)):
            changes = [self._silence]
        for change in changes:
            pieces.append(self._piece(index, change, tokens=tokens))
            tokens = []
        if delta.finish_reason is not None:
            # What reads a delta without thoughts as text (DeepSeek's loop) does not expect null.
            last = {"content": ""} if self._no_thoughts and index not in self._callers else {}
            pieces.append(self._piece(index, last) | self._ending(index, delta.finish_reason))
        return pieces

    def _piece(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        tokens: list[dict[str, Any]] | None = None,
    ) -> Choice:
        return {
            "index": index,
            "delta": {**self._no_thoughts, **delta},
            "logprobs": {"content": tokens, "refusal": None} if tokens else None,
            "finish_reason": None,
        }

    def _change(self, index: int, piece: Piece) -> dict[str, Any]:
        """A part of an item as the `delta` of a chunk; empty if it is not shown."""
        kind = piece.kind
        if kind == "reasoning":
            shown = piece.text and self._chat.include_reasoning
            return dict.fromkeys(_THOUGHTS, piece.text) if shown else {}
        if kind == "message":
            begun = self._messages.get(index, 0) + piece.begins
            self._messages[index] = begun
            text = "\n" + piece.text if piece.begins and begun > 1 else piece.text
            return {"content": text} if text else {}
        number = self._num_calls.get(index, 0) - (not piece.begins)
        key, text_key = _CALLS[kind]
        if piece.begins:
            self._num_calls[index] = number + 1
            self._callers.add(index)
            call = _call(self._call_id(index, number), piece)
            return {"tool_calls": [{"index": number, **call}]}
        return {"tool_calls": [{"index": number, key: {text_key: piece.text}}]}

    def _ending(self, index: int, reason: FinishReason) -> Choice:
        """Why a choice ended."""
        is_call = reason is FinishReason.STOP and index in self._callers
        return {"finish_reason": "tool_calls"} if is_call else ending_of(reason)

    def _call_id(self, index: int, number: int) -> str:
        _, _, request = str(self._head["id"]).partition("-")
        return f"call_{request}_{index}_{number}"

    def _tokens(self, index: int, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        """The objects of a choice's next tokens."""
        if not entries:
            return []
        if index not in self._token_objects:
            self._token_objects[index] = TokenObjects(
                self._tokenizer,
                begins=not self._chat.continues_prompt,
                as_ids=self._chat.return_tokens_as_token_ids,
            )
        return self._token_objects[index].of(entries)


def _call(call_id: str, said: Piece | OutputItem) -> dict[str, Any]:
    key, text_key = _CALLS[said.kind]
    return {"id": call_id, "type": key, key: {"name": said.name, text_key: said.text}}
