"""A generation read from a log, with the interface of one that is computed here. It can be read
repeatedly, from the start, on any gateway.

Used for answers that are not Responses (`LogHeader.is_turn` is False).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.engine.chat_formats import OutputFormat, Piece
from penstock.engine.errors import InvalidRequestError
from penstock.engine.request import Request, TokenLogprobs
from penstock.gateway.errors import GenerationFailedError, RequestRefusedError
from penstock.gateway.generation.branch import Delta
from penstock.gateway.generation.generation import Usage
from penstock.gateway.storage.response_log.log import ResponseLog
from penstock.gateway.storage.response_log.record import DeltaEntry, EndEntry
from penstock.gateway.storage.usage.ledger import UsageRecord, day_of


class LoggedGeneration:
    """A `DeltaSource` of one output.

    Args:
        is_resumed: another request has begun it.
    """

    def __init__(self, log: ResponseLog, *, is_resumed: bool = False) -> None:
        self.is_resumed = is_resumed
        self._header = log.header
        self.request: Request = log.header.request
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()
        self._reader = log.read()
        self._due: deque[DeltaEntry | EndEntry] = deque()
        self._token_ids: list[int] = []
        self._end: EndEntry | None = None

    def __enter__(self) -> LoggedGeneration:
        self._reader.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._reader.__exit__()

    @property
    def usage(self) -> Usage:
        """`cached_tokens` is 0 until the end."""
        if self._end is not None:
            return usage_of(self._end)
        num_prompt, num_output = len(self.request.prompt_token_ids), len(self._token_ids)
        return Usage(prompt_tokens=num_prompt, output_tokens=num_output, cached_tokens=0)

    @property
    def output_format(self) -> OutputFormat | None:
        return self._header.output_format

    @property
    def cache(self) -> Mapping[str, Any] | None:
        return None if self._end is None else self._end.cache

    async def settle(self) -> None:
        """It was recorded before the log got its end."""

    @property
    def num_wanted(self) -> int:
        return 1

    def best(self) -> Sequence[int]:
        return (0,)

    def output_token_ids(self, rank: int) -> Sequence[int]:
        assert rank == 0
        return self._token_ids

    @property
    def is_over(self) -> bool:
        return self._end is not None

    def take(self) -> list[Delta]:
        """The deltas that have arrived (`Source.take`), one log entry at a time, so that a
        replay's deltas are those of the first reader.

        Raises:
            InvalidRequestError: the engine refused the request.
            GenerationFailedError: the generation failed otherwise.
            RequestRefusedError: 503: this gateway cannot read the log to its end.
        """
        if not self._due:
            try:
                entries = self._reader.take()
            except RequestRefusedError as error:
                if error.code != "response_expired":
                    raise
                raise _lost() from error
            self._due += [each for each in entries if isinstance(each, DeltaEntry | EndEntry)]
        return [self._delta(self._due.popleft())] if self._due else []

    def when_ready(self, call: Callable[[], None]) -> bool:
        return not self._due and self._reader.when_ready(call)

    def _delta(self, entry: DeltaEntry | EndEntry) -> Delta:
        if isinstance(entry, DeltaEntry):
            self._token_ids += entry.token_ids
            logprobs = unpacked(entry.logprobs)
            if self._header.is_text_only:
                return Delta(index=0, text=entry.text, logprobs=logprobs)
            piece = Piece(entry.kind, entry.text, entry.num_events > 1, entry.name)
            return Delta(index=0, text="", logprobs=logprobs, pieces=(piece,))
        self._end = entry
        if entry.error is not None:
            raise as_exception(*entry.error)
        return Delta(index=0, text="", finish_reason=entry.reason)


def usage_of(end: EndEntry) -> Usage:
    prompt, cached, output, *details = end.usage
    return Usage(prompt, output, cached, *details)


def usage_record(log: ResponseLog, end: EndEntry, *, epoch: int, may_move: bool) -> UsageRecord:
    """What a response with this end has used.

    Args: see `UsageRecord`.
    """
    header = log.header
    return UsageRecord(
        id=header.response_id,
        tenant=header.tenant,
        key_id=header.key_id,
        day=day_of(end.ended_at),
        counts=usage_of(end).counts,
        epoch=epoch,
        may_move=may_move,
    )


def as_exception(code: str, message: str) -> Exception:
    """The failure that a log tells of."""
    kind = InvalidRequestError if code == "invalid_prompt" else GenerationFailedError
    return kind(message)


def _lost() -> RequestRefusedError:
    """The storage lost a log that was being read. A retry computes the answer again."""
    return RequestRefusedError(
        "the stored part of this answer was lost; send the request again",
        code="session_store_unavailable",
        status=503,
    )


def packed(entries: Iterable[TokenLogprobs]) -> tuple[dict[str, Any], ...]:
    """Logprobs in the log's own format, which is independent of any API."""
    return tuple(
        {"id": entry.token_id, "logprob": entry.logprob, "rank": entry.rank, "top": entry.top}
        for entry in entries
    )


def unpacked(entries: Iterable[Mapping[str, Any]]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token_id=entry["id"],
            logprob=entry["logprob"],
            rank=entry["rank"],
            top=tuple((token_id, logprob) for token_id, logprob in entry["top"]),
        )
        for entry in entries
    )
