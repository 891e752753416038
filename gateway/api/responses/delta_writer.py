"""Writes a generation's deltas to a response's log, without waiting for anything.

All deltas since the last call become one entry, or more where a notice or a new item is between
them. An item begins with its first text, tool name or logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.chat_formats import Piece
from penstock.engine.request import TokenLogprobs
from penstock.engine.text import Tokenizer
from penstock.gateway.api.responses.logged_generation import packed
from penstock.gateway.api.shared.logprobs import TokenObjects
from penstock.gateway.generation.branch import Delta, PlainDelta
from penstock.gateway.generation.generation import Generation
from penstock.gateway.storage.response_log.log import Run
from penstock.gateway.storage.response_log.record import COMPACTION, MESSAGE

_ALONE: dict[int, tuple[int, ...]] = {}  # by token: a new tuple would be garbage to look through
_MAX_ALONE = 1 << 15


def _alone(token_id: int) -> tuple[int, ...]:
    """A tuple of one token, shared by all entries."""
    found = _ALONE.get(token_id)
    if found is None:
        if len(_ALONE) >= _MAX_ALONE:
            _ALONE.clear()
        found = _ALONE[token_id] = (token_id,)
    return found


@dataclass(frozen=True, slots=True)
class _Newest:
    """The newest item of the output.

    Attributes:
        output_index: -1 before the first item.
        begun_by: its first part; None once it is in the log.
    """

    output_index: int
    kind: str
    begun_by: Piece | None = None


class SummaryText:
    """The text of a summary that a generation writes.

    Args:
        shown: its beginning, which is in the log.

    Attributes:
        text: all of it so far.
    """

    def __init__(self, generation: Generation, shown: str) -> None:
        self.generation = generation
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


class DeltaWriter:
    """The output of one generation, which may continue what the log has of it. A summary may come
    before it, by another generation."""

    def __init__(self, run: Run, generation: Generation, tokenizer: Tokenizer) -> None:
        self._run = run
        self._header = header = run.log.header
        self._generation = generation
        self._tokenizer = tokenizer
        # Logprobs belong to whatever text there is, or else to the messages among the items.
        self._is_text = generation.output_format is None or not header.is_turn
        self._writing = generation  # what is being written
        self._num_logged = len(run.log.token_ids)  # token ids of what is being written, in the log
        self._newest = _Newest(*(run.log.open_item or (-1, MESSAGE)))
        self._logprobs: tuple[dict[str, Any], ...] = ()  # not logged yet
        self._held_logprobs: tuple[TokenLogprobs, ...] = ()  # of tokens without text so far
        self._first: TokenLogprobs | None = None  # of the output's first token, if it came here
        self._token_objects: TokenObjects | None = None

    def write(self, deltas: Sequence[Delta]) -> None:
        """Log the deltas since the last call."""
        if len(deltas) == 1 and self._newest.output_index >= 0:
            delta = deltas[0]
            if type(delta) is PlainDelta and not self._held_logprobs:  # nearly always
                self._append(delta.text)
                return
        text = ""
        for delta in deltas:
            if delta.is_told:
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
            if delta.logprobs or self._held_logprobs:
                self._keep_logprobs(delta, begins=begins)
        self._log(text)

    def write_summary(self, said: SummaryText, deltas: Sequence[Delta]) -> None:
        """Log the deltas of a summary as one entry. Its thoughts are not shown."""
        self._writing = said.generation
        for delta in deltas:
            if delta.is_told:
                self._notify(delta)
            for piece in delta.parts:
                if piece.kind == MESSAGE:
                    said.add(piece)
        if text := said.take():
            self._newest = _Newest(0, COMPACTION)
            self._append(text)

    def end_summary(self) -> None:
        """The summary is whole, and the output follows."""
        self._writing = self._generation
        self._num_logged = len(self._generation.request.output_token_ids)
        if not self._num_logged and self._newest.output_index <= 0:
            self._newest = _Newest(0, COMPACTION)
            if self._generation.output_format is None:  # then nothing says that a message begins
                self._newest = _Newest(1, MESSAGE, Piece(MESSAGE, "", True))
                self._log("")

    def write_rest(self) -> None:
        """Log the last token ids, which have no text."""
        if self._num_logged < len(self._generation.branches[0].token_ids):
            if self._newest.output_index < 0:
                self._newest = _Newest(0, MESSAGE)
            self._append("")

    def _keep_logprobs(self, delta: Delta, *, begins: bool) -> None:
        """Keep a delta's logprobs for the newest item. Of an output in which items are looked for,
        a message has those of the tokens that wrote it, also while its text was held back."""
        if delta.logprobs and self._first is None:
            self._first = delta.logprobs[0]
        self._held_logprobs += delta.logprobs
        if not (self._is_text or delta.text or delta.pieces):
            return
        held, self._held_logprobs = self._held_logprobs, ()
        if begins and not self._is_text:  # what was held back marked the item, and did not write it
            held = delta.logprobs
        if held and (self._is_text or self._newest.kind == MESSAGE):
            self._logprobs += self._written(held)

    def _written(self, entries: Sequence[TokenLogprobs]) -> tuple[dict[str, Any], ...]:
        header = self._header
        if not header.is_turn:
            return packed(entries)
        if self._token_objects is None:
            is_rest = header.continues or bool(self._generation.request.output_token_ids)
            self._token_objects = TokenObjects(
                self._tokenizer, begins=not is_rest and entries[0] is self._first
            )
        return tuple(self._token_objects.of(entries))

    def _notify(self, delta: Delta) -> None:
        if delta.notice is not None:
            self._run.notify(delta.notice.value)
        if delta.queue_position is not None:
            wait_ms = delta.estimated_wait_ms
            self._run.notify("queue", position=delta.queue_position, estimated_wait_ms=wait_ms)
        if delta.progress is not None:
            self._run.notify("progress", **delta.progress)

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
        if len(token_ids) == self._num_logged + 1:  # nearly always
            new = _alone(token_ids[-1])
        else:
            new = tuple(token_ids[self._num_logged :])
        self._num_logged += len(new)
        index = newest.output_index
        is_more = newest.begun_by is None and not self._logprobs
        if is_more and self._run.append_more(text, new, index):  # nearly always
            return
        logprobs, self._logprobs = self._logprobs, ()
        name = ""
        if newest.begun_by is not None:
            name = newest.begun_by.name
            self._newest = _Newest(index, newest.kind)
        self._run.append_delta(text, new, logprobs, output_index=index, kind=newest.kind, name=name)
