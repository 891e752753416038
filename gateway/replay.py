"""What an engine says again of a request that an earlier engine had begun.

A single output is continued: only what belongs to its prompt may come twice. Several outputs and
searches begin anew: their first tokens must be those that are known, or it is another answer.
Not known here: the lives of engines, text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from penstock.engine.request import RequestOutput, TokenLogprobs
from penstock.gateway.errors import GenerationFailedError


class Replay:
    """Takes what is known out of one stream's outputs.

    Args:
        due: by branch, the tokens that come again.
        ended: branches of which nothing more is wanted.
        num_prompt_logprobs: as many are known.
        has_tokens: tokens had come, and with them how many of the prompt's were cached.
    """

    def __init__(
        self,
        due: Mapping[int, Sequence[int]],
        *,
        ended: Iterable[int],
        num_prompt_logprobs: int,
        has_tokens: bool,
    ) -> None:
        self._due = {index: tuple(token_ids) for index, token_ids in due.items()}
        self._num_seen = dict.fromkeys(due, 0)
        self._ended = frozenset(ended)
        self._num_prompt_logprobs = num_prompt_logprobs
        self._has_tokens = has_tokens

    @property
    def is_over(self) -> bool:
        """Whether all that follows is new."""
        return not self._due and not self._ended

    def unseen(self, output: RequestOutput) -> RequestOutput | None:
        """What of an output is new, if anything is.

        Raises:
            GenerationFailedError: it contradicts what is known.
        """
        prompt_logprobs = self._unseen_prompt_logprobs(output)
        if output.index in self._ended:
            return None  # computed before the engine heard that it is not wanted
        num_known = self._num_known(output)
        token_ids = output.token_ids[num_known:]
        num_cached = 0 if self._has_tokens else output.num_cached_tokens
        is_told = token_ids or prompt_logprobs or num_cached or output.finish_reason
        if not is_told and output.notice is None and output.queue_position is None:
            return None
        return dataclasses.replace(
            output,
            token_ids=token_ids,
            logprobs=output.logprobs[num_known:],
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=num_cached,
        )

    def _unseen_prompt_logprobs(self, output: RequestOutput) -> tuple[TokenLogprobs, ...]:
        num_known = min(self._num_prompt_logprobs, len(output.prompt_logprobs))
        self._num_prompt_logprobs -= num_known
        return output.prompt_logprobs[num_known:]

    def _num_known(self, output: RequestOutput) -> int:
        """How many of its tokens, from the first on, are known."""
        index, token_ids = output.index, output.token_ids
        due = self._due.get(index)
        if due is None or output.error is not None:
            return 0
        start = self._num_seen[index]
        known = due[start : start + len(token_ids)]
        is_cut_short = output.finish_reason is not None and start + len(token_ids) < len(due)
        if token_ids[: len(known)] != known or is_cut_short:
            raise GenerationFailedError(
                "the engine died, and its successor answers this request differently"
            )
        self._num_seen[index] += len(known)
        if token_ids and self._num_seen[index] == len(due):
            del self._due[index]  # with the first token all that belongs to the prompt is here
        return len(known)
