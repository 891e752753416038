"""From a request to deltas of text, whatever the transport.

    prompt → token ids → (fits the context?) → engine → deltas → usage and finish reason

Lives here: tokenising off the event loop when it is long, the length check, sampling parameters
with every default filled in, stop strings, and the promise that a generation that is left early
is aborted. Not known here: HTTP, SSE, WebSocket, the shape of any API's answer.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.engine.errors import InvalidRequestError, PromptTooLongError
from penstock.engine.request import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from penstock.engine.text import OutputText
from penstock.gateway.engine_client import EngineClient, EngineStream
from penstock.gateway.errors import GenerationFailedError, RequestRefusedError
from penstock.gateway.metrics import Metrics, StreamMeter
from penstock.gateway.model import ServedModel
from penstock.gateway.schemas import SamplingRequest

_LONG_TEXT_CHARS = 64 << 10  # from here on tokenising would stall the event loop for everybody
_SEED_MASK = (1 << 64) - 1
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last delta.

    Attributes:
        text: may be empty while a character or a stop string is incomplete.
        logprobs: one entry per token that has text; empty unless asked for.
    """

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation and how to render it."""

    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool = True
    add_special_tokens: bool = False  # templates write their own
    template: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Generator:
    """Plans generations: everything that can be refused is refused before one exists."""

    def __init__(
        self,
        engine: EngineClient,
        model: ServedModel,
        *,
        metrics: Metrics,
        trusts_request_template: bool = False,
    ) -> None:
        self.model = model
        self._engine = engine
        self._metrics = metrics
        self._trusts_request_template = trusts_request_template

    async def tokenise_chat(self, prompt: ChatPrompt) -> list[int]:
        """A conversation as the model's template writes it.

        Raises:
            InvalidRequestError: the template refuses it, or is not to be trusted.
        """
        if prompt.template is not None and not self._trusts_request_template:
            raise RequestRefusedError(
                "this server takes no templates from requests; it was started without "
                "--trust-request-chat-template",
                code="unsupported_parameter",
                param="chat_template",
            )
        text = await _off_loop(
            lambda: self.model.chat_template.render(
                prompt.messages,
                add_generation_prompt=prompt.add_generation_prompt,
                template=prompt.template,
                kwargs=prompt.kwargs,
            ),
            sum(len(message["content"]) for message in prompt.messages),
        )
        return await self.tokenise(text, add_special_tokens=prompt.add_special_tokens)

    async def tokenise(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return await _off_loop(
            lambda: self.model.tokenizer.encode(text, add_special_tokens=add_special_tokens),
            len(text),
        )

    def plan(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        request: SamplingRequest,
        param: str,
    ) -> Generation:
        """A generation that fits, not yet begun.

        Args:
            param: the parameter that the prompt came from, for error messages.

        Raises:
            InvalidRequestError: the prompt or a sampling parameter cannot be served.
            EngineDeadError: no engine answers.
        """
        info = self._engine.require_info()
        room = info.max_model_len - len(prompt_token_ids)
        if not prompt_token_ids:
            raise InvalidRequestError("the prompt has no tokens", param=param)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(prompt_token_ids)} tokens, which leaves no room for output "
                f"in the model's context of {info.max_model_len} tokens",
                param=param,
            )
        if request.min_tokens > room:
            raise PromptTooLongError(
                f"min_tokens is {request.min_tokens}, but beside the prompt's "
                f"{len(prompt_token_ids)} tokens the model's context of {info.max_model_len} "
                f"tokens has room for {room}",
                param="min_tokens",
            )
        params = self._sampling_params(request, request.output_limit or room, room)
        _check_vocabulary(prompt_token_ids, info.vocab_size, param=param)
        _check_vocabulary(params.logit_bias, info.vocab_size, param="logit_bias")
        _check_vocabulary(params.stop_token_ids, info.vocab_size, param="stop_token_ids")
        return Generation(
            self._engine,
            Request(
                request_id=request_id,
                prompt_token_ids=tuple(prompt_token_ids),
                sampling_params=params,
                arrival_s=time.time(),
            ),
            text=OutputText(
                self.model.tokenizer,
                params,
                context=prompt_token_ids if request.continues_prompt else (),
            ),
            meter=StreamMeter(self._metrics),
        )

    def _sampling_params(self, request: SamplingRequest, wanted: int, room: int) -> SamplingParams:
        if request.min_tokens > wanted:
            raise InvalidRequestError("min_tokens exceeds the output limit", param="min_tokens")
        defaults = self.model.defaults
        seed = secrets.randbits(63) if request.seed is None else request.seed & _SEED_MASK
        return SamplingParams(
            temperature=_first(request.temperature, defaults.temperature, 1.0),
            top_p=_first(request.top_p, defaults.top_p, 1.0),
            top_k=_first(request.top_k, defaults.top_k, 0),
            min_p=_first(request.min_p, defaults.min_p, 0.0),
            repetition_penalty=_first(request.repetition_penalty, defaults.repetition_penalty, 1.0),
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias={int(token_id): bias for token_id, bias in request.logit_bias.items()},
            seed=seed,
            max_tokens=min(wanted, room),
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            stop_token_ids=tuple(request.stop_token_ids),
            logprobs=request.num_logprobs,
            stop=tuple(request.stop),
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
        )


class Generation:
    """One sequence. Used as a context: entering submits it, leaving before the end aborts it.

        with generation:
            while (delta := await generation.next()) is not None:
                ...
        generation.finish_reason, generation.usage

    Attributes:
        finish_reason: None until the end; `ABORT` after `cancel`.
        token_ids: the output so far, without what came after a stop string.
    """

    def __init__(
        self, engine: EngineClient, request: Request, *, text: OutputText, meter: StreamMeter
    ) -> None:
        self.request = request
        self.finish_reason: FinishReason | None = None
        self.token_ids: list[int] = []
        self._engine = engine
        self._stream: EngineStream | None = None
        self._text = text
        self._meter = meter
        self._num_cached_tokens = 0

    def __enter__(self) -> Generation:
        self._stream = self._engine.submit(self.request)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Not a coroutine, so no cancellation can come between the client's leaving and this.
        self._engine.abort(self.request.request_id)
        is_error = kind is not None and issubclass(kind, Exception)
        reason = self.finish_reason or (FinishReason.ERROR if is_error else FinishReason.ABORT)
        self._meter.finished(reason.value)

    def cancel(self) -> None:
        """Stop it; what has come so far is still delivered, and then the end."""
        self._engine.abort(self.request.request_id)
        if self._stream is not None:
            self._stream.push(
                RequestOutput(request_id=self.request.request_id, finish_reason=FinishReason.ABORT)
            )

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            output_tokens=len(self.token_ids),
            cached_tokens=self._num_cached_tokens,
        )

    async def next(self) -> Delta | None:
        """All that came since the last call; None at the end.

        Raises:
            EngineDeadError: the engine died.
            GenerationFailedError: the engine gave up on this request.
        """
        assert self._stream is not None, "next() outside of its context"
        while self.finish_reason is None:
            delta = self._take(await self._stream.next())
            if delta.text or delta.logprobs:
                return delta
        return None

    def _take(self, output: RequestOutput) -> Delta:
        if output.finish_reason is FinishReason.ERROR:
            self.finish_reason = FinishReason.ERROR
            raise GenerationFailedError(output.error or "the engine refused the request")
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if output.token_ids:
            self._meter.tokens(
                len(output.token_ids), num_prompt_tokens=len(self.request.prompt_token_ids)
            )
        params = self.request.sampling_params
        # A token that ended the sequence counts, but carries no text.
        is_silent = output.stop_token_id is not None and not params.include_stop_str_in_output
        spoken = output.token_ids[:-1] if is_silent else output.token_ids
        pushed = self._text.push(spoken)
        text, logprobs = pushed.text, output.logprobs[: pushed.num_tokens]
        if pushed.stop is not None:
            self.token_ids += spoken[: pushed.num_tokens]
            self.finish_reason = FinishReason.STOP
            self._engine.abort(self.request.request_id)
            return Delta(text, logprobs)
        self.token_ids += output.token_ids
        if output.finish_reason is not None:
            rest = self._text.finish()
            text += rest.text
            self.finish_reason = output.finish_reason if rest.stop is None else FinishReason.STOP
        return Delta(text, logprobs)


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas of several generations as they come, each with its generation's index."""
    if len(generations) == 1:  # no tasks on the usual path
        while (delta := await generations[0].next()) is not None:
            yield 0, delta
        return
    waiting = {
        asyncio.ensure_future(generation.next()): index
        for index, generation in enumerate(generations)
    }
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, delta = waiting.pop(task), task.result()
                if delta is not None:
                    waiting[asyncio.ensure_future(generations[index].next())] = index
                    yield index, delta
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _off_loop(work: Callable[[], _Result], num_chars: int) -> _Result:
    if num_chars < _LONG_TEXT_CHARS:
        return work()
    return await asyncio.to_thread(work)


_Number = TypeVar("_Number", int, float)


def _first(*values: _Number | None) -> _Number:
    return next(value for value in values if value is not None)


def _check_vocabulary(
    token_ids: Sequence[int] | Mapping[int, float], size: int, *, param: str
) -> None:
    if token_ids and max(token_ids) >= size:
        raise InvalidRequestError(
            f"token id {max(token_ids)} is not in the vocabulary of {size} tokens", param=param
        )
