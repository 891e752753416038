"""The step: plan a batch, submit it to the device, process the result of an earlier one.

    handle = executor.submit(scheduler.schedule())
    ...
    scheduler.update(batch, handle.result())

Joins policy and device, which never import each other; `Executor` is the interface. Up to
`max_steps_in_flight` batches are on the device at once; with one, a step is plan, compute, update.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.request import Request, RequestOutput, StructuredOutputs
from penstock.engine.scheduling import Scheduler


class Handle(Protocol):
    """A step that was submitted."""

    def result(self) -> BatchResult:
        """Wait for the step and return what it sampled; raises what the step raised."""
        ...


class Grammars(Protocol):
    """Compiled grammars; thread-safe."""

    def __len__(self) -> int: ...

    def __contains__(self, grammar: StructuredOutputs) -> bool: ...

    def compile(self, grammar: StructuredOutputs) -> None:
        """Compile a grammar, which may take a second, for the sequences that will have it.

        Raises:
            InvalidRequestError: it is invalid or too large.
        """
        ...


class Executor(Protocol):
    """The device or devices: runs batches in the order they are submitted."""

    def submit(self, batch: Batch) -> Handle:
        """Hand a batch over; it may still be running on return."""
        ...

    def num_parts_done(self) -> int:
        """Parts of all steps that are done, as far as the device counts them; thread-safe."""
        ...

    def describe(self) -> str:
        """The device's state in words, for the log when a step hangs."""
        ...

    @property
    def grammars(self) -> Grammars:
        """The grammars that its sequences may have."""
        ...

    def close(self) -> None:
        """Release the device. Nothing may be submitted afterwards."""
        ...


class EngineCore:
    """Requests in, outputs out, one iteration at a time."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, *, max_steps_in_flight: int = 1
    ) -> None:
        self.scheduler = scheduler
        self.grammars = executor.grammars
        self._executor = executor
        self._max_steps_in_flight = max_steps_in_flight
        self._in_flight: deque[tuple[Batch, Handle]] = deque()

    def add(self, request: Request) -> None:
        """Add a request; raises `InvalidRequestError` if it can never be served. The steps wait
        for its grammar if it is not among `grammars` yet."""
        self.scheduler.add(request)

    def abort(self, request_id: str, *, index: int | None = None) -> None:
        """Drop a request, or one of its samples. Its blocks are free at once; unknown ids are
        ignored."""
        self.scheduler.abort(request_id, index=index)

    def drop_prefix(self, token_ids: Sequence[int], *, cache_salt: str = "") -> int:
        """Forget the cached KV of these tokens, except blocks that are in use, and the outputs kept
        for drafts; the number of blocks forgotten."""
        self.scheduler.drafting.drop_prefix(token_ids, cache_salt=cache_salt)
        return self.scheduler.blocks.drop_prefix(token_ids, cache_salt=cache_salt)

    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_work()

    def step(self) -> list[RequestOutput]:
        """Keep the device busy and return the outputs of the oldest step in flight."""
        while len(self._in_flight) < self._max_steps_in_flight:
            batch = self.scheduler.schedule()
            if not (batch.scheduled or batch.left_seq_ids or batch.moves):
                break  # every sequence waits for a step in flight
            self._in_flight.append((batch, self._executor.submit(batch)))
        if not self._in_flight:
            return []
        batch, handle = self._in_flight.popleft()
        return self.scheduler.update(batch, handle.result())

    def num_parts_done(self) -> int:
        """Parts of all steps that are done, as far as the device counts them; thread-safe."""
        return self._executor.num_parts_done()

    def describe(self) -> str:
        """The device's state in words, for the log when a step hangs."""
        return self._executor.describe()

    def close(self) -> None:
        self._in_flight.clear()
        self._executor.close()
