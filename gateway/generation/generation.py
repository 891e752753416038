"""From a planned request to deltas of text, independent of the transport.

    engine → outputs of branches → deltas → finish reasons and usage

This module handles the choice of the best branches, aborting a generation that is left early, and
continuing one from the middle. A `Branch` is one growing output. APIs make their answers from a
`DeltaSource`: a `Generation` gets its deltas from an engine, `api.responses.logged_generation` from
a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import msgspec

from penstock.engine.chat_formats import (
    OutputFormat,
    OutputItem,
    OutputReader,
    Piece,
    items_of,
    pieces_after,
)
from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import (
    FinishReason,
    Notice,
    Request,
    RequestOutput,
    TokenLogprobs,
)
from penstock.engine.text import OutputText
from penstock.gateway.admission.admission import Reservation
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.errors import GenerationFailedError, SupersededError
from penstock.gateway.generation.branch import Branch, Delta, PlainDelta
from penstock.gateway.generation.cache_history import Comparison
from penstock.gateway.generation.progress import Estimates, Expectation, Progress
from penstock.gateway.sources import Source, next_of
from penstock.gateway.storage.usage.ledger import (
    Counts,
    Ledger,
    Noted,
    UsageRecord,
    settled,
    today,
)
from penstock.gateway.telemetry.metrics import StreamMeter


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A whole branch."""

    items: Sequence[OutputItem]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason

    @property
    def text(self) -> str:
        """The text of its messages."""
        return "\n".join(item.text for item in self.items if item.kind == "message")


class _Stage(enum.Enum):
    """Where a generation is in its life."""

    PLANNED = "planned"  # not entered yet
    WAITING = "waiting"  # nothing has been computed
    STARTED = "started"
    LEFT = "left"


# Looking up an enum's member takes longer than a call.
_STARTED, _ERROR, _PREPARING = _Stage.STARTED, FinishReason.ERROR, Notice.PREPARING


class Generation:
    """One prompt and the branches of output that answer it. A context manager: entering it submits
    the request, leaving it before the end aborts the request.

        with generation:
            while (deltas := await next_of(generation)) is not None:
                ...
        generation.branches[0].finish_reason, generation.usage

    A request with `output_token_ids` continues from the middle, wherever its beginning was
    computed. The first delta is the output of those tokens beyond `shown`, for example a
    character that was incomplete at the cut.

    Args:
        texts: one per branch that is computed.
        shown: the part of the output that was already delivered.
        output_format: how thoughts and tool calls are found in it; None: it is one message.
        epoch: see `EnginePool.submit`.
        reservation: released when the generation is left or discarded; None: nothing is reserved.
        has_end_logprobs, tells_every_token: see `GenerationOptions`.
        ledger: where its usage is recorded; None: nowhere, or whoever runs it records it.
        key_id: of its caller's API key.
        estimates: of times to first tokens; None: there are none.
        comparison: with the request before; None: it was begun elsewhere.

    Attributes:
        prompt_logprobs: of the prompt's tokens from the second on, if they were asked for; complete
            when the first delta arrives.
        began_at: Unix time in seconds.
        prefix_id: identifies the KV of all full blocks of prompt and output in an engine; None
            before the end, and if the gateway ended the output.
        cache: `penstock.cache`, once the prompt is computed; None: there is no request before.
    """

    def __init__(
        self,
        engine: EnginePool,
        request: Request,
        *,
        texts: Sequence[OutputText],
        meter: StreamMeter,
        shown: Sequence[Piece] = (),
        output_format: OutputFormat | None = None,
        epoch: int = 1,
        reservation: Reservation | None = None,
        has_end_logprobs: bool = False,
        tells_every_token: bool = False,
        ledger: Ledger | None = None,
        key_id: str = "",
        estimates: Estimates | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        self.request = request
        self.cache: Mapping[str, Any] | None = None
        self._comparison = comparison
        self.ledger = ledger
        self.key_id = key_id
        self.output_format = output_format
        self._epoch = epoch
        self._tells_every_token = tells_every_token
        self._reservation = reservation or Reservation()
        self.branches = [
            Branch(
                index,
                text,
                request.sampling_params,
                None if output_format is None else OutputReader(output_format),
                has_end_logprobs=has_end_logprobs,
            )
            for index, text in enumerate(texts)
        ]
        self.began_at = time.time()
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.prefix_id: bytes | None = None
        self._num_running = len(self.branches)
        self._shown = shown
        self._due: list[Delta] = []
        self._engine = engine
        self._stream: EngineStream | None = None
        self._meter = meter
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._stage = _Stage.PLANNED
        self._is_steady = False  # one plain branch, which has begun and not ended
        self._num_cached_tokens = self._num_host_cached_tokens = 0
        self._num_draft_tokens = self._num_accepted_tokens = 0
        self._compute_us = self._block_us = 0
        self._spent_before = NO_USAGE
        self._noted: Noted = None
        self._estimates = estimates
        self._expectation: Expectation | None = None  # until the first token
        self._progress: Progress | None = None  # likewise, if it was asked for
        self._timer: asyncio.TimerHandle | None = None  # of the next event about it

    def put_prompt(self, token_ids: Sequence[int], *, max_model_len: int, spent: Usage) -> None:
        """Replace the prompt of a generation that has not begun.

        Args:
            spent: on what the prompt was made from; counts as this one's.

        Raises:
            GenerationFailedError: it leaves no room for output.
        """
        assert self._stage is _Stage.PLANNED
        room = max_model_len - len(token_ids)
        if room < 1:
            raise GenerationFailedError(
                f"the compacted conversation has {len(token_ids)} tokens, which leaves no room for "
                f"output within {max_model_len}"
            )
        params = self.request.sampling_params
        limited = msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))
        self.request = msgspec.structs.replace(
            self.request, prompt_token_ids=tuple(token_ids), sampling_params=limited
        )
        self._num_prompt_tokens = len(token_ids)
        self._spent_before = spent

    @property
    def reservation(self) -> Reservation:
        return self._reservation

    def __enter__(self) -> Generation:
        """
        Raises:
            EngineDeadError: the engine is not available.
            GenerationFailedError: the delivered text does not match the output tokens.
        """
        if self.request.output_token_ids:
            self._catch_up(self.request.output_token_ids)
        if not self.is_finished:
            self._stream = self._engine.submit(self.request, epoch=self._epoch)
        self._stage = _Stage.WAITING
        if self._stream is not None:
            self._expect()
        return self

    def _expect(self) -> None:
        if self._estimates is None:
            return
        num_tokens, reserved = self._num_prompt_tokens, self._reservation
        expected = Expectation(
            self._estimates,
            wait_s=reserved.expected_wait_s,
            num_tokens=num_tokens,
            num_new=reserved.num_new,
        )
        self._expectation = expected
        if self.request.wants_queue_position and not self.request.output_token_ids:
            self._progress = Progress(num_tokens, self._estimates, expected, reserved)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Not a coroutine, so that cancellation cannot interrupt it.
        if self.is_finished:
            self._compare()
        if self._stream is not None:
            self._engine.abort(self._stream)
        self._stream, self._stage, self._is_steady = None, _Stage.LEFT, False
        self._end_progress()
        is_error = kind is not None and issubclass(kind, Exception)
        is_error &= kind is not SupersededError
        rest = FinishReason.ERROR if is_error else FinishReason.ABORT
        reason = self.branches[0].finish_reason if self.is_finished else None
        self._meter.finished((reason or rest).value, self._own_usage.counts)
        self._release_reservation()
        self._record()

    def _compare(self) -> None:
        """Compare it with the request before, once."""
        comparison, self._comparison = self._comparison, None
        if comparison is not None and self._stream is not None:
            self.cache = comparison.made(
                self.request,
                num_cached=self._num_cached_tokens,
                num_host_cached=self._num_host_cached_tokens,
                engine=self._stream.engine,
            )

    def _record(self) -> None:
        """Record its usage, if it has any."""
        ledger, self.ledger, usage = self.ledger, None, self.usage
        if ledger is not None and (self.is_finished or usage.output_tokens):
            self._noted = ledger.note(
                UsageRecord(
                    id=self.request.request_id,
                    tenant=self.request.tenant,
                    key_id=self.key_id,
                    day=today(),
                    counts=usage.counts,
                )
            )

    async def settle(self) -> None:
        await settled(self._noted)

    def discard(self, spent: Usage | None = None) -> None:
        """Release the reservation of a generation that will not be entered.

        Args:
            spent: what it was to be made from has cost this.
        """
        if spent is not None:
            self._spent_before = spent
        used = self._spent_before
        self._reservation.release(
            num_prompt=used.prompt_tokens,
            num_cached=used.cached_tokens,
            num_output=used.output_tokens,
        )

    def cancel(self) -> None:
        """Stop the generation. Output that has already arrived is still delivered, then the end."""
        if self._stream is None:
            return
        self._engine.abort(self._stream)
        request_id = self.request.request_id
        for index, branch in enumerate(self.branches):
            if branch.finish_reason is None:
                self._stream.push(
                    RequestOutput(
                        request_id=request_id, index=index, finish_reason=FinishReason.ABORT
                    )
                )

    @property
    def is_finished(self) -> bool:
        return self._num_running == 0

    @property
    def is_open(self) -> bool:
        """Whether the engine has it, or will."""
        return self._stream is not None and not self.is_finished

    @property
    def has_begun(self) -> bool:
        """Whether it has got a token."""
        return self._stage is _STARTED

    @property
    def num_wanted(self) -> int:
        """Branches that the caller gets; more may be computed."""
        return self.request.sampling_params.n

    @property
    def usage(self) -> Usage:
        """The prompt is counted once; output tokens include all computed branches."""
        own, before = self._own_usage, self._spent_before
        return own if before is NO_USAGE else total((before, own))

    @property
    def _own_usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            output_tokens=sum(len(each.token_ids) for each in self.branches),
            reasoning_tokens=sum(branch.num_reasoning_tokens for branch in self.branches),
            cached_tokens=self._num_cached_tokens,
            draft_tokens=self._num_draft_tokens,
            accepted_draft_tokens=self._num_accepted_tokens,
            host_cached_tokens=self._num_host_cached_tokens,
            compute_us=self._compute_us,
            block_us=self._block_us,
        )

    def best(self) -> Sequence[int]:
        """The indices of the branches for the caller: all, or those of the highest mean logprob,
        best first."""
        indices = range(len(self.branches))
        if self.num_wanted == len(indices):
            return indices
        ranked = sorted(indices, key=lambda index: -self.branches[index].mean_logprob)
        return ranked[: self.num_wanted]

    def output_token_ids(self, rank: int) -> Sequence[int]:
        """The token ids so far of the branch of this rank."""
        return self.branches[self.best()[rank]].token_ids

    @property
    def is_over(self) -> bool:
        return self._num_running == 0 and not self._due

    def take(self) -> list[Delta]:
        """All deltas since the last call, in order; may be empty.

        Raises:
            EngineDeadError: the engine died.
            InvalidRequestError: the engine refused this request.
            GenerationFailedError: the engine gave up on this request.
        """
        if self._is_steady:
            assert self._stream is not None
            token_ids = self._stream.take_tokens()
            if token_ids is not None:
                self._meter.more(len(token_ids))
                text = self.branches[0].add_tokens(token_ids)
                if text:
                    return [PlainDelta(0, text)]
                return [Delta(0, "")] if self._tells_every_token else []
        deltas: list[Delta] = []
        if self._due:
            deltas, self._due = self._due, deltas
        if self._num_running:
            assert self._stream is not None, "take() outside of its context"
            for output in self._stream.take():
                delta = self._delta_of(output)
                if delta is not None:
                    deltas.append(delta)
            if self._progress is not None and (told := self._progress.take()) is not None:
                deltas.append(Delta(0, "", progress=told))
        return deltas

    def when_ready(self, call: Callable[[], None]) -> bool:
        if self._due or self._stream is None or not self._num_running:
            return False
        if self._progress is not None:
            due_in_s = self._progress.due_in_s()
            if due_in_s <= 0:
                return False
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(due_in_s, call)
        return self._stream.when_ready(call)

    def _end_progress(self) -> None:
        self._progress = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _catch_up(self, token_ids: tuple[int, ...]) -> None:
        """Process the output tokens that are known, as if they had just arrived."""
        assert len(self.branches) == 1, "only a single output can be continued"
        reason = self._end_of(token_ids)
        delta = self.branches[0].add(
            RequestOutput(
                request_id=self.request.request_id,
                token_ids=token_ids,
                finish_reason=reason,
                stop_token_id=token_ids[-1] if reason is FinishReason.STOP else None,
            )
        )
        try:
            rest = pieces_after(self._shown, delta.parts)
        except ValueError as error:
            message = "the delivered output does not match the output tokens"
            raise GenerationFailedError(message) from error
        if self.output_format is None:
            delta.text = "".join(piece.text for piece in rest)
        else:
            delta.text, delta.pieces = "", rest
        self._num_running -= delta.finish_reason is not None
        if rest or delta.finish_reason:
            self._due.append(delta)

    def _end_of(self, token_ids: tuple[int, ...]) -> FinishReason | None:
        """Why the output ends with these tokens; None if it does not. The finish reason may have
        been lost with the previous owner."""
        info, params = self._engine.info_for_running(), self.request.sampling_params
        ends = params.stop_token_ids + (() if params.ignore_eos else info.eos_token_ids)
        if len(token_ids) >= params.min_tokens and token_ids[-1] in ends:
            return FinishReason.STOP
        if params.ends_in_loop(list(token_ids), len(token_ids)):
            return FinishReason.REPETITION
        num_tokens = len(self.request.prompt_token_ids) + len(token_ids)
        is_full = len(token_ids) >= params.max_tokens or num_tokens >= info.max_model_len
        return FinishReason.LENGTH if is_full else None

    def _delta_of(self, output: RequestOutput) -> Delta | None:
        if output.finish_reason is _ERROR:
            message = output.error or "the engine gave no reason"
            if output.is_superseded:
                raise SupersededError(message)
            if output.is_refused:
                raise InvalidRequestError(message, param=output.param)
            raise GenerationFailedError(message)
        if output.spent is not None:
            self._compute_us += output.spent.compute_us
            self._block_us += output.spent.block_us
        branch = self.branches[output.index]
        if branch.finish_reason is not None:
            return None  # already in flight when the branch was stopped
        if self._progress is not None:
            self._progress.hear(output)
        if output.notice is _PREPARING:
            return None
        if output.num_cached_tokens > self._num_cached_tokens:
            self._num_cached_tokens = output.num_cached_tokens
            self._num_host_cached_tokens = output.num_host_cached_tokens
        if output.num_draft_tokens:
            self._num_draft_tokens += output.num_draft_tokens
            self._num_accepted_tokens += output.num_accepted_tokens
        if output.prompt_logprobs:
            self.prompt_logprobs += output.prompt_logprobs
        num_tokens = len(output.token_ids)
        self._meter.output(output.index, num_tokens, self._num_prompt_tokens)
        delta = branch.add(output)
        if delta.finish_reason is not None:
            self._num_running -= 1
            self._is_steady = False
            if output.finish_reason is None:
                self._stop(output.index)
            elif output.index == 0:
                self.prefix_id = output.prefix_id
            is_call = delta.finish_reason is FinishReason.STOP and branch.has_called
            if is_call and self._stream is not None and self.request.session:
                self._engine.hold(self._stream)
        if num_tokens and self._stage is not _STARTED:
            self._stage = _STARTED
            self._reservation.started()
            if self._expectation is not None:
                self._expectation.met()
            self._end_progress()
            self._compare()
            self._is_steady = len(self.branches) == 1 == self._num_running and branch.is_plain
        if output.queue_position is not None:
            delta.queue_position = output.queue_position
            wait_s = self._reservation.wait_s(output.num_tokens_ahead)
            delta.estimated_wait_ms = round(wait_s * 1e3)
            return delta
        if delta.text or delta.pieces or delta.logprobs or delta.finish_reason or delta.notice:
            return delta
        if self._tells_every_token and num_tokens:
            return delta
        return None

    def _release_reservation(self) -> None:
        used = self.usage
        self._reservation.release(
            num_prompt=used.prompt_tokens if used.output_tokens else 0,
            num_cached=used.cached_tokens if used.output_tokens else 0,
            num_output=used.output_tokens,
            num_branches=len(self.branches),
        )

    def _stop(self, index: int) -> None:
        """Tell the engine that a branch has ended with a stop string or before one call too many,
        which only the gateway finds."""
        assert self._stream is not None
        if self.is_finished:
            self._engine.abort(self._stream)
        else:
            self._engine.abort_branch(self._stream, index)


class Merged:
    """Several generations as one source of deltas, each with the number of its generation. A
    context manager that enters them all."""

    def __init__(self, generations: Sequence[DeltaSource]) -> None:
        self._generations = generations
        self._running = list(enumerate(generations))
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> Merged:
        with contextlib.ExitStack() as entered:
            for generation in self._generations:
                entered.enter_context(generation)
            self._entered = entered.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)

    @property
    def is_over(self) -> bool:
        return not self._running

    def take(self) -> list[tuple[int, Delta]]:
        taken = []
        for entry in self._running.copy():
            number, each = entry
            taken += [(number, delta) for delta in each.take()]
            if each.is_over:
                self._running.remove(entry)
        return taken

    def when_ready(self, call: Callable[[], None]) -> bool:
        running = self._running
        return bool(running) and all(each.when_ready(call) for _, each in running)


async def collected(generations: Sequence[DeltaSource]) -> list[list[Output]]:
    """The best outputs of each generation, whole."""
    deltas: dict[tuple[int, int], list[Delta]] = {}  # by generation and branch
    with Merged(generations) as merged:
        while (taken := await next_of(merged)) is not None:
            for number, delta in taken:
                deltas.setdefault((number, delta.index), []).append(delta)
    return [
        [_whole(deltas[number, index]) for index in generation.best()]
        for number, generation in enumerate(generations)
    ]


def _whole(deltas: Sequence[Delta]) -> Output:
    reason = deltas[-1].finish_reason
    assert reason is not None
    return Output(
        items=items_of([piece for delta in deltas for piece in delta.parts]),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=reason,
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """What one or several requests have used; see `storage.usage.ledger.Counts`."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    host_cached_tokens: int = 0
    compute_us: int = 0
    block_us: int = 0

    @property
    def counts(self) -> Counts:
        """As those of one request."""
        return Counts(
            num_requests=1,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            host_cached_tokens=self.host_cached_tokens,
            output_tokens=self.output_tokens,
            thinking_tokens=self.reasoning_tokens,
            compute_us=self.compute_us,
            block_us=self.block_us,
        )


NO_USAGE = Usage(0, 0, 0)


def total(usages: Iterable[Usage]) -> Usage:
    """The sum of several generations' usage."""
    return Usage(*map(sum, zip(*map(astuple, usages), strict=True)))


def penstock_object(usage: Usage, cache: Mapping[str, Any] | None) -> dict[str, Any]:
    """`penstock` of an answer."""
    told = {
        "prompt_tokens": usage.prompt_tokens,
        "output_tokens": usage.output_tokens,
        **usage.counts.beyond_openai,
    }
    return {"usage": told} if cache is None else {"usage": told, "cache": cache}


class DeltaSource(Source[Delta], Protocol):
    """A context manager, like `Generation`."""

    def __enter__(self) -> DeltaSource: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...

    @property
    def request(self) -> Request: ...

    @property
    def output_format(self) -> OutputFormat | None:
        """How thoughts and tool calls are found in the output."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobs]:
        """Log-probabilities of the prompt's tokens from the second on, if they were asked for."""
        ...

    @property
    def usage(self) -> Usage:
        """Usage so far."""
        ...

    @property
    def cache(self) -> Mapping[str, Any] | None:
        """`penstock.cache`, once the prompt is computed."""
        ...

    async def settle(self) -> None:
        """Once it was left: wait until its usage is recorded, so that nobody is told of what may be
        lost; while the store is away, only for a moment."""
        ...

    @property
    def num_wanted(self) -> int:
        """Outputs that the caller gets."""
        ...

    def best(self) -> Sequence[int]:
        """The indices of the outputs for the caller, best first."""
        ...

    def output_token_ids(self, rank: int) -> Sequence[int]:
        """The token ids so far of the output of this rank."""
        ...
