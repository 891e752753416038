"""`POST /v1/completions`: one prompt or several, each with choices of its own."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.request import TokenLogprobs
from penstock.engine.text import Tokenizer
from penstock.gateway.api.completions.schema import CompletionRequest
from penstock.gateway.api.schema.parsing import parse_request
from penstock.gateway.api.shared.choices import Answer, Choice, ending_of
from penstock.gateway.api.shared.idempotency import (
    IdempotentAnswers,
    idempotency_key,
    refuse_with_key,
)
from penstock.gateway.api.shared.json_api import (
    CLIENT_GONE,
    json_response,
    parsed,
    read_json,
    unless_gone,
)
from penstock.gateway.api.shared.logprobs import Lists, TokenLists, joined, prompt_dictionaries
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import caller_of, deadline_of
from penstock.gateway.generation.branch import Delta
from penstock.gateway.generation.fill_in_middle import ending_there
from penstock.gateway.generation.generation import DeltaSource, Generation, Output
from penstock.gateway.generation.request_planner import NUM_CONTEXT_TOKENS, RequestPlanner
from penstock.gateway.http.event_stream import EventStream


class Completions:
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
        "POST /v1/completions",
        "Create a completion of one or several prompts.",
        "Completion",
        body=(CompletionRequest,),
        statuses=(404, 409, 429),
        streams=True,
        example={"prompt": ["Once upon", "There was"], "max_tokens": 16, "logprobs": 1},
    )
    async def create(self, request: Request) -> Response | EventStream:
        body = await read_json(request, max_bytes=self._max_body_bytes)
        completion = await parsed(self._planner.paced_work, CompletionRequest, body, parse_request)
        caller = caller_of(request.scope)
        model = await self._planner.adapters.require(completion.model, caller, task="generate")
        key = idempotency_key(request, body, caller)
        sources: Sequence[DeltaSource]
        is_resumed = False
        if key is None:
            sources = await self._planned(request, completion)
        else:
            refuse_with_key(completion.beyond_one_output)
            plan = partial(self._planned_one, request, completion, completion.prompts[0])
            logged = await self._answers.attach(
                key, caller, plan, continues_prompt=completion.continues_prompt
            )
            sources, is_resumed = [logged], logged.is_resumed
        answer = _Answer(
            completion,
            sources,
            model=model,
            fingerprint=self._planner.fingerprint(sources[0].request.adapter),
            tokenizer=self._planner.model.tokenizer,
            echoes=[await self._echo(prompt, completion) for prompt in completion.prompts],
        )
        if completion.stream:
            return answer.event_stream(is_resumed=is_resumed, ping_s=self._ping_s)
        whole = await unless_gone(request, answer.whole())
        return Response(status_code=CLIENT_GONE) if whole is None else json_response(whole)

    async def _planned(self, request: Request, completion: CompletionRequest) -> list[Generation]:
        """A generation for each prompt; if one is refused, all are discarded."""
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        planned: list[Generation] = []
        try:
            for number, prompt in enumerate(completion.prompts):
                request_id = f"{completion_id}-{number}"
                planned.append(await self._planned_one(request, completion, prompt, request_id))
        except BaseException:
            for generation in planned:
                generation.discard()
            raise
        return planned

    async def _planned_one(
        self,
        request: Request,
        completion: CompletionRequest,
        prompt: str | Sequence[int],
        request_id: str,
    ) -> Generation:
        token_ids = await self._token_ids(prompt, completion)
        options = completion.options(self._planner.model.sampling_defaults())
        if completion.suffix:
            options = ending_there(options, self._planner.gaps.require(param="suffix"))
        return await self._planner.plan(
            request_id,
            completion.kept(token_ids),
            options,
            param="prompt",
            caller=caller_of(request.scope),
            deadline_s=deadline_of(request.scope),
        )

    async def _token_ids(
        self, prompt: str | Sequence[int], completion: CompletionRequest
    ) -> Sequence[int]:
        if completion.suffix:
            has_start = completion.add_special_tokens and isinstance(prompt, str)
            return await self._planner.gaps.whole(
                prompt, completion.suffix, add_special_tokens=has_start
            )
        if not isinstance(prompt, str):
            return prompt
        return await self._planner.tokenise(
            prompt,
            add_special_tokens=completion.add_special_tokens,
            param="prompt",
            must_fit=completion.truncate_prompt_tokens is None,
        )

    async def _echo(self, prompt: str | Sequence[int], completion: CompletionRequest) -> str:
        if not completion.echo:
            return ""
        if isinstance(prompt, str):
            return prompt
        return await self._planner.detokenise(
            prompt, skip_special_tokens=completion.skip_special_tokens
        )


class _Answer(Answer):
    """One completion.

    Args:
        echoes: the text that each prompt's choices start with.
    """

    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def __init__(
        self,
        completion: CompletionRequest,
        generations: Sequence[DeltaSource],
        *,
        model: str,
        fingerprint: str,
        tokenizer: Tokenizer,
        echoes: Sequence[str],
    ) -> None:
        super().__init__(
            generations,
            model=model,
            fingerprint=fingerprint,
            options=completion.stream_options,
            returns_token_ids=completion.return_token_ids,
        )
        self._completion = completion
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._begun: set[int] = set()  # choices whose first text was sent
        self._prompt_sent: set[int] = set()  # choices whose prompt's ids were sent
        self._lists: dict[int, TokenLists] = {}  # by choice
        self._echoed_lists: dict[int, Lists] = {}  # by prompt
        self._prompt_logprobs: dict[int, Any] = {}

    def add_prompt(self, number: int) -> None:
        asked = self._completion
        generation = self.generations[number]
        entries = generation.prompt_logprobs
        if asked.prompt_logprobs is not None:
            self._prompt_logprobs[number] = prompt_dictionaries(
                self._tokenizer, entries, asked.prompt_logprobs
            )
        if asked.echo and asked.logprobs is not None:
            lists = TokenLists(
                self._tokenizer,
                num_top=asked.logprobs,
                skip_special_tokens=asked.skip_special_tokens,
                as_ids=asked.return_tokens_as_token_ids,
            )
            first_id = generation.request.prompt_token_ids[0]
            self._echoed_lists[number] = lists.add_prompt(first_id, entries)

    def choice(self, index: int, output: Output) -> Choice:
        number = index // self.num_each
        choice = self._choice(index, output.text, output.logprobs)
        choice |= ending_of(output.finish_reason)
        if number in self._prompt_logprobs:
            choice["prompt_logprobs"] = self._prompt_logprobs[number]
        return choice | self._prompt_token_ids(index)

    def pieces(self, index: int, delta: Delta) -> list[Choice]:
        pieces: list[Choice] = []
        is_echo_due = self._completion.echo and index not in self._begun
        has_content = bool(delta.text or delta.logprobs or self.is_silence(delta))
        if has_content or (is_echo_due and delta.finish_reason):
            pieces.append(self._choice(index, delta.text, delta.logprobs))
        if delta.finish_reason is not None:
            pieces.append(
                {
                    "index": index,
                    "text": "",
                    "logprobs": None,
                    **ending_of(delta.finish_reason),
                }
            )
        if pieces:
            pieces[0] |= self._prompt_token_ids(index)
        return pieces

    def _prompt_token_ids(self, index: int) -> dict[str, Sequence[int]]:
        """The prompt's ids, once for each choice, if they were asked for."""
        if not self._completion.return_token_ids or index in self._prompt_sent:
            return {}
        self._prompt_sent.add(index)
        return {
            "prompt_token_ids": self.generations[index // self.num_each].request.prompt_token_ids
        }

    def _choice(self, index: int, text: str, entries: Sequence[TokenLogprobs]) -> Choice:
        """A choice's next text; the first begins with what is echoed."""
        number = index // self.num_each
        lists = self._next_lists(index, entries)
        if index not in self._begun:
            self._begun.add(index)
            text = self._echoes[number] + text
            if lists is not None and number in self._echoed_lists:
                lists = joined(self._echoed_lists[number], lists)
        return {"index": index, "text": text, "logprobs": lists, "finish_reason": None}

    def _next_lists(self, index: int, entries: Sequence[TokenLogprobs]) -> Lists | None:
        asked, number = self._completion, index // self.num_each
        if asked.logprobs is None:
            return None
        if index not in self._lists:
            self._lists[index] = TokenLists(
                self._tokenizer,
                num_top=asked.logprobs,
                skip_special_tokens=asked.skip_special_tokens,
                context=self.generations[number].request.prompt_token_ids[-NUM_CONTEXT_TOKENS:],
                next_offset=len(self._echoes[number]),
                as_ids=asked.return_tokens_as_token_ids,
            )
        return self._lists[index].add(entries)
