"""One request's outputs on their way from the wire to whoever reads them.

What was not read yet is merged per branch, so a slow reader costs a few integers per token and
gets several tokens at once. Not known here: the wire, text, APIs.
"""

from __future__ import annotations

import asyncio
import dataclasses

from penstock.engine.errors import EngineDeadError
from penstock.engine.request import RequestOutput, TokenLogprobs


class EngineStream:
    """A request's outputs, in order; those of one branch merge, but never across a notice."""

    __slots__ = ("_error", "_is_done", "_open", "_pending", "_wakeup", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._pending: list[_Pending] = []
        self._open: dict[int, _Pending] = {}  # by branch: what its next output merges into
        self._error: EngineDeadError | None = None
        self._is_done = False
        self._wakeup = asyncio.Event()

    async def next(self) -> list[RequestOutput]:
        """Everything that came since the last call; waits while there is nothing.

        Raises:
            EngineDeadError: the engine died before the last output.
        """
        await self._wakeup.wait()
        if not self._pending:
            assert self._error is not None
            raise self._error
        if self._error is None:  # otherwise: first what arrived, then the error
            self._wakeup.clear()
        outputs = [pending.merged() for pending in self._pending]
        self._pending, self._open = [], {}
        return outputs

    def push(self, output: RequestOutput) -> None:
        if self._is_done:
            return
        self._is_done = output.is_last
        pending = self._open.get(output.index)
        if pending is None or output.notice is not None:
            pending = self._open[output.index] = _Pending(output)
            self._pending.append(pending)
        else:
            pending.merge(output)
        self._wakeup.set()

    def fail(self, error: EngineDeadError) -> None:
        if not self._is_done:
            self._is_done = True
            self._error = error
            self._wakeup.set()


class _Pending:
    """Outputs of one branch that were not read yet: the first, and what later ones add to it."""

    __slots__ = (
        "_first",
        "_last",
        "_logprobs",
        "_num_cached_tokens",
        "_prompt_logprobs",
        "_token_ids",
    )

    def __init__(self, output: RequestOutput) -> None:
        self._first = self._last = output
        self._num_cached_tokens = output.num_cached_tokens
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    def merge(self, output: RequestOutput) -> None:
        self._last = output
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        self._token_ids += output.token_ids
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs

    def merged(self) -> RequestOutput:
        first, last = self._first, self._last
        if last is first:
            return first
        return dataclasses.replace(
            last,
            token_ids=(*first.token_ids, *self._token_ids),
            logprobs=(*first.logprobs, *self._logprobs),
            prompt_logprobs=(*first.prompt_logprobs, *self._prompt_logprobs),
            num_cached_tokens=self._num_cached_tokens,
            notice=first.notice,  # no other has one
        )
