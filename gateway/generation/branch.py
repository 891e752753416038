"""One growing output of a request: the engine's tokens go in, deltas of text and items come out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.engine.chat_formats import OutputReader, Piece
from penstock.engine.request import (
    FinishReason,
    Notice,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from penstock.engine.text import OutputText


class Delta(msgspec.Struct, gc=False):
    """One branch's output since its last delta.

    Attributes:
        index: the branch.
        text: of the message that the output is, or that it already writes; may be empty while a
            character or a stop string is incomplete.
        logprobs: one entry per token that has text, and for the one that ends the output if that is
            wanted; empty unless asked for.
        finish_reason: set only on the branch's last delta.
        notice: an event of the branch before this text.
        queue_position: for a waiting request that asked for it: how many are served before it.
        estimated_wait_ms: with `queue_position`, the wait; 0 while nothing has been measured.
        progress: what a request waits for that asked; see `Progress`. The delta has nothing else.
        pieces: of items, where thoughts or tool calls are looked for; then `text` is empty, or it
            continues the newest item, a message, and there are no pieces.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    notice: Notice | None = None
    queue_position: int | None = None
    estimated_wait_ms: int = 0
    progress: dict[str, Any] | None = None
    pieces: Sequence[Piece] = ()

    @property
    def is_told(self) -> bool:
        """Whether it has news beside the output."""
        return (
            self.notice is not None or self.queue_position is not None or self.progress is not None
        )

    @property
    def parts(self) -> Sequence[Piece]:
        """The pieces, also of text."""
        return self.pieces or ((Piece("message", self.text),) if self.text else ())


class PlainDelta(Delta, gc=False):
    """Text and nothing else, as nearly all are."""


class Branch:
    """One of a request's outputs.

    Args:
        reader: finds thoughts and tool calls; None: the output is one message.
        has_end_logprobs: see `GenerationOptions`.

    Attributes:
        finish_reason: None until the end.
        token_ids: the output so far, without tokens after a stop string.
        num_reasoning_tokens: of thoughts.
    """

    __slots__ = (
        "_has_end_logprobs",
        "_index",
        "_params",
        "_plain_push",
        "_reader",
        "_sum_logprobs",
        "_text",
        "finish_reason",
        "num_reasoning_tokens",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        text: OutputText,
        params: SamplingParams,
        reader: OutputReader | None = None,
        *,
        has_end_logprobs: bool = False,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.token_ids: list[int] = []
        self.num_reasoning_tokens = 0
        self._index = index
        self._text = text
        self._params = params
        self._reader = reader
        self._has_end_logprobs = has_end_logprobs
        self._plain_push = text.plain_push if reader is None else None
        self._sum_logprobs = 0.0

    @property
    def is_calling(self) -> bool:
        """Whether the output so far ends inside a tool call."""
        return self._reader is not None and self._reader.is_calling

    @property
    def has_called(self) -> bool:
        """Whether the output has a tool call."""
        return self._reader is not None and self._reader.has_called

    @property
    def mean_logprob(self) -> float:
        """Mean logprob per output token; 0 if the logprobs were not reported."""
        return self._sum_logprobs / max(len(self.token_ids), 1)

    @property
    def is_plain(self) -> bool:
        """Whether only the engine ends it, and its text is a message as it comes."""
        return self._plain_push is not None

    def add_tokens(self, token_ids: Sequence[int]) -> str:
        """The text of an output that is only these tokens, while it `is_plain`: the same as `add`,
        in a third of the time."""
        push = self._plain_push
        assert push is not None
        self.token_ids += token_ids
        return push(token_ids[0]) if len(token_ids) == 1 else "".join(map(push, token_ids))

    def add(self, output: RequestOutput) -> Delta:
        """Add an output of the engine, up to its end or a stop string."""
        if self._reader is not None and len(output.token_ids) > 1:
            return self._add_singly(output)
        params = self._params
        # A token that ended the sequence counts as output, but its text is not shown.
        hides_last = output.stop_token_id is not None and not params.include_stop_str_in_output
        shown = output.token_ids[:-1] if hides_last else output.token_ids
        pushed = self._text.push(shown)
        text, counted, reason = pushed.text, output.token_ids, output.finish_reason
        is_cut = pushed.stop is not None or reason is not FinishReason.STOP
        if pushed.stop is not None:
            counted, reason = shown[: pushed.num_tokens], FinishReason.STOP
        elif reason is not None:
            rest = self._text.finish()
            text += rest.text
            reason = reason if rest.stop is None else FinishReason.STOP
            is_cut = is_cut or rest.stop is not None
        self.token_ids += counted
        logprobs = output.logprobs
        if logprobs:
            self._sum_logprobs += sum(entry.logprob for entry in logprobs[: len(counted)])
            num_told = len(counted) if self._has_end_logprobs else pushed.num_tokens
            logprobs = () if params.logprobs is None else logprobs[:num_told]
        if self._reader is not None and (text or reason is not None or self._reader.is_reasoning):
            if self._reader.is_reasoning:
                self.num_reasoning_tokens += len(counted)
            pieces = self._reader.push(text)
            if reason is not None:
                pieces = [*pieces, *self._reader.end(is_cut=is_cut)]
            if self._reader.is_over:
                reason = reason or FinishReason.STOP
            elif self._reader.is_calling and reason in (FinishReason.STOP, FinishReason.REPETITION):
                reason = FinishReason.LENGTH  # a call that was cut off must not be run
            self.finish_reason = reason
            return self._delta(pieces, logprobs, output.notice)
        self.finish_reason = reason
        return Delta(self._index, text, logprobs, reason, output.notice)

    def _add_singly(self, output: RequestOutput) -> Delta:
        """Add an output's tokens one by one: which tokens are thoughts, and which is the last, must
        not depend on how they arrive."""
        merged: list[tuple[Piece, list[str]]] = []
        logprobs: list[TokenLogprobs] = []
        num_tokens = len(output.token_ids)
        for index, token_id in enumerate(output.token_ids):
            is_last = index == num_tokens - 1
            delta = self.add(
                RequestOutput(
                    request_id=output.request_id,
                    token_ids=(token_id,),
                    logprobs=output.logprobs[index : index + 1],
                    finish_reason=output.finish_reason if is_last else None,
                    stop_token_id=output.stop_token_id if is_last else None,
                )
            )
            logprobs += delta.logprobs
            for piece in delta.parts:
                if piece.begins or not merged or merged[-1][0].kind != piece.kind:
                    merged.append((piece, []))
                merged[-1][1].append(piece.text)
            if delta.finish_reason is not None:
                break
        pieces = [Piece(each.kind, "".join(t), each.begins, each.name) for each, t in merged]
        return self._delta(pieces, tuple(logprobs), output.notice)

    def _delta(
        self, pieces: list[Piece], logprobs: tuple[TokenLogprobs, ...], notice: Notice | None
    ) -> Delta:
        if len(pieces) == 1 and pieces[0].kind == "message" and not pieces[0].begins:
            return Delta(self._index, pieces[0].text, logprobs, self.finish_reason, notice)
        return Delta(self._index, "", logprobs, self.finish_reason, notice, pieces=pieces)
