"""The open streams, which outlive the engine that computes them.

When an engine dies or drains, another one continues its streams; they wait while there is none.

One of the requests may be the cause of a death: one for which the engine had computed nothing yet.
These are suspects. The others continue at once. When the engine has computed something for each of
them, the suspects enter: first one alone, and while the engine lives, twice as many at a time. One
that was a suspect at two deaths in a row enters alone, and requests that come meanwhile wait until
its first output. If the engine dies a third time, and had nothing else that was new, that request
fails, and those that died with it are forgiven.

    in an engine ──death, drain──► waiting ──an engine──► in an engine    (suspects: later)
         │                            └─ no engine in time, too many deaths ──► failed
         └─ last output, abort ──► closed

This module only plans messages; an engine's `post` sends them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from penstock.engine.errors import EngineDeadError
from penstock.engine.protocol.messages import Abort, Hold, Message
from penstock.engine.request import Request, RequestOutput
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.engines.routing import EngineLoad
from penstock.gateway.errors import GenerationFailedError
from penstock.gateway.wake_ups import WakeUps

_MAX_STRIKES = 3
_TRIAL_S = 10.0  # an engine that survives suspects for this long accepts the next ones


class Engine(Protocol):
    """An engine of the pool."""

    @property
    def load(self) -> EngineLoad: ...

    @property
    def life(self) -> str:
        """Names the engine's process, whose KV cache ends with it."""
        ...

    def post(self, message: Message) -> None: ...

    def note_work(self) -> None: ...


class OpenStreams:
    """
    Args:
        choose: the engine for a stream; None: there is none.
        max_engine_deaths: a request fails when this many engines have died with it.
        engine_wait_s: how long to wait for the next engine.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        choose: Callable[[EngineStream], Engine | None],
        *,
        max_engine_deaths: int,
        engine_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._choose = choose
        self._max_engine_deaths = max_engine_deaths
        self._engine_wait_s = engine_wait_s
        self._clock = clock
        self._wake_ups = WakeUps()
        self._streams: dict[EngineStream, None] = {}  # in order
        self._in_engine: dict[str, tuple[EngineStream, Engine]] = {}  # by wire id
        # Those that an engine had when it was last lost.
        self._lost: dict[Engine, tuple[int, list[EngineStream]]] = {}  # with the death's number
        self._death: tuple[float, str] | None = None  # when and why, while there is no engine
        self._num_deaths = 0
        self._suspects: list[EngineStream] = []  # that wait for their trial
        self._trial: list[EngineStream] = []  # those that entered last
        self._has_suspects = False  # in the trial
        self._trial_size = 1
        self._trial_began_s = 0.0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request: Request, *, epoch: int = 1) -> EngineStream:
        """Submit a request."""
        stream = EngineStream(request, epoch=epoch, wake_ups=self._wake_ups)
        self._streams[stream] = None
        if self._is_held:
            self._suspects.append(stream)
        else:
            self._submit(stream)
        return stream

    def abort(self, stream: EngineStream) -> None:
        """Stop a request. Does nothing if it has finished."""
        if stream not in self._streams:
            return
        del self._streams[stream]
        if stream.wire_id is not None:
            _, engine = self._in_engine[stream.wire_id]
            engine.post(Abort(request_ids=(stream.wire_id,)))
            self._leave(stream)

    def abort_branch(self, stream: EngineStream, index: int) -> None:
        """Stop one branch; the request continues. Outputs in flight are still delivered."""
        if stream in self._streams:
            stream.ended.add(index)
            if stream.wire_id is not None:
                _, engine = self._in_engine[stream.wire_id]
                engine.post(Abort(branches=((stream.wire_id, index),)))

    def hold(self, stream: EngineStream, return_s: float) -> None:
        """Have the engine that ended a stream keep its KV, as its session is expected back."""
        if stream.left is not None:
            wire_id, post = stream.left
            post(Hold(request_id=wire_id, return_s=return_s))

    def deliver(self, outputs: Iterable[RequestOutput], tokens: Mapping[str, int]) -> None:
        """Pass the outputs of an engine's iteration to their streams (see `Step`)."""
        if outputs:
            self._deliver(outputs)
        find = self._in_engine.get
        for request_id, token_id in tokens.items():
            found = find(request_id)
            if found is not None and not found[0].push_token(token_id):
                self._deliver([RequestOutput(request_id=request_id, token_ids=(token_id,))])
        if self._trial:
            self._check_trial()

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        find = self._in_engine.get
        for output in outputs:
            # A request may have been aborted, or have left, while its outputs were in flight.
            found = find(output.request_id)
            if found is None:
                continue
            stream, engine = found
            if stream.prompt_cost:
                engine.load.begin(stream)
            try:
                stream.push(output)
            except GenerationFailedError as error:
                self.abort(stream)
                stream.fail(error)
                continue
            if output.is_last:
                del self._streams[stream]
                self._leave(stream)

    # -- the engines' connections ------------------------------------------------------------

    def lose_engine(self, engine: Engine, reason: str, *, is_at_fault: bool = False) -> int:
        """An engine died or the link was lost. In the latter case it gets the aborts.

        Args:
            is_at_fault: it was the engine's fault, not a request's.

        Returns:
            How many streams it had.
        """
        if self._death is None:
            self._death = self._clock(), reason
        self._num_deaths += 1
        self._trial_size = 1
        self._suspects.clear()
        lost = self.leave(engine)
        if lost:
            self._lost[engine] = self._num_deaths, lost
        suspects = set() if is_at_fault else {stream for stream in lost if stream.is_new}
        for stream in lost:
            stream.lose_engine(self._num_deaths, is_strike=stream in suspects)
        killer = next(iter(suspects)) if len(suspects) == 1 else None
        if killer is not None and killer.num_strikes >= _MAX_STRIKES:
            text = f"the engine died {_MAX_STRIKES} times with this request: {reason}"
            self._fail(killer, GenerationFailedError(text))
            for stream in self._streams:
                stream.forgive(killer.deaths)
        for stream in lost:
            if stream in self._streams and stream.num_deaths >= self._max_engine_deaths:
                self._fail(stream, EngineDeadError(f"the engine died: {reason}"))
        return len(lost)

    def leave(self, engine: Engine) -> list[EngineStream]:
        """Take all streams out of an engine; they wait, and `continue_all` continues them."""
        left = [stream for stream, its in self._in_engine.values() if its is engine]
        if left:
            ids = tuple(stream.wire_id for stream in left if stream.wire_id is not None)
            engine.post(Abort(request_ids=ids))
        self._trial = [stream for stream in self._trial if stream not in left]
        for stream in left:
            self._take_out(stream)
        return left

    def forgive(self, engine: Engine) -> None:
        """The engine that was lost is there again and had not died: it or this gateway had only
        been stopped."""
        death, lost = self._lost.pop(engine, (0, ()))
        for stream in lost:
            stream.forgive((death,))

    def forget(self, engine: Engine) -> None:
        """The engine will not be there again."""
        self._lost.pop(engine, None)

    def continue_all(self, *, besides: Collection[EngineStream] = ()) -> None:
        """There is an engine: it continues all waiting streams but these."""
        self._death = None
        self._suspects.clear()
        for stream in self._streams:
            if stream.wire_id is not None or stream in besides:
                continue
            if self._trial and not stream.num_strikes and not self._is_held:
                self._submit(stream)
            else:
                self._suspects.append(stream)
        self._check_trial()

    @property
    def _is_held(self) -> bool:
        """Whether nothing may enter beside the trial."""
        return any(stream.num_strikes >= _MAX_STRIKES - 1 for stream in self._trial)

    def is_waiting(self, stream: EngineStream) -> bool:
        """Whether a stream is open and no engine has it."""
        return stream in self._streams and stream.wire_id is None

    def resume(self, stream: EngineStream, engine: Engine | None) -> None:
        """Continue a stream, if it waits, in this engine; None: in the one that is chosen."""
        if self.is_waiting(stream):
            self._submit(stream, engine)

    def tick(self) -> None:
        """Called regularly: checks the time limits."""
        now_s = self._clock()
        if self._death is not None and now_s - self._death[0] >= self._engine_wait_s:
            self.fail_all(f"the engine died: {self._death[1]}")
        if self._trial and now_s - self._trial_began_s >= _TRIAL_S:
            self._end_trial()

    def fail_all(self, reason: str) -> None:
        """End every stream."""
        self._suspects.clear()
        for engine in {engine for _, engine in self._in_engine.values()}:
            self.leave(engine)
        for stream in list(self._streams):
            self._fail(stream, EngineDeadError(reason))

    def _submit(self, stream: EngineStream, engine: Engine | None = None) -> None:
        engine = engine or self._choose(stream)
        if engine is None:
            return  # it waits
        submit = stream.submit()
        stream.engine = engine.life
        wire_id = submit.request.request_id
        self._in_engine[wire_id] = stream, engine
        engine.load.enter(stream)
        engine.note_work()
        engine.post(submit)
        if stream.ended:
            branches = tuple((wire_id, index) for index in sorted(stream.ended))
            engine.post(Abort(branches=branches))

    def _check_trial(self) -> None:
        """Go on if the engine has computed something for all that entered last."""
        if not any(stream.is_new for stream in self._trial):
            self._end_trial()

    def _end_trial(self) -> None:
        """The engine lives."""
        if self._trial and self._has_suspects:
            self._trial_size *= 2
        self._try_next()

    def _try_next(self) -> None:
        """Submit the next suspects, if there are any: the least suspicious first."""
        self._trial = []
        waiting = [stream for stream in self._suspects if self.is_waiting(stream)]
        least = min((stream.num_strikes for stream in waiting), default=0)
        kin = [stream for stream in waiting if stream.num_strikes == least]
        self._has_suspects = least > 0
        if least:
            kin = kin[: 1 if least >= _MAX_STRIKES - 1 else self._trial_size]
        self._suspects = [stream for stream in waiting if stream not in kin]
        for stream in kin:
            self._submit(stream)
        self._trial = [stream for stream in kin if stream.wire_id is not None]
        self._trial_began_s = self._clock()

    def _fail(self, stream: EngineStream, error: Exception) -> None:
        del self._streams[stream]
        if stream.wire_id is not None:
            self._leave(stream)
        stream.fail(error)

    def _leave(self, stream: EngineStream) -> None:
        """The engine no longer has the stream."""
        self._take_out(stream)
        if stream in self._trial:
            self._trial.remove(stream)
            self._check_trial()

    def _take_out(self, stream: EngineStream) -> None:
        assert stream.wire_id is not None
        _, engine = self._in_engine.pop(stream.wire_id)
        engine.load.leave(stream)
        stream.left = stream.wire_id, engine.post
        stream.wire_id = None
