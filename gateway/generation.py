"""From a planned request to deltas of text, whatever the transport.

    engine → outputs of branches → deltas → finish reasons and usage

Lives here: stop strings, the choice of the best branches, and the promise that a generation that
is left early is aborted. Not known here: HTTP, SSE, WebSocket, the shape of any API's answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import (
    FinishReason,
    Notice,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from penstock.engine.text import OutputText
from penstock.gateway.engine_client import EngineClient
from penstock.gateway.engine_stream import EngineStream
from penstock.gateway.errors import GenerationFailedError
from penstock.gateway.metrics import StreamMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What came of one branch since its last delta.

    Attributes:
        index: which branch.
        text: may be empty while a character or a stop string is incomplete.
        logprobs: one entry per token that has text; empty unless asked for.
        finish_reason: set on the branch's last delta, and only there.
        notice: what happened to the branch before this text came.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    notice: Notice | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A whole branch."""

    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class Branch:
    """One of a request's outputs.

    Attributes:
        finish_reason: None until the end.
        token_ids: the output so far, without what came after a stop string.
    """

    __slots__ = ("_index", "_params", "_sum_logprobs", "_text", "finish_reason", "token_ids")

    def __init__(self, index: int, text: OutputText, params: SamplingParams) -> None:
        self.finish_reason: FinishReason | None = None
        self.token_ids: list[int] = []
        self._index = index
        self._text = text
        self._params = params
        self._sum_logprobs = 0.0

    @property
    def mean_logprob(self) -> float:
        """Per token of output; 0 if its logprobs were not reported."""
        return self._sum_logprobs / max(len(self.token_ids), 1)

    def take(self, output: RequestOutput) -> Delta:
        """What an output of the engine adds, until it ends or a stop string is found."""
        params = self._params
        # A token that ended the sequence counts, but carries no text.
        is_silent = output.stop_token_id is not None and not params.include_stop_str_in_output
        spoken = output.token_ids[:-1] if is_silent else output.token_ids
        pushed = self._text.push(spoken)
        text, counted, reason = pushed.text, output.token_ids, output.finish_reason
        if pushed.stop is not None:
            counted, reason = spoken[: pushed.num_tokens], FinishReason.STOP
        elif reason is not None:
            rest = self._text.finish()
            text += rest.text
            reason = reason if rest.stop is None else FinishReason.STOP
        self.token_ids += counted
        self._sum_logprobs += sum(entry.logprob for entry in output.logprobs[: len(counted)])
        self.finish_reason = reason
        return Delta(
            index=self._index,
            text=text,
            logprobs=() if params.logprobs is None else output.logprobs[: pushed.num_tokens],
            finish_reason=reason,
            notice=output.notice,
        )


class Generation:
    """One prompt and the branches of output that answer it. Used as a context: entering submits
    the request, leaving before the end aborts it.

        with generation:
            while (deltas := await generation.next()) is not None:
                ...
        generation.branches[0].finish_reason, generation.usage

    Args:
        texts: one per branch that is computed.

    Attributes:
        prompt_logprobs: of the prompt's tokens from the second on, if they were asked for; all of
            them are there when the first delta comes.
    """

    def __init__(
        self,
        engine: EngineClient,
        request: Request,
        *,
        texts: Sequence[OutputText],
        meter: StreamMeter,
    ) -> None:
        self.request = request
        self.branches = [
            Branch(index, text, request.sampling_params) for index, text in enumerate(texts)
        ]
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._engine = engine
        self._stream: EngineStream | None = None
        self._meter = meter
        self._num_cached_tokens = 0

    def __enter__(self) -> Generation:
        self._stream = self._engine.submit(self.request)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Not a coroutine, so no cancellation can come between the client's leaving and this.
        self._engine.abort(self.request.request_id)
        is_error = kind is not None and issubclass(kind, Exception)
        rest = FinishReason.ERROR if is_error else FinishReason.ABORT
        reason = self.branches[0].finish_reason if self.is_finished else None
        self._meter.finished((reason or rest).value)

    def cancel(self) -> None:
        """Stop it; what has come so far is still delivered, and then the end."""
        request_id = self.request.request_id
        self._engine.abort(request_id)
        if self._stream is None:
            return
        for index, branch in enumerate(self.branches):
            if branch.finish_reason is None:
                self._stream.push(
                    RequestOutput(
                        request_id=request_id, index=index, finish_reason=FinishReason.ABORT
                    )
                )

    @property
    def is_finished(self) -> bool:
        return all(branch.finish_reason is not None for branch in self.branches)

    @property
    def num_wanted(self) -> int:
        """Branches that the caller is to see; more of them may be computed."""
        return self.request.sampling_params.n

    @property
    def usage(self) -> Usage:
        """The prompt once, and the tokens of all branches that were computed."""
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            output_tokens=sum(len(branch.token_ids) for branch in self.branches),
            cached_tokens=self._num_cached_tokens,
        )

    def best(self) -> Sequence[int]:
        """The indices of the branches wanted: all, or the likeliest per token, best first."""
        indices = range(len(self.branches))
        if self.num_wanted == len(indices):
            return indices
        ranked = sorted(indices, key=lambda index: -self.branches[index].mean_logprob)
        return ranked[: self.num_wanted]

    async def next(self) -> list[Delta] | None:
        """All that came since the last call, in order; None at the end.

        Raises:
            EngineDeadError: the engine died.
            InvalidRequestError: the engine refused this request.
            GenerationFailedError: the engine gave up on this request.
        """
        assert self._stream is not None, "next() outside of its context"
        while not self.is_finished:
            outputs = await self._stream.next()
            deltas = [self._take(output) for output in outputs]
            assert self.is_finished or not any(output.is_last for output in outputs)
            telling = [delta for delta in deltas if delta is not None]
            if telling:
                return telling
        return None

    def _take(self, output: RequestOutput) -> Delta | None:
        if output.finish_reason is FinishReason.ERROR:
            message = output.error or "the engine gave no reason"
            if output.is_refused:
                raise InvalidRequestError(message, param=output.param)
            raise GenerationFailedError(message)
        branch = self.branches[output.index]
        if branch.finish_reason is not None:
            return None  # on its way when the branch was stopped
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        self.prompt_logprobs += output.prompt_logprobs
        self._meter.output(
            output.index,
            num_tokens=len(output.token_ids),
            num_prompt_tokens=len(self.request.prompt_token_ids),
        )
        delta = branch.take(output)
        if delta.finish_reason is not None and output.finish_reason is None:
            self._stop(output.index)
        is_telling = delta.text or delta.logprobs or delta.finish_reason or delta.notice
        return delta if is_telling else None

    def _stop(self, index: int) -> None:
        """A stop string was found: only the gateway knows, so the engine must be told."""
        if self.is_finished:
            self._engine.abort(self.request.request_id)
        else:
            self._engine.abort_branch(self.request.request_id, index)


async def merged(
    generations: Sequence[Generation],
) -> AsyncGenerator[tuple[int, list[Delta]], None]:
    """Enters several generations, and gives their deltas as they come, each with its number."""
    with contextlib.ExitStack() as stack:
        for generation in generations:
            stack.enter_context(generation)
        if len(generations) == 1:  # no tasks on the usual path
            while (deltas := await generations[0].next()) is not None:
                yield 0, deltas
            return
        waiting = {
            asyncio.ensure_future(generation.next()): number
            for number, generation in enumerate(generations)
        }
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    number, deltas = waiting.pop(task), task.result()
                    if deltas is not None:
                        waiting[asyncio.ensure_future(generations[number].next())] = number
                        yield number, deltas
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def collected(generations: Sequence[Generation]) -> list[list[Output]]:
    """The outputs wanted of each generation, whole."""
    deltas: dict[tuple[int, int], list[Delta]] = {}  # by generation and branch
    async with contextlib.aclosing(merged(generations)) as batches:
        async for number, batch in batches:
            for delta in batch:
                deltas.setdefault((number, delta.index), []).append(delta)
    return [
        [_whole(deltas[number, index]) for index in generation.best()]
        for number, generation in enumerate(generations)
    ]


def _whole(deltas: Sequence[Delta]) -> Output:
    reason = deltas[-1].finish_reason
    assert reason is not None
    return Output(
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=reason,
    )
