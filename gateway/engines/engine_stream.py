"""One request's outputs on their way from the wire to whoever reads them.

What was not read yet is merged per branch, so a slow reader costs a few integers per token and
gets several tokens at once. All tokens that came are kept, so that another engine can go on from
them: a single output is continued, and only what belongs to its prompt may come twice; several
outputs and searches begin anew, and their first tokens must be those that are known, or it is
another answer (`Replay`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from penstock.engine.request import Request, RequestOutput, TokenLogprobs
from penstock.engine.transport.messages import Submit
from penstock.gateway.errors import GenerationFailedError


class EngineStream:
    """A request's outputs, in order; those of one branch merge, but never across a notice.

    Attributes:
        wire_id: its name in the engine that computes it; None while none does.
        token_ids: by branch, all that came.
        ended: branches that need nothing more: they finished, or are not wanted.
        epoch: of the owner of what is computed, where gateways share it; otherwise 1.
        num_deaths: engines that died while they had this request.
        num_strikes: those of them since its last output came.
    """

    __slots__ = (
        "_error",
        "_is_done",
        "_num_prompt_logprobs",
        "_num_submits",
        "_on_ready",
        "_open",
        "_pending",
        "_replay",
        "ended",
        "epoch",
        "num_deaths",
        "num_strikes",
        "request",
        "token_ids",
        "wire_id",
    )

    def __init__(self, request: Request, *, epoch: int = 1) -> None:
        self.request = request
        self.epoch = epoch
        self.wire_id: str | None = None
        self.token_ids: list[list[int]] = [[] for _ in range(request.sampling_params.num_branches)]
        self.token_ids[0] += request.output_token_ids
        self.ended: set[int] = set()
        self.num_deaths = 0
        self.num_strikes = 0
        self._pending: list[RequestOutput | _Merged] = []
        self._open: dict[int, int] = {}  # by branch, once outputs merge: the place of its last
        self._error: Exception | None = None
        self._is_done = False
        self._on_ready: Callable[[], None] | None = None
        self._num_prompt_logprobs = 0
        self._num_submits = 0
        self._replay: Replay | None = None

    # -- for the reader ---------------------------------------------------------------------

    async def next(self) -> list[RequestOutput]:
        """Everything that came since the last call; waits while there is nothing.

        Raises:
            EngineDeadError: the engine died, and no other came to go on.
            GenerationFailedError: no engine can go on with this request.
        """
        while not self._pending and self._error is None:
            waiter = asyncio.get_running_loop().create_future()
            self.when_ready(partial(_release, waiter))
            await waiter
        return self.take()

    def when_ready(self, call: Callable[[], None]) -> None:
        """Have this called, once, as soon as there is something to take; maybe at once."""
        if self._pending or self._error is not None:
            call()
        else:
            self._on_ready = call

    def take(self) -> list[RequestOutput]:
        """Everything that came since the last call, if anything did.

        Raises:
            Exception: as `next`.
        """
        if not self._pending and self._error is not None:  # first what arrived, then the error
            raise self._error
        outputs, self._pending = self._pending, []
        if self._open:
            self._open.clear()
        return [
            output if isinstance(output, RequestOutput) else output.whole() for output in outputs
        ]

    # -- for the client ---------------------------------------------------------------------

    def push(self, output: RequestOutput) -> None:
        """An output came.

        Raises:
            GenerationFailedError: it contradicts what came from an engine before.
        """
        if self._is_done:
            return
        self._is_done = output.is_last
        self.num_strikes = 0
        if self._replay is not None:
            unseen = self._replay.unseen(output)
            if self._replay.is_over:
                self._replay = None
            if unseen is None:
                return
            output = unseen
        self.token_ids[output.index] += output.token_ids
        if output.finish_reason is not None:
            self.ended.add(output.index)
        if output.prompt_logprobs:
            self._num_prompt_logprobs += len(output.prompt_logprobs)
        if self._pending:
            self._merge(output)
        else:
            self._pending.append(output)
        if self._on_ready is not None:
            self._wake()

    def fail(self, error: Exception) -> None:
        if not self._is_done:
            self._is_done = True
            self._error = error
            if self._on_ready is not None:
                self._wake()

    def lose_engine(self) -> None:
        """The engine that computed it is gone."""
        self.wire_id = None
        self.num_deaths += 1
        self.num_strikes += 1

    def forgive_death(self) -> None:
        """The engine had not died: the link to it was lost."""
        self.num_deaths -= 1
        self.num_strikes = max(0, self.num_strikes - 1)

    def submit(self) -> Submit:
        """What an engine has to be asked at first, and so that it goes on. Each time under an id
        of its own: an engine, and what comes of it, may still know the one before."""
        request_id, num_before = self.request.request_id, self._num_submits
        self._num_submits += 1
        owner = f"@{self.epoch}" if self.epoch > 1 else ""
        again = f"~{num_before}" if num_before else ""
        self.wire_id = f"{request_id}{owner}{again}"
        request = self._continuation() if num_before else self.request
        return Submit(
            request=dataclasses.replace(request, request_id=self.wire_id),
            name=request_id,
            epoch=(self.epoch, num_before),
        )

    def _continuation(self) -> Request:
        params = self.request.sampling_params
        is_single = params.num_branches == 1 and params.beam_search is None
        self._replay = Replay(
            {0: ()} if is_single else dict(enumerate(self.token_ids)),
            ended=self.ended,
            num_prompt_logprobs=self._num_prompt_logprobs,
            has_tokens=any(self.token_ids),
        )
        return dataclasses.replace(
            self.request, output_token_ids=tuple(self.token_ids[0]) if is_single else ()
        )

    def _merge(self, output: RequestOutput) -> None:
        """Another output came before the last was read."""
        pending, index = self._pending, output.index
        if not self._open:
            self._open = {each.index: 0 for each in pending if isinstance(each, RequestOutput)}
        place = self._open.get(index)
        if place is None or output.notice is not None:
            self._open[index] = len(pending)
            pending.append(output)
            return
        last = pending[place]
        if isinstance(last, RequestOutput):
            last = pending[place] = _Merged(last)
        last.add(output)

    def _wake(self) -> None:
        assert self._on_ready is not None
        call, self._on_ready = self._on_ready, None
        call()


def _release(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class _Merged:
    """Outputs of one branch that were not read yet: the first, and what later ones add to it."""

    __slots__ = (
        "_first",
        "_last",
        "_logprobs",
        "_num_cached_tokens",
        "_prompt_logprobs",
        "_token_ids",
    )

    def __init__(self, output: RequestOutput) -> None:
        self._first = self._last = output
        self._num_cached_tokens = output.num_cached_tokens
        self._token_ids = [*output.token_ids]
        self._logprobs: list[TokenLogprobs] = [*output.logprobs]
        self._prompt_logprobs: list[TokenLogprobs] = [*output.prompt_logprobs]

    def add(self, output: RequestOutput) -> None:
        self._last = output
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs

    def whole(self) -> RequestOutput:
        return dataclasses.replace(
            self._last,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            num_cached_tokens=self._num_cached_tokens,
            notice=self._first.notice,  # no other has one
        )


class Replay:
    """Takes what is known out of one stream's outputs.

    Args:
        due: by branch, the tokens that come again.
        ended: branches of which nothing more is wanted.
        num_prompt_logprobs: as many are known.
        has_tokens: tokens had come, and with them how many of the prompt's were cached.
    """

    def __init__(
        self,
        due: Mapping[int, Sequence[int]],
        *,
        ended: Iterable[int],
        num_prompt_logprobs: int,
        has_tokens: bool,
    ) -> None:
        self._due = {index: tuple(token_ids) for index, token_ids in due.items()}
        self._num_seen = dict.fromkeys(due, 0)
        self._ended = frozenset(ended)
        self._num_prompt_logprobs = num_prompt_logprobs
        self._has_tokens = has_tokens

    @property
    def is_over(self) -> bool:
        """Whether all that follows is new."""
        return not self._due and not self._ended

    def unseen(self, output: RequestOutput) -> RequestOutput | None:
        """What of an output is new, if anything is.

        Raises:
            GenerationFailedError: it contradicts what is known.
        """
        prompt_logprobs = self._unseen_prompt_logprobs(output)
        if output.index in self._ended:
            return None  # computed before the engine heard that it is not wanted
        num_known = self._num_known(output)
        token_ids = output.token_ids[num_known:]
        num_cached = 0 if self._has_tokens else output.num_cached_tokens
        is_told = token_ids or prompt_logprobs or num_cached or output.finish_reason
        if not is_told and output.notice is None and output.queue_position is None:
            return None
        return dataclasses.replace(
            output,
            token_ids=token_ids,
            logprobs=output.logprobs[num_known:],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached,
        )

    def _unseen_prompt_logprobs(self, output: RequestOutput) -> tuple[TokenLogprobs, ...]:
        num_known = min(self._num_prompt_logprobs, len(output.prompt_logprobs))
        self._num_prompt_logprobs -= num_known
        return output.prompt_logprobs[num_known:]

    def _num_known(self, output: RequestOutput) -> int:
        """How many of its tokens, from the first on, are known."""
        index, token_ids = output.index, output.token_ids
        due = self._due.get(index)
        if due is None or output.error is not None:
            return 0
        start = self._num_seen[index]
        known = due[start : start + len(token_ids)]
        is_cut_short = output.finish_reason is not None and start + len(token_ids) < len(due)
        if token_ids[: len(known)] != known or is_cut_short:
            raise GenerationFailedError(
                "the engine died, and its successor answers this request differently"
            )
        self._num_seen[index] += len(known)
        if token_ids and self._num_seen[index] == len(due):
            del self._due[index]  # with the first token all that belongs to the prompt is here
        return len(known)
