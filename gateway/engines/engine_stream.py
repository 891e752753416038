"""One request's outputs between the transport and their reader.

Unread outputs are merged per branch, so a slow reader costs a few integers per token and gets
several tokens at once. All received tokens are kept, so that another engine can continue from them.
A single output is continued where it stopped, and only data about its prompt may arrive twice.
Several outputs and beam searches are computed again from the start, and their first tokens must
equal the known ones, otherwise the request fails (`Replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from penstock.engine.protocol.checks import PeerFaultError
from penstock.engine.protocol.messages import Message, Submit
from penstock.engine.request import Request, RequestOutput, Spent, TokenLogprobs
from penstock.gateway.errors import GenerationFailedError
from penstock.gateway.wake_ups import WakeUps


class EngineStream:
    """A request's outputs, in order; those of one branch are merged, but never across a notice.

    A `Source`. Its callbacks come in the event loop's next iteration.

    Args:
        wake_ups: shared by the streams of a client.

    Attributes:
        wire_id: the request's id in the engine that computes it; None while no engine does.
        token_ids: all received tokens, by branch.
        ended: branches that finished or were aborted.
        epoch: of the owner, where gateways take over requests from each other; otherwise 1.
        prompt_cost, output_cost: what its engine has to compute, as `routing` counts it.
        deaths: of engines that had this request, by their numbers.
        engine: that computes it, or did last (`open_streams.Engine.life`).
        num_strikes: deaths in a row before the engine had computed anything for it.
        is_new: the engine that has it has not computed anything for it yet.
        left: its id in the engine that had it last, and how to send that engine a message.
    """

    __slots__ = (
        "_error",
        "_is_done",
        "_is_steady",
        "_last_index",
        "_max_tokens",
        "_num_prompt_logprobs",
        "_num_submits",
        "_on_ready",
        "_pending",
        "_replay",
        "_tokens",
        "_wake_ups",
        "deaths",
        "ended",
        "engine",
        "epoch",
        "is_new",
        "left",
        "num_strikes",
        "output_cost",
        "prompt_cost",
        "request",
        "token_ids",
        "wire_id",
    )

    def __init__(
        self, request: Request, *, epoch: int = 1, wake_ups: WakeUps | None = None
    ) -> None:
        self.request = request
        self.epoch = epoch
        self.wire_id: str | None = None
        self.left: tuple[str, Callable[[Message], None]] | None = None
        self.token_ids: list[list[int]] = [[] for _ in range(request.sampling_params.num_branches)]
        self.token_ids[0] += request.output_token_ids
        self._max_tokens = request.sampling_params.max_tokens
        self.ended: set[int] = set()
        self.prompt_cost = self.output_cost = 0.0
        self.deaths: set[int] = set()
        self.engine = ""
        self.num_strikes = 0
        self.is_new = True
        self._pending: list[RequestOutput | _Merged] = []
        self._tokens: list[int] = []  # of branch 0, after all in `_pending`
        self._is_steady = False  # outputs need not be looked at
        # By branch, while outputs are merged: the index of its last output in `_pending`.
        self._last_index: dict[int, int] = {}
        self._error: Exception | None = None
        self._is_done = False
        self._on_ready: Callable[[], None] | None = None
        self._wake_ups = wake_ups or WakeUps()
        self._num_prompt_logprobs = 0
        self._num_submits = 0
        self._replay: Replay | None = None

    # -- for the reader ---------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self._is_done and not (self._pending or self._tokens) and self._error is None

    def take_tokens(self) -> list[int] | None:
        """What `take` would return, if that is only tokens of branch 0; None if there is more, or
        nothing."""
        if self._pending or not self._tokens:
            return None
        tokens, self._tokens = self._tokens, []
        return tokens

    def take(self) -> list[RequestOutput]:
        """All outputs since the last call; may be empty.

        Raises:
            EngineDeadError: the engine died and no other replaced it in time.
            GenerationFailedError: no engine can continue this request.
        """
        if self._tokens:
            self._flush_tokens()
        if not self._pending and self._error is not None:  # outputs come before the error
            raise self._error
        outputs, self._pending = self._pending, []
        if not self._last_index:
            return outputs  # type: ignore[return-value]  # nothing was merged
        self._last_index.clear()
        return [
            output if isinstance(output, RequestOutput) else output.whole() for output in outputs
        ]

    def when_ready(self, call: Callable[[], None]) -> bool:
        if self._pending or self._tokens or self._is_done:
            return False
        self._on_ready = call
        return True

    # -- for the client ---------------------------------------------------------------------

    @property
    def num_deaths(self) -> int:
        return len(self.deaths)

    def push_token(self, token_id: int) -> bool:
        """Add an output that is one token of branch 0 and nothing else, as nearly all are. False:
        it is for `push`.

        Raises:
            PeerFaultError: the request does not want so many.
        """
        if not self._is_steady:
            return False
        token_ids = self.token_ids[0]
        if len(token_ids) >= self._max_tokens:
            raise self._too_many()
        token_ids.append(token_id)
        self._tokens.append(token_id)
        if self._on_ready is not None:  # as `_wake`, without a call for each token
            self._wake_ups.add(self._on_ready)
            self._on_ready = None
        return True

    def push(self, output: RequestOutput) -> None:
        """Add an output.

        Raises:
            GenerationFailedError: it differs from what an earlier engine sent.
            PeerFaultError: it cannot be an output of this request.
        """
        if self._is_done:
            return
        if output.index >= len(self.token_ids):
            raise PeerFaultError(f"output {output.index} of {len(self.token_ids)}")
        if output.logprobs and len(output.logprobs) != len(output.token_ids):
            raise PeerFaultError("it says log-probabilities of other tokens than it sends")
        if self.is_new and (output.token_ids or output.prompt_logprobs or output.finish_reason):
            self.is_new = False
            self.num_strikes = 0
        if self._replay is not None:
            unseen = self._replay.unseen(output)
            if self._replay.is_over:
                self._replay = None
            if unseen is None:
                self._is_done = output.is_last
                return
            output = unseen
        token_ids = self.token_ids[output.index]
        if len(token_ids) + len(output.token_ids) > self._max_tokens:
            raise self._too_many()
        token_ids += output.token_ids
        self._is_done = output.is_last
        self._is_steady = not (self.is_new or self._is_done) and self._replay is None
        if output.finish_reason is not None:
            self.ended.add(output.index)
        if output.prompt_logprobs:
            self._add_prompt_logprobs(len(output.prompt_logprobs))
        if self._tokens:
            self._flush_tokens()
        self._add(output)
        self._wake()

    def _wake(self) -> None:
        if self._on_ready is not None:
            self._wake_ups.add(self._on_ready)
            self._on_ready = None

    def _too_many(self) -> PeerFaultError:
        return PeerFaultError(f"it sends more than max_tokens, {self._max_tokens}")

    def _flush_tokens(self) -> None:
        """Make an output of the tokens."""
        tokens, self._tokens = tuple(self._tokens), []
        self._add(RequestOutput(request_id=self.request.request_id, token_ids=tokens))

    def _add(self, output: RequestOutput) -> None:
        if self._pending:
            self._merge(output)
        else:
            self._pending.append(output)

    def _add_prompt_logprobs(self, num_new: int) -> None:
        self._num_prompt_logprobs += num_new
        if self._num_prompt_logprobs >= len(self.request.prompt_token_ids):
            raise PeerFaultError("it says more log-probabilities than the prompt has tokens")

    def fail(self, error: Exception) -> None:
        if not self._is_done:
            self._is_done = True
            self._is_steady = False
            self._error = error
            self._wake()

    def lose_engine(self, death: int, *, is_strike: bool) -> None:
        """The engine that computed the request is gone.

        Args:
            death: its number.
            is_strike: this request may be the cause.
        """
        self.deaths.add(death)
        self.num_strikes += is_strike

    def forgive(self, deaths: Collection[int]) -> None:
        """This request was not the cause of these deaths."""
        num_forgiven = len(self.deaths.intersection(deaths))
        self.deaths.difference_update(deaths)
        self.num_strikes = max(0, self.num_strikes - num_forgiven)

    def submit(self) -> Submit:
        """The message that starts or continues the request in an engine. Each has a new id, because
        the engine, or outputs in flight, may still refer to the previous one."""
        request_id, num_before = self.request.request_id, self._num_submits
        self._num_submits += 1
        self.is_new = True
        self._is_steady = False
        owner = f"@{self.epoch}" if self.epoch > 1 else ""
        again = f"~{num_before}" if num_before else ""
        self.wire_id = f"{request_id}{owner}{again}"
        request = self._continuation() if num_before else self.request
        return Submit(
            request=msgspec.structs.replace(request, request_id=self.wire_id),
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
        return msgspec.structs.replace(
            self.request, output_token_ids=tuple(self.token_ids[0]) if is_single else ()
        )

    def _merge(self, output: RequestOutput) -> None:
        """Add an output while others are unread."""
        pending, branch = self._pending, output.index
        if not self._last_index:
            self._last_index = {e.index: 0 for e in pending if isinstance(e, RequestOutput)}
        index = self._last_index.get(branch)
        if index is None or output.notice is not None:
            self._last_index[branch] = len(pending)
            pending.append(output)
            return
        last = pending[index]
        if isinstance(last, RequestOutput):
            last = pending[index] = _Merged(last)
        last.add(output)


class _Merged:
    """Several unread outputs of one branch, merged."""

    __slots__ = (
        "_first",
        "_last",
        "_logprobs",
        "_num_accepted_tokens",
        "_num_cached_tokens",
        "_num_draft_tokens",
        "_num_host_cached_tokens",
        "_prompt_logprobs",
        "_spent",
        "_token_ids",
    )

    def __init__(self, output: RequestOutput) -> None:
        self._first = self._last = output
        self._num_cached_tokens = output.num_cached_tokens
        self._num_host_cached_tokens = output.num_host_cached_tokens
        self._spent = output.spent
        self._num_draft_tokens = output.num_draft_tokens
        self._num_accepted_tokens = output.num_accepted_tokens
        self._token_ids = [*output.token_ids]
        self._logprobs: list[TokenLogprobs] = [*output.logprobs]
        self._prompt_logprobs: list[TokenLogprobs] = [*output.prompt_logprobs]

    def add(self, output: RequestOutput) -> None:
        self._last = output
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        self._num_host_cached_tokens = max(
            self._num_host_cached_tokens, output.num_host_cached_tokens
        )
        self._spent = _sum(self._spent, output.spent)
        self._num_draft_tokens += output.num_draft_tokens
        self._num_accepted_tokens += output.num_accepted_tokens
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs

    def whole(self) -> RequestOutput:
        return msgspec.structs.replace(
            self._last,
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(self._prompt_logprobs),
            num_cached_tokens=self._num_cached_tokens,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
            num_host_cached_tokens=self._num_host_cached_tokens,
            spent=self._spent,
            notice=self._first.notice,  # only the first can have one
        )


def _sum(one: Spent | None, other: Spent | None) -> Spent | None:
    if one is None or other is None:
        return one or other
    return Spent(
        compute_us=one.compute_us + other.compute_us, block_us=one.block_us + other.block_us
    )


class Replay:
    """Removes from a stream's outputs what an earlier engine already sent.

    Args:
        due: the tokens that will come again, by branch.
        ended: branches whose outputs are dropped.
        num_prompt_logprobs: how many were received.
        has_tokens: tokens were received, and with the first of them the number of cached tokens.
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
        """The new part of an output; None if nothing is new.

        Raises:
            GenerationFailedError: the output differs from the known tokens.
        """
        prompt_logprobs = self._unseen_prompt_logprobs(output)
        if output.index in self._ended:
            return None  # computed before the engine received the abort
        num_known = self._num_known(output)
        token_ids = output.token_ids[num_known:]
        num_cached = 0 if self._has_tokens else output.num_cached_tokens
        has_news = token_ids or prompt_logprobs or num_cached or output.finish_reason
        is_told = output.notice is not None or output.queue_position is not None
        is_told |= output.spent is not None
        if not (has_news or is_told or output.num_tokens_ahead):
            return None
        return msgspec.structs.replace(
            output,
            token_ids=token_ids,
            logprobs=output.logprobs[num_known:],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached,
            num_host_cached_tokens=min(output.num_host_cached_tokens, num_cached),
        )

    def _unseen_prompt_logprobs(self, output: RequestOutput) -> tuple[TokenLogprobs, ...]:
        num_known = min(self._num_prompt_logprobs, len(output.prompt_logprobs))
        self._num_prompt_logprobs -= num_known
        return output.prompt_logprobs[num_known:]

    def _num_known(self, output: RequestOutput) -> int:
        """How many of an output's first tokens are known."""
        index, token_ids = output.index, output.token_ids
        due = self._due.get(index)
        if due is None or output.error is not None:
            return 0
        start = self._num_seen[index]
        known = due[start : start + len(token_ids)]
        is_cut_short = output.finish_reason is not None and start + len(token_ids) < len(due)
        if token_ids[: len(known)] != known or is_cut_short:
            raise GenerationFailedError(
                "the engine died, and the next one answers this request differently"
            )
        self._num_seen[index] += len(known)
        if token_ids and self._num_seen[index] == len(due):
            del self._due[index]  # data about the prompt arrives with the first token
        return len(known)
