"""Runs a response: writes a generation's deltas to its log until the end, with or without readers.

Each running response has one task, and a callback for new deltas (`delta_writer`). The turn is
stored (`running_turn`) before any reader sees the end, unless the store is away for longer than a
log's entry waits: then it is stored later. A response that nobody has read for too long is ended
(`reader_grace`). One that was steered begins its successor before its own end is logged
(`successors`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import time
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from penstock.engine.request import FinishReason
from penstock.engine.text import Tokenizer
from penstock.gateway.api.responses.compaction import Summary
from penstock.gateway.api.responses.delta_writer import DeltaWriter, SummaryText
from penstock.gateway.api.responses.events import num_closing_events
from penstock.gateway.api.responses.logged_generation import usage_record
from penstock.gateway.api.responses.reader_grace import ReaderGrace
from penstock.gateway.api.responses.running_turn import (
    correct_end,
    ended_turn,
    replace_end,
    store_end,
    turn_of,
)
from penstock.gateway.api.responses.steering import check_room, is_steerable, not_supported
from penstock.gateway.api.responses.successors import Succession
from penstock.gateway.errors import Failure, GenerationFailedError, SupersededError, failure_of
from penstock.gateway.generation.branch import Delta
from penstock.gateway.generation.generation import Generation, Usage
from penstock.gateway.generation.prompt_ids import origin_of, rendering_of
from penstock.gateway.sources import consume
from penstock.gateway.storage.conversations.records import StoredTurn
from penstock.gateway.storage.conversations.store import ConversationStore
from penstock.gateway.storage.response_log.log import (
    ResponseLog,
    Run,
    not_active,
    token_ids_of,
)
from penstock.gateway.storage.response_log.record import (
    INTERRUPTED,
    EndEntry,
    LogHeader,
    SteerEntry,
)
from penstock.gateway.storage.usage.ledger import Ledger, settled

_LOG = logging.getLogger(__name__)
_STORE_WITHIN_S = 600.0  # if the store is away when a turn ends
_ASK_EVERY_S = 0.1  # while the store is away
_NATURAL = (
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.GRAMMAR,
    FinishReason.REPETITION,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTaskSettings:
    """How responses run.

    Attributes:
        grace_s: how long a response without a reader continues.
        interval_s: minimum time between two entries; 0: one entry per engine iteration.
        store_patience_s: how long a response's end waits for a store that is away.
    """

    grace_s: float = 60.0
    interval_s: float = 0.0
    store_patience_s: float = 0.25


class ResponseInterruptedError(GenerationFailedError):
    """The server was stopped while the response ran, and cannot go on with it."""


class Phase(enum.Enum):
    """Where a response is in its life."""

    STARTING = "starting"  # waits for an engine
    GENERATING = "generating"
    STEERED = "steered"  # its successor is to begin
    CANCELLED = "cancelled"  # somebody asked to stop it
    ABANDONED = "abandoned"  # nobody has read it for too long
    SUPERSEDED = "superseded"  # the engine says that another gateway runs it
    LOST = "lost"  # another gateway runs it
    ENDED = "ended"


_LEGAL_MOVES: Mapping[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset(Phase) - {Phase.STARTING, Phase.SUPERSEDED},
    Phase.GENERATING: frozenset(Phase) - {Phase.STARTING, Phase.GENERATING},
    Phase.STEERED: frozenset(Phase) - {Phase.STARTING, Phase.GENERATING, Phase.STEERED},
    Phase.CANCELLED: frozenset({Phase.SUPERSEDED, Phase.LOST, Phase.ENDED}),
    Phase.ABANDONED: frozenset({Phase.SUPERSEDED, Phase.LOST, Phase.ENDED}),
    Phase.SUPERSEDED: frozenset({Phase.LOST, Phase.ENDED}),
    Phase.LOST: frozenset(),
    Phase.ENDED: frozenset(),
}


class ResponseTask:
    """Runs one response: the `Runner` of its log.

    Args:
        conversations: has its turn; None: it is not to be stored.
        ledger: where its usage is recorded.
        remember: called with the ended turn, before any reader sees the end.
        prompt_text: the text that the prompt was tokenised from, if known.
        summary: what is written first, the prompt being made from it.
        succession: made if it is steered.

    Attributes:
        log: the response's log.
        failure: why it failed, if it did.
    """

    def __init__(
        self,
        generation: Generation,
        log: ResponseLog,
        *,
        tokenizer: Tokenizer,
        conversations: ConversationStore | None,
        ledger: Ledger,
        remember: Callable[[StoredTurn], None] | None = None,
        prompt_text: str | None = None,
        summary: Summary | None = None,
        succession: Callable[[Run], Succession],
        settings: ResponseTaskSettings,
    ) -> None:
        self.log = log
        self.failure: Failure | None = None
        self._log_run = run = log.run or Run(log)  # another gateway may have it already
        self._generation = generation
        self._summary = summary
        self._writing = generation  # what is being written
        self._tokenizer = tokenizer
        self._conversations = conversations
        self._ledger = ledger
        for each in (generation, None if summary is None else summary.generation):
            if each is not None:
                each.ledger = None  # the end has the usage of both
        self._remember = remember
        self._prompt_text = prompt_text
        self._settings = settings
        self._succession = succession
        self._writer = DeltaWriter(run, generation, tokenizer)
        self._grace = ReaderGrace(
            run,
            grace_s=settings.grace_s,
            # A response that runs without storage has no turn either.
            is_kept=conversations is not None or not log.header.is_turn,
            abandon=self._abandon,
        )
        self._task: asyncio.Task[None] | None = None
        self._phase = Phase.STARTING

    def _move_to(self, phase: Phase) -> None:
        assert phase in _LEGAL_MOVES[self._phase], f"{self._phase} -> {phase} is not legal"
        self._phase = phase

    def start(self, *, after: Callable[[], Awaitable[None]] | None = None) -> asyncio.Task[None]:
        """Begin once `after` has returned. In every case the log gets its end."""
        if self.log.steers:  # another gateway has cut it off, and may have begun its successor
            self._move_to(Phase.STEERED)
        self._task = asyncio.create_task(self._run(after))
        self._log_run.begin(self)
        self.readers_changed()
        return self._task

    async def _run(self, after: Callable[[], Awaitable[None]] | None) -> None:
        succession: Succession | None = None
        try:
            end = await self._generate(after)
            if self.log.steers:
                succession = self._succession(self._log_run)
                await succession.ready()
        finally:
            self._log_run.end()
            self._grace.stop()
        is_superseded = self._phase is Phase.SUPERSEDED
        # A natural end is the same at every gateway, and only the first is stored.
        is_natural = end.reason in _NATURAL
        if not (is_natural or await self._log_run.verify(is_superseded=is_superseded)):
            self._move_to(Phase.LOST)
            self.failure = None
            return
        if succession is not None:
            if not await self._log_run.stored():
                self._move_to(Phase.LOST)
                return
            end = await self._settled(end, succession)
        self._move_to(Phase.ENDED)
        try:
            await self._store(end, succession)
        finally:
            if succession is not None:
                succession.discard()

    async def _settled(self, end: EndEntry, succession: Succession) -> EndEntry:
        return await succession.settle(
            end,
            is_whole=end.reason in _NATURAL,
            is_cut=self._phase is Phase.STEERED and end.reason is FinishReason.ABORT,
            is_calling=self._generation.branches[0].is_calling,
            ended=self._ended,
        )

    async def _store(self, end: EndEntry, succession: Succession | None) -> None:
        """Record the usage, store the turn, begin the successor if there is one, and log the
        end."""
        conversations = self._conversations
        is_logged = conversations is not None or not self.log.header.is_turn
        epoch = self._log_run.epoch
        record = usage_record(self.log, end, epoch=epoch, may_move=is_logged)
        await settled(self._ledger.note(record))
        if self._remember is not None:
            self._remember(self._ended(end))
        if conversations is None:
            self._log_run.append(end if succession is None else await succession.begin(end))
            return
        ended = self._ended(end)
        patience_s = self._settings.store_patience_s
        is_stored = await store_end(conversations, ended, within_s=patience_s)
        if succession is None and self.log.replica.epoch > 1:
            await correct_end(conversations, ended)
        if succession is not None:
            begun = await succession.begin(end)
            # Another gateway may have stored the turn, and have died before it logged the end.
            is_pending = begun.steered is not None and begun.steered.status == "pending"
            is_second = self.log.replica.epoch > 1 and not is_pending
            if begun is not end or is_second:
                ended = self._ended(begun)
                await replace_end(conversations, ended)
            end = begun
        self._log_run.append(end)
        if not (is_stored or await store_end(conversations, ended, within_s=_STORE_WITHIN_S)):
            _LOG.warning("cannot store turn %s: the store was away for too long", ended.turn_id)

    async def _generate(self, after: Callable[[], Awaitable[None]] | None) -> EndEntry:
        generation = self._generation
        try:
            if after is not None:
                await after()
            if self._summary is not None and not await self._summarise(self._summary):
                return self._end(FinishReason.ABORT)
            await self._write(generation, self._writer.write)
            reason = generation.branches[0].finish_reason
            assert reason is not None
            if not self.log.header.is_turn:
                self._writer.write_rest()  # `return_token_ids` needs them all
            return self._end(reason)
        except ResponseInterruptedError as error:
            if self.log.header.is_turn:
                return self._end(INTERRUPTED)
            self.failure = failure_of(error)  # who asks again with its key gets another attempt
            return self._end(None, error=("server_error", self.failure.message))
        except Exception as error:  # whatever it is, the response must end with a terminal event
            if isinstance(error, SupersededError):
                self._move_to(Phase.SUPERSEDED)
            self.failure = failure_of(error)
            code = "server_error" if self.failure.status >= 500 else "invalid_prompt"
            return self._end(None, error=(code, self.failure.message))

    async def _write(
        self, generation: Generation, write: Callable[[Sequence[Delta]], None]
    ) -> None:
        """Write a generation to its end."""
        may_follow = self._settings.interval_s <= 0

        def handle(deltas: Sequence[Delta]) -> bool:
            write(deltas)
            return may_follow

        self._writing = generation
        with generation:
            if self._phase is Phase.STARTING:
                self._move_to(Phase.GENERATING)
            elif self._phase is not Phase.GENERATING:  # it was stopped before it was submitted
                generation.cancel()
            while not await consume(generation, handle):  # noqa: ASYNC110  (it paces entries)
                await asyncio.sleep(self._settings.interval_s)
        if self._phase is Phase.ABANDONED:
            raise GenerationFailedError(
                f"nobody read this response for {self._settings.grace_s:.0f} s"
            )

    async def _summarise(self, summary: Summary) -> bool:
        """Write the summary, and make the answer's prompt of it; False: it was cancelled."""
        written, text, used = summary.generation, summary.shown, summary.spent
        try:
            if written is not None:
                said = SummaryText(written, summary.shown)
                await self._write(written, partial(self._writer.write_summary, said))
                text, used = said.text, written.usage
                if written.branches[0].finish_reason is FinishReason.ABORT:
                    self._generation.discard(used)
                    return False
            if not text.strip():
                raise GenerationFailedError("the model wrote no summary")
            self._prompt_text, token_ids = await summary.prompt(text.strip())
            self._generation.put_prompt(token_ids, max_model_len=summary.max_model_len, spent=used)
        except BaseException:
            self._generation.discard(used if written is None else written.usage)
            raise
        self._writing = self._generation
        self._writer.end_summary()
        return True

    def _end(
        self, reason: FinishReason | None, *, error: tuple[str, str] | None = None
    ) -> EndEntry:
        usage = self._writing.usage
        if not usage.output_tokens:  # perhaps it was to go on, and has not
            usage = dataclasses.replace(usage, output_tokens=len(self.log.token_ids))
        return EndEntry(
            number=self.log.next_number,
            num_events=num_closing_events(self.log, reason),
            reason=reason,
            usage=_logged(usage, self.log.header),
            ended_at=int(time.time()),
            error=error,
            prefix_id=self._generation.prefix_id,
            cache=self._generation.cache,
        )

    def _ended(self, end: EndEntry) -> StoredTurn:
        """The turn with this end."""
        turn = turn_of(self.log.header)
        token_ids: Sequence[int] = self._generation.branches[0].token_ids
        if not token_ids:  # perhaps it was to go on, and has not
            token_ids = token_ids_of(self.log.parts[1])
        whole, prompt = None, self._prompt_text
        if prompt is not None:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
            whole = rendering_of(prompt + text, origin_of(turn))
            if self.log.header.compaction is not None:
                prompt_token_ids = array("I", self._generation.request.prompt_token_ids)
                rendering = rendering_of(prompt, origin_of(turn))
                turn = dataclasses.replace(
                    turn, prompt_token_ids=prompt_token_ids, prompt=rendering
                )
        return ended_turn(turn, self.log, end, token_ids=token_ids, whole=whole)

    # -- `Runner` ----------------------------------------------------------------------------

    def cancel(self) -> None:
        if self._phase is Phase.STEERED:
            self._move_to(Phase.CANCELLED)
        else:
            self._stop(Phase.CANCELLED)

    def steer(self, steer_id: str, text: str) -> None:
        log = self.log
        if not is_steerable(log):
            raise not_supported(log.response_id)
        if self._phase not in (Phase.STARTING, Phase.GENERATING, Phase.STEERED):
            raise not_active(log.response_id)
        check_room(log, text)
        self._log_run.append(SteerEntry(number=log.next_number, text=text, name=steer_id))
        self._stop(Phase.STEERED)

    def lose(self) -> None:
        if self._phase is not Phase.LOST:
            self._move_to(Phase.LOST)
            assert self._task is not None, "lose() before start()"
            self._task.cancel()

    def readers_changed(self) -> None:
        if not self.log.header.is_background:
            self._grace.readers_changed()

    def _abandon(self) -> None:
        self._stop(Phase.ABANDONED)

    def _stop(self, phase: Phase) -> None:
        if self._phase in (Phase.STARTING, Phase.GENERATING):
            self._move_to(phase)
            self._writing.cancel()


def _logged(usage: Usage, header: LogHeader) -> tuple[int, ...]:
    counted = (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
    drafted = (usage.draft_tokens, usage.accepted_draft_tokens)
    spent = (usage.host_cached_tokens, usage.compute_us, usage.block_us)
    if any(spent):
        return (*counted, usage.reasoning_tokens, *drafted, *spent)
    if usage.draft_tokens:
        return (*counted, usage.reasoning_tokens, *drafted)
    return counted if header.is_text_only else (*counted, usage.reasoning_tokens)
