"""One output of a request as it grows: an engine's tokens in, what a reader is told out.

Not known here: the other outputs, the engine, the shape of any API's answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.request import (
    FinishReason,
    Notice,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from penstock.engine.text import OutputText


@dataclass(slots=True, kw_only=True)  # not frozen: made for every token
class Delta:
    """What came of one branch since its last delta.

    Attributes:
        index: which branch.
        text: may be empty while a character or a stop string is incomplete.
        logprobs: one entry per token that has text; empty unless asked for.
        finish_reason: set on the branch's last delta, and only there.
        notice: what happened to the branch before this text came.
        queue_position: of a request that waits and asked for it: how many are served before it.
        estimated_wait_ms: with it, until its own turn; 0 while nothing is measured.
    """

    index: int
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    notice: Notice | None = None
    queue_position: int | None = None
    estimated_wait_ms: int = 0


class Branch:
    """One of a request's outputs.

    Attributes:
        finish_reason: None until the end.
        token_ids: the output so far, without what came after a stop string.
    """

    __slots__ = ("_index", "_params", "_sum_logprobs", "_text", "finish_reason", "token_ids")

    def __init__(self, index: int, text: OutputText, params: SamplingParams) -> None:
        self.finish_reason: FinishReason | None = None
        self.token_ids: list[int] = []
        self._index = index
        self._text = text
        self._params = params
        self._sum_logprobs = 0.0

    @property
    def mean_logprob(self) -> float:
        """Per token of output; 0 if its logprobs were not reported."""
        return self._sum_logprobs / max(len(self.token_ids), 1)

    def take(self, output: RequestOutput) -> Delta:
        """What an output of the engine adds, until it ends or a stop string is found."""
        params = self._params
        # A token that ended the sequence counts, but carries no text.
        is_silent = output.stop_token_id is not None and not params.include_stop_str_in_output
        spoken = output.token_ids[:-1] if is_silent else output.token_ids
        pushed = self._text.push(spoken)
        text, counted, reason = pushed.text, output.token_ids, output.finish_reason
        if pushed.stop is not None:
            counted, reason = spoken[: pushed.num_tokens], FinishReason.STOP
        elif reason is not None:
            rest = self._text.finish()
            text += rest.text
            reason = reason if rest.stop is None else FinishReason.STOP
        self.token_ids += counted
        logprobs = output.logprobs
        if logprobs:
            self._sum_logprobs += sum(entry.logprob for entry in logprobs[: len(counted)])
            logprobs = () if params.logprobs is None else logprobs[: pushed.num_tokens]
        self.finish_reason = reason
        return Delta(
            index=self._index,
            text=text,
            logprobs=logprobs,
            finish_reason=reason,
            notice=output.notice,
        )
