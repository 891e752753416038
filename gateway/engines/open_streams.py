"""The open streams, which outlive the engine that computes them.

When the engine dies they wait, and the next engine continues them. One of the requests may be the
cause of the deaths. A request that was in the engine at two deaths in a row, with no output between
them, is a suspect. Suspects enter the next engine one at a time, each after the previous one has
had an output; if the engine dies again with a suspect, that request fails.

    in the engine ──death──► waiting ──new engine──► in the engine        (suspects: one by one)
         │                      └─ no engine in time, too many deaths ──► failed
         └─ last output, abort ──► closed

This module only plans messages; `post` sends them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from penstock.engine.errors import EngineDeadError
from penstock.engine.request import Request, RequestOutput
from penstock.engine.transport.messages import Abort, Message
from penstock.gateway.engines.engine_stream import EngineStream
from penstock.gateway.errors import GenerationFailedError
from penstock.gateway.wake_ups import WakeUps

_MAX_STRIKES = 3
_TRIAL_S = 10.0  # an engine that survives a suspect for this long accepts the next one


class OpenStreams:
    """
    Args:
        post: sends a message to the current engine.
        max_engine_lives: a request fails when this many engines have died with it.
        engine_wait_s: how long to wait for the next engine.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        post: Callable[[Message], None],
        *,
        max_engine_lives: int,
        engine_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._post = post
        self._max_engine_lives = max_engine_lives
        self._engine_wait_s = engine_wait_s
        self._clock = clock
        self._wake_ups = WakeUps()
        self._streams: dict[EngineStream, None] = {}  # in order
        self._in_engine: dict[str, EngineStream] = {}  # by wire id
        self._lost: list[EngineStream] = []  # those that the last engine had
        self._death: tuple[float, str] | None = None  # when and why, while there is no engine
        self._suspects: deque[EngineStream] = deque()
        self._trial: EngineStream | None = None
        self._trial_began_s = 0.0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request: Request, *, epoch: int = 1) -> EngineStream:
        """Submit a request."""
        stream = EngineStream(request, epoch=epoch, wake_ups=self._wake_ups)
        self._streams[stream] = None
        self._submit(stream)
        return stream

    def abort(self, stream: EngineStream) -> None:
        """Stop a request. Does nothing if it has finished."""
        if stream not in self._streams:
            return
        del self._streams[stream]
        if stream.wire_id is not None:
            self._post(Abort(request_ids=(stream.wire_id,)))
            self._leave(stream)

    def abort_branch(self, stream: EngineStream, index: int) -> None:
        """Stop one branch; the request continues. Outputs in flight are still delivered."""
        if stream in self._streams:
            stream.ended.add(index)
            if stream.wire_id is not None:
                self._post(Abort(branches=((stream.wire_id, index),)))

    def deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """Pass the outputs of an engine's iteration to their streams."""
        find = self._in_engine.get
        for output in outputs:
            # A request may have been aborted while its outputs were in flight.
            stream = find(output.request_id)
            if stream is None:
                continue
            try:
                stream.push(output)
            except GenerationFailedError as error:
                self.abort(stream)
                stream.fail(error)
                continue
            if output.is_last:
                del self._streams[stream]
                self._leave(stream)
        if self._trial is not None and self._trial.num_strikes == 0:
            self._try_next()

    # -- the engine's lives -----------------------------------------------------------------

    def lose_engine(self, reason: str) -> None:
        """The engine died or the link was lost. In the latter case the engine gets the aborts."""
        if self._death is None:
            self._death = self._clock(), reason
        if self._in_engine:
            self._post(Abort(request_ids=tuple(self._in_engine)))
            self._lost = list(self._in_engine.values())
        lost, self._in_engine = self._in_engine, {}
        self._suspects.clear()
        self._trial = None
        for stream in lost.values():
            stream.lose_engine()
            if stream.num_strikes >= _MAX_STRIKES:
                text = f"the engine died {_MAX_STRIKES} times with this request: {reason}"
                self._fail(stream, GenerationFailedError(text))
            elif stream.num_deaths >= self._max_engine_lives:
                self._fail(stream, EngineDeadError(f"the engine died: {reason}"))

    def continue_all(self, *, is_same: bool = False) -> None:
        """There is an engine: it continues all waiting streams.

        Args:
            is_same: it is the engine that was lost: it or this gateway had only been stopped.
        """
        self._death = None
        if is_same:
            for stream in self._lost:
                stream.forgive_death()
        self._lost.clear()
        for stream in self._streams:
            if stream.num_strikes == _MAX_STRIKES - 1:
                self._suspects.append(stream)
            elif stream.wire_id is None:
                self._submit(stream)
        self._try_next()

    def tick(self) -> None:
        """Called regularly: checks the time limits."""
        now_s = self._clock()
        if self._death is not None and now_s - self._death[0] >= self._engine_wait_s:
            self.fail_all(f"the engine died: {self._death[1]}")
        if self._trial is not None and now_s - self._trial_began_s >= _TRIAL_S:
            self._try_next()

    def fail_all(self, reason: str) -> None:
        """End every stream."""
        if self._in_engine:
            self._post(Abort(request_ids=tuple(self._in_engine)))
        self._suspects.clear()
        for stream in list(self._streams):
            self._fail(stream, EngineDeadError(reason))

    def _submit(self, stream: EngineStream) -> None:
        submit = stream.submit()
        wire_id = submit.request.request_id
        self._in_engine[wire_id] = stream
        self._post(submit)
        if stream.ended:
            branches = tuple((wire_id, index) for index in sorted(stream.ended))
            self._post(Abort(branches=branches))

    def _try_next(self) -> None:
        """Submit the next suspect, if there is one."""
        self._trial = None
        while self._suspects and self._trial is None:
            stream = self._suspects.popleft()
            if stream in self._streams:  # not aborted
                self._trial, self._trial_began_s = stream, self._clock()
                self._submit(stream)

    def _fail(self, stream: EngineStream, error: Exception) -> None:
        del self._streams[stream]
        if stream.wire_id is not None:
            self._leave(stream)
        stream.fail(error)

    def _leave(self, stream: EngineStream) -> None:
        """The engine no longer has the stream."""
        assert stream.wire_id is not None
        del self._in_engine[stream.wire_id]
        stream.wire_id = None
        if stream is self._trial:
            self._try_next()
