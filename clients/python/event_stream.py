"""The event stream of one response: an iterator, sync or async, that survives lost connections.

sent ──► open ──► event … event ──► terminal event
           ▲            │ connection lost, or temporarily refused
           └── wait ◄───┘ then continues after the last event, by its id and number
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Self, cast

from .errors import ConnectionLostError, PenstockError, raise_if_failed
from .events import ResponseEvent
from .objects import Response, Steer
from .operation import AsyncRunner, R, Resource, SyncRunner, operation
from .output_format import OutputFormat
from .parameters import Messages
from .retries import RetryPolicy
from .sources import Event, Source
from .steps import Locked, Sleep, Steps, T
from .track import TERMINAL, successor_of

_THOUGHT_DELTAS = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta")

_NOT_RESUMABLE = "the server could not store this response, so its stream cannot be resumed"


class EventStream(Resource[R], Generic[R]):
    """The events of one response, each once and in order; the last is the terminal one. After a
    response that was steered come those of its successor, from its `response.created` on.

    Iterating raises `PenstockError` if the stream cannot be continued. Leaving it (`close`, the end
    of a `with`) does not stop the answer: a stored response runs on for the server's
    `--disconnect-grace-s`.

    Attributes:
        text: all text that was read, of the response under way.
        reasoning: the same of thoughts.
        response: from the last terminal event; None before.
        on_wait: called with every failure that will be retried, and the seconds until then.
    """

    def __init__(
        self,
        runner: R,
        source: Source,
        retries: RetryPolicy,
        output_format: OutputFormat | None = None,
    ) -> None:
        super().__init__(runner)
        self.text = self.reasoning = ""
        self.response: Response | None = None
        self.on_wait = retries.on_wait
        self._source = source
        self._retries = retries
        self._output_format = output_format
        self._unread: deque[Event] = deque()  # arrived while `cancel` waited for the id
        self._is_closed = False
        self._reading = runner.new_lock()  # another thread or task may call `cancel`

    @property
    def response_id(self) -> str | None:
        """None before the first event."""
        return self._source.track.response_id

    @property
    def last_number(self) -> int:
        """`sequence_number` of the newest event; -1 before the first."""
        return self._source.track.last_number

    @operation
    def final(self) -> Steps[Response]:
        """Read to the end and return the response, parsed if there is a `text_format`.

        Raises:
            ResponseFailedError: it failed.
            UnfinishedOutputError: it has a `text_format`, and did not complete.
            ValueError: the stream was closed before its end, or `text_format` refuses the text.
        """
        while (yield from self._next_locked()) is not None:
            pass
        response = self.response
        if response is None:
            raise ValueError("the stream was closed before its end")
        raise_if_failed(response)
        if self._output_format is not None:
            return self._output_format.parse_response(response)
        return response

    @operation
    def cancel(self) -> Steps[None]:
        """Stop the answer; the events up to its terminal one still arrive. Does nothing after the
        end."""
        track = self._source.track
        if track.response_id is None:
            yield Locked(self._reading, self._learn_id())
        if not track.is_ended and not (yield from self._source.cancel()):
            self._is_closed = True

    @operation
    def steer(self, input: str | Messages) -> Steps[Steer]:  # noqa: A002 (OpenAI's name)
        """Have the response under way end for this input, which its successor answers: see
        `Responses.steer`."""
        track = self._source.track
        if track.response_id is None:
            yield Locked(self._reading, self._learn_id())
        assert track.response_id is not None
        told: Steer = yield from self._source.server.steer(track.response_id, input)
        return told

    def begin(self) -> Steps[Self]:
        """Send the request now, not with the first read."""
        yield from self._patiently(self._open)
        return self

    @operation
    def close(self) -> Steps[None]:
        """Leave the stream, which is then at its end."""
        self._is_closed = True
        yield from self._source.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self: EventStream[SyncRunner]) -> ResponseEvent:
        event = self._runner.run(self._next_locked())
        if event is None:
            raise StopIteration
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self: EventStream[SyncRunner], *_: object) -> None:
        self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self: EventStream[AsyncRunner]) -> ResponseEvent:
        event = await self._runner.run(self._next_locked())
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self: EventStream[AsyncRunner], *_: object) -> None:
        await self.close()

    def next_steps(self) -> Steps[ResponseEvent | None]:
        """The next event; None at the end."""
        return self._next_locked()

    def _next_locked(self) -> Steps[ResponseEvent | None]:
        event: ResponseEvent | None = yield Locked(self._reading, self._next())
        return event

    def _learn_id(self) -> Steps[None]:
        while self._source.track.response_id is None:
            self._unread.append((yield from self._patiently(self._read)))

    def _next(self) -> Steps[ResponseEvent | None]:
        if self.response is not None or self._is_closed:
            return None
        if self._unread:
            event: Any = self._unread.popleft()
        else:
            event = yield from self._patiently(self._read)
        if event["type"] == "response.output_text.delta":
            self.text += event["delta"]
        elif event["type"] in _THOUGHT_DELTAS:
            self.reasoning += event["delta"]
        elif (successor := successor_of(event)) is not None:
            self.text = self.reasoning = ""
            yield from self._source.succeed(successor)
        elif event["type"] in TERMINAL:
            self.response = event["response"]
            yield from self._source.close()
        return cast("ResponseEvent", event)

    def _open(self) -> Steps[None]:
        if not self._source.is_open:
            yield from self._source.open()

    def _read(self) -> Steps[Event]:
        yield from self._open()
        return (yield from self._source.next())

    def _patiently(self, attempted: Callable[[], Steps[T]]) -> Steps[T]:
        """The result of `attempted`, over as many connections as necessary."""
        source, num_attempts = self._source, 0
        num_received = source.num_received
        while True:
            try:
                return (yield from attempted())
            except PenstockError as error:
                yield from source.give_up()
                if source.num_received != num_received:
                    num_received, num_attempts = source.num_received, 0
                num_attempts += 1
                wait_s = self._wait_s(error, num_attempts)
                if wait_s is None or self._is_closed:
                    self._is_closed = True
                    yield from source.close()
                    if isinstance(error, ConnectionLostError) and not source.track.is_resumable:
                        raise ConnectionLostError(f"{error}; {_NOT_RESUMABLE}") from error
                    raise
                self.on_wait(error, wait_s)
                yield Sleep(wait_s)
            except GeneratorExit:
                raise
            except BaseException:  # a cancelled task, Ctrl-C: a later read resumes
                yield from source.give_up()
                raise

    def _wait_s(self, error: PenstockError, attempt: int) -> float | None:
        source = self._source
        has_begun = source.track.response_id is not None
        can_resume = source.is_kept and source.track.is_resumable
        if has_begun and not can_resume and isinstance(error, ConnectionLostError):
            return None  # its events ended with its connection
        return self._retries.wait_s(
            error, attempt, is_repeatable=source.is_repeatable, is_resuming=has_begun
        )
