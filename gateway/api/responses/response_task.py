"""Runs a response: writes a generation's deltas to its log until the end, with or without readers.

Each running response has one task, and a callback for new deltas. All deltas since the last
callback become one entry. The turn is stored before any reader sees the end, unless the store is
away for longer than a log's entry waits: then it is stored later. A response that nobody has read
for too long is ended.
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
from typing import Any

import orjson
from msgspec import structs

from penstock.engine.chat_formats import Piece
from penstock.engine.request import FinishReason, TokenLogprobs
from penstock.engine.text import Tokenizer
from penstock.gateway.api.responses.compaction import Summary
from penstock.gateway.api.responses.events import num_closing_events, response_object
from penstock.gateway.api.responses.logged_generation import packed
from penstock.gateway.api.shared.logprobs import TokenObjects
from penstock.gateway.errors import (
    Failure,
    GenerationFailedError,
    RequestRefusedError,
    SupersededError,
    failure_of,
)
from penstock.gateway.generation.branch import Delta
from penstock.gateway.generation.generation import Generation, Usage
from penstock.gateway.sources import consume
from penstock.gateway.storage.conversations.prompt_ids import origin_of, rendering_of
from penstock.gateway.storage.conversations.records import Rendering, StoredTurn, TurnStatus
from penstock.gateway.storage.conversations.store import (
    DEFAULT_LEASE_S,
    ConversationStore,
    StoreUnavailableError,
)
from penstock.gateway.storage.response_log.item_kinds import COMPACTION, MESSAGE
from penstock.gateway.storage.response_log.log import ResponseLog, token_ids_of
from penstock.gateway.storage.response_log.record import INTERRUPTED, EndEntry, LogHeader

_LOG = logging.getLogger(__name__)
_TOUCH_EVERY_S = DEFAULT_LEASE_S / 4
_STORE_EVERY_S, _STORE_WITHIN_S = 0.1, 600.0  # if the store is away when a turn ends
_STATUS: dict[FinishReason, TurnStatus] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.GRAMMAR: "incomplete",
    FinishReason.ABORT: "cancelled",
    INTERRUPTED: "incomplete",
}
_NATURAL = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.GRAMMAR)


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
    CANCELLED = "cancelled"  # somebody asked to stop it
    ABANDONED = "abandoned"  # nobody has read it for too long
    SUPERSEDED = "superseded"  # the engine says that another gateway runs it
    LOST = "lost"  # another gateway runs it
    ENDED = "ended"


_LEGAL_MOVES: Mapping[Phase, frozenset[Phase]] = {
    Phase.STARTING: frozenset(Phase) - {Phase.STARTING, Phase.SUPERSEDED},
    Phase.GENERATING: frozenset(Phase) - {Phase.STARTING, Phase.GENERATING},
    Phase.CANCELLED: frozenset({Phase.SUPERSEDED, Phase.LOST, Phase.ENDED}),
    Phase.ABANDONED: frozenset({Phase.SUPERSEDED, Phase.LOST, Phase.ENDED}),
    Phase.SUPERSEDED: frozenset({Phase.LOST, Phase.ENDED}),
    Phase.LOST: frozenset(),
    Phase.ENDED: frozenset(),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Newest:
    """The newest item of the output.

    Attributes:
        output_index: -1 before the first item.
        begun_by: its first part; None once it is in the log.
    """

    output_index: int
    kind: str
    begun_by: Piece | None = None


class _Said:
    """The text of a summary.

    Args:
        shown: its beginning, which is in the log.

    Attributes:
        text: all of it so far.
    """

    def __init__(self, shown: str) -> None:
        self.text = ""
        self._num_taken = len(shown)

    def add(self, piece: Piece) -> None:
        """Messages are its lines."""
        self.text += "\n" + piece.text if piece.begins and self.text else piece.text

    def take(self) -> str:
        """What is new."""
        new = self.text[self._num_taken :]
        self._num_taken += len(new)
        return new


class ResponseTask:
    """Runs one response; the owner of its log.

    Args:
        turn: the turn as stored while the response runs; None if it is not to be stored.
        remember: called with the ended turn, before any reader sees the end.
        prompt_text: the text that the prompt was tokenised from, if known.
        summary: what is written first, the prompt being made from it.

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
        turn: StoredTurn | None,
        remember: Callable[[StoredTurn], None] | None = None,
        prompt_text: str | None = None,
        summary: Summary | None = None,
        conversations: ConversationStore,
        settings: ResponseTaskSettings,
    ) -> None:
        self.log = log
        self.failure: Failure | None = None
        self._generation = generation
        self._summary = summary
        self._writing = generation  # what is being written
        self._tokenizer = tokenizer
        self._turn = turn
        self._remember = remember
        # Readers can come back. (A response that runs without storage has no turn either.)
        self._is_logged = turn is not None or not log.header.is_turn
        self._prompt_text = prompt_text
        self._conversations = conversations
        self._settings = settings
        self._num_logged = len(log.token_ids)  # token ids of what is being written, in the log
        self._logprobs: tuple[dict[str, Any], ...] = ()  # not logged yet
        self._held_logprobs: tuple[TokenLogprobs, ...] = ()  # of tokens without text so far
        self._first: TokenLogprobs | None = None  # of the output's first token, if it came here
        self._token_objects: TokenObjects | None = None
        self._newest = _Newest(*(log.open_item or (-1, MESSAGE.type)))
        self._grace: asyncio.TimerHandle | None = None
        self._touch: asyncio.TimerHandle | None = None
        self._touching: asyncio.Future[None] | None = None  # the event loop holds a weak reference
        self._checking_readers: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._phase = Phase.STARTING
        self._has_been_read = False

    def _move_to(self, phase: Phase) -> None:
        assert phase in _LEGAL_MOVES[self._phase], f"{self._phase} -> {phase} is not legal"
        self._phase = phase

    def start(self, *, after: Callable[[], Awaitable[None]] | None = None) -> asyncio.Task[None]:
        """Begin once `after` has returned. In every case the log gets its end."""
        self.log.owner = self
        self.readers_changed()
        if self._turn is not None and self.log.outage is not None:
            self._touch_now(self._turn)  # who tells which turns run has forgotten it
        else:
            self._touch_later()
        self._task = asyncio.create_task(self._run(after))
        return self._task

    async def _run(self, after: Callable[[], Awaitable[None]] | None) -> None:
        try:
            end = await self._generate(after)
        finally:
            self.log.owner = None
            self._stop_grace()
            if self._checking_readers is not None:
                self._checking_readers.cancel()
            if self._touch is not None:
                self._touch.cancel()
        is_natural = end.reason in _NATURAL
        is_superseded = self._phase is Phase.SUPERSEDED
        if not (is_natural or await self.log.verify(is_superseded=is_superseded)):
            self._move_to(Phase.LOST)
            self.failure = None
            return
        self._move_to(Phase.ENDED)
        if self._remember is not None:
            self._remember(self._finished(turn_of(self.log.header), end))
        if self._turn is None:
            self.log.append(end)
            return
        turn = self._finished(self._turn, end)
        is_stored = await self._store(turn, self._settings.store_patience_s)
        self.log.append(end)
        if not (is_stored or await self._store(turn, _STORE_WITHIN_S)):
            _LOG.warning("cannot store turn %s: the store was away for too long", turn.turn_id)

    async def _generate(self, after: Callable[[], Awaitable[None]] | None) -> EndEntry:
        generation = self._generation
        try:
            if after is not None:
                await after()
            if self._summary is not None and not await self._summarise(self._summary):
                return self._end(FinishReason.ABORT)
            await self._write(generation, self._log_deltas)
            branch = generation.branches[0]
            reason = branch.finish_reason
            assert reason is not None
            if not self.log.header.is_turn and self._num_logged < len(branch.token_ids):
                if self._newest.output_index < 0:
                    self._newest = _Newest(0, MESSAGE.type)
                self._append("")  # `return_token_ids` needs them all
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
        self, generation: Generation, log_deltas: Callable[[Sequence[Delta]], bool]
    ) -> None:
        self._writing = generation
        with generation:
            if self._phase is Phase.STARTING:
                self._move_to(Phase.GENERATING)
            elif self._phase is not Phase.GENERATING:  # it was stopped before it was submitted
                generation.cancel()
            while not await consume(generation, log_deltas):  # noqa: ASYNC110  (it paces entries)
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
                said = _Said(summary.shown)
                await self._write(written, partial(self._log_summary, said))
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
        self._num_logged = len(self._generation.request.output_token_ids)
        if not self._num_logged and self._newest.output_index <= 0:
            self._newest = _Newest(0, COMPACTION.type)
            if self._generation.output_format is None:  # then nothing says that a message begins
                self._newest = _Newest(1, MESSAGE.type, Piece(MESSAGE.type, "", True))
                self._log("")
        return True

    def _log_summary(self, said: _Said, deltas: Sequence[Delta]) -> bool:
        """Log the deltas of a summary as one entry. Its thoughts are not shown."""
        for delta in deltas:
            if delta.notice is not None or delta.queue_position is not None:
                self._notify(delta)
            for piece in delta.parts:
                if piece.kind == MESSAGE.type:
                    said.add(piece)
        text = said.take()
        if text:
            self._newest = _Newest(0, COMPACTION.type)
            self._append(text)
        return self._settings.interval_s <= 0

    def _log_deltas(self, deltas: Sequence[Delta]) -> bool:
        """Log the deltas since the last call as one entry, or more if there are notices; whether
        the next ones may follow at once."""
        text = ""
        for delta in deltas:
            if delta.notice is not None or delta.queue_position is not None:
                self._log(text)
                text = ""
                self._notify(delta)
            begins = False
            for piece in delta.pieces:
                if piece.begins:
                    self._log(text)
                    text, begins = "", True
                    self._newest = _Newest(self._newest.output_index + 1, piece.kind, piece)
                text += piece.text
            text += delta.text
            self._keep_logprobs(delta, begins=begins)
        self._log(text)
        return self._settings.interval_s <= 0

    def _keep_logprobs(self, delta: Delta, *, begins: bool) -> None:
        """Keep a delta's logprobs for the newest item. Of an output in which items are looked for,
        a message has those of the tokens that wrote it, also while its text was held back."""
        if delta.logprobs and self._first is None:
            self._first = delta.logprobs[0]
        self._held_logprobs += delta.logprobs
        is_text = self._generation.output_format is None or not self.log.header.is_turn
        if not (is_text or delta.text or delta.pieces):
            return
        held, self._held_logprobs = self._held_logprobs, ()
        if begins and not is_text:  # what was held back marked the item, and did not write it
            held = delta.logprobs
        if held and (is_text or self._newest.kind == MESSAGE.type):
            self._logprobs += self._written(held)

    def _written(self, entries: Sequence[TokenLogprobs]) -> tuple[dict[str, Any], ...]:
        if not self.log.header.is_turn:
            return packed(entries)
        if self._token_objects is None:
            header = self.log.header
            is_rest = header.continues or bool(self._generation.request.output_token_ids)
            self._token_objects = TokenObjects(
                self._tokenizer, begins=not is_rest and entries[0] is self._first
            )
        return tuple(self._token_objects.of(entries))

    def _notify(self, delta: Delta) -> None:
        if delta.notice is not None:
            self.log.notify(delta.notice.value)
        if delta.queue_position is not None:
            wait_ms = delta.estimated_wait_ms
            self.log.notify("queue", position=delta.queue_position, estimated_wait_ms=wait_ms)

    def _log(self, text: str) -> None:
        """Log text of the newest item, if there is any, or if the item begins."""
        newest = self._newest
        is_begun = newest.begun_by is None
        if newest.output_index < 0 or (is_begun and not (text or self._logprobs)):
            return
        self._append(text)

    def _append(self, text: str) -> None:
        newest = self._newest
        token_ids = self._writing.branches[0].token_ids
        new = tuple(token_ids[self._num_logged :])
        self._num_logged += len(new)
        logprobs, self._logprobs = self._logprobs, ()
        name = "" if newest.begun_by is None else newest.begun_by.name
        self._newest = _Newest(newest.output_index, newest.kind)
        index = newest.output_index
        self.log.append_delta(text, new, logprobs, output_index=index, kind=newest.kind, name=name)

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
        )

    # -- the stored turn ---------------------------------------------------------------------

    async def _store(self, turn: StoredTurn, within_s: float) -> bool:
        """Store the ended turn, before the end is logged: a reader may continue from it at once.

        Returns: False if the store was away all the time. An end that cannot be stored at all is
        logged nevertheless.
        """
        give_up_s = time.monotonic() + within_s
        while True:
            try:
                await self._conversations.finish_turn(turn)
            except StoreUnavailableError:
                if time.monotonic() >= give_up_s:
                    return False
                await asyncio.sleep(_STORE_EVERY_S)
                continue
            except RequestRefusedError as error:
                _LOG.warning("cannot store turn %s: %s", turn.turn_id, error)
            except Exception:  # a bug
                _LOG.exception("cannot store turn %s", turn.turn_id)
            return True

    def _finished(self, turn: StoredTurn, end: EndEntry) -> StoredTurn:
        header = self.log.header
        token_ids: Sequence[int] = self._generation.branches[0].token_ids
        if not token_ids:  # perhaps it was to go on, and has not
            token_ids = token_ids_of(self.log.parts[1])
        status = "failed" if end.reason is None else _STATUS[end.reason]
        if not header.generates and status == "incomplete":
            status = "completed"
        response = response_object(self.log, end)
        if header.compaction is not None and self._prompt_text is not None:
            prompt_token_ids = array("I", self._generation.request.prompt_token_ids)
            rendering = rendering_of(self._prompt_text, origin_of(turn))
            turn = dataclasses.replace(turn, prompt_token_ids=prompt_token_ids, prompt=rendering)
        return dataclasses.replace(
            turn,
            status=status,
            output=tuple(response["output"]),
            output_token_ids=array("I", token_ids),
            whole=self._whole(token_ids, origin_of(turn)),
            prefix_id=end.prefix_id,
            response=orjson.dumps(response),
        )

    def _whole(self, output_token_ids: Sequence[int], origin: bytes) -> Rendering | None:
        if self._prompt_text is None:
            return None
        text = self._tokenizer.decode(output_token_ids, skip_special_tokens=False)
        return rendering_of(self._prompt_text + text, origin)

    def _touch_later(self) -> None:
        if self._turn is not None:
            loop = asyncio.get_running_loop()
            self._touch = loop.call_later(_TOUCH_EVERY_S, self._touch_now, self._turn)

    def _touch_now(self, turn: StoredTurn) -> None:
        self._touching = asyncio.ensure_future(self._renew_lease(turn))
        self._touch_later()

    async def _renew_lease(self, turn: StoredTurn) -> None:
        try:
            await self._conversations.touch_turn(turn.tenant, turn.turn_id)
        except RequestRefusedError as error:
            _LOG.warning("cannot renew the lease of turn %s: %s", turn.turn_id, error)

    # -- `LogOwner` --------------------------------------------------------------------------

    def cancel(self) -> None:
        self._stop(Phase.CANCELLED)

    def lose(self) -> None:
        if self._phase is not Phase.LOST:
            self._move_to(Phase.LOST)
            assert self._task is not None, "lose() before start()"
            self._task.cancel()

    def readers_changed(self) -> None:
        if self.log.header.is_background:
            return
        if self.log.readers:
            self._has_been_read = True
            self._stop_grace()
        elif not self._is_logged and self._has_been_read:
            self._stop(Phase.ABANDONED)  # without a log nobody can resume it
        elif self._grace is None:
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(self._settings.grace_s, self._check_other_readers)

    def _stop_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _check_other_readers(self) -> None:
        self._checking_readers = asyncio.ensure_future(self._abandon_unless_read())

    async def _abandon_unless_read(self) -> None:
        grace = self._grace
        is_read = await self.log.is_read_elsewhere()
        if self._grace is not grace or self.log.is_ended:
            return  # a reader came meanwhile, or the response has ended
        self._grace = None
        if is_read:
            self.readers_changed()
        else:
            self._stop(Phase.ABANDONED)

    def _stop(self, phase: Phase) -> None:
        if self._phase in (Phase.STARTING, Phase.GENERATING):
            self._move_to(phase)
            self._writing.cancel()


def _logged(usage: Usage, header: LogHeader) -> tuple[int, ...]:
    counted = (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
    if usage.draft_tokens:
        drafted = (usage.draft_tokens, usage.accepted_draft_tokens)
        return (*counted, usage.reasoning_tokens, *drafted)
    return counted if header.is_text_only else (*counted, usage.reasoning_tokens)


def turn_of(header: LogHeader) -> StoredTurn:
    """The turn of a response, as stored while it runs."""
    request = header.request
    return StoredTurn(
        turn_id=header.response_id,
        conversation_id=header.conversation_id,
        tenant=header.tenant,
        parent_id=header.parent_id,
        status="in_progress",
        created_at=header.created_at,
        items=header.input_items,
        continues=header.continues,
        prompt_token_ids=array("I", request.prompt_token_ids),
        prompt=(
            None
            if header.rendering is None
            else Rendering(
                num_chars=header.rendering[0],
                digest=header.rendering[1],
                origin=b"".join(header.rendering[2:]),
            )
        ),
        cache_salt=request.cache_salt,
        images={image.digest: image.data for image in request.images},
        places=tuple(structs.replace(image, data=b"") for image in request.images),
    )
