"""What heavy tenants get of a step while a light one is here, or was a moment ago.

A new request waits for the end of the step that runs, and its first token for the end of its own
step. With a hundred sequences of another tenant in both, that takes longer than its own prompt.
`TenantSlots` says who is heavy. While anybody is:

    a step with a light tenant's prompt   leaves the heavy ones' sequences out, at most twice in a
                                          row and in half of all steps
    any other step                        has about as many of their tokens as a short prompt; those
                                          that decode take turns, so each of n has its token in one
                                          of the next `n ÷ MIN_DECODES` such steps

A heavy tenant's tokens are computed all the same, in more and shorter steps. While tenants are
equals, prompts get `short_step` tokens of a step: who comes next does not wait for a long one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

from penstock.engine.request import Sequence

_MIN_TOKENS = 128  # of a step; with fewer rows matrix products run below their full rate
_STEP_S = 0.010  # where more than those are computed in this time, a step has more
_DECODE_TOKENS = 2  # what a decode costs, in tokens of a prompt: it has logits, and draws a token
_MIN_LEFT_OUT, _MAX_LEFT_OUT = 32, 2  # tokens; steps in a row
MIN_DECODES = _MIN_TOKENS // _DECODE_TOKENS // 2


def short_step(prefill_tokens_per_s: float) -> int:
    """How many tokens of prompts a step may have for which another tenant's request may wait.

    Args:
        prefill_tokens_per_s: measured rate; 0 before the first prompt.
    """
    return max(_MIN_TOKENS, int(prefill_tokens_per_s * _STEP_S))


class HeavyTenants:
    """Shares the steps that heavy tenants are in."""

    def __init__(self) -> None:
        self._last_served: dict[int, None] = {}  # ids of those that decode, the longest ago first
        self._num_spare = _MAX_LEFT_OUT  # steps that may leave them out

    def may_be_left_out(self, num_tokens: int) -> bool:
        """Whether the next step may do without them.

        Args:
            num_tokens: what their running sequences have to compute: a few tokens cost little.
        """
        return self._num_spare > 0 and num_tokens >= _MIN_LEFT_OUT

    def note(self, *, left_out: bool) -> None:
        """Record whether the step that was planned leaves them out."""
        self._num_spare = min(self._num_spare + (-1 if left_out else 1), _MAX_LEFT_OUT)

    def share(
        self,
        heavy: Collection[str],
        decoding: Iterable[Sequence],
        *,
        have_prompts: bool,
        prefill_tokens_per_s: float,
    ) -> tuple[set[Sequence], dict[str, int]]:
        """Which of their sequences decode in this step, and how many tokens of prompts each tenant
        may compute, at least one.

        Args:
            heavy: the tenants.
            decoding: their sequences that wait for their next token.
            have_prompts: they have prompts to compute.
            prefill_tokens_per_s: measured rate; 0 before the first prompt.
        """
        num_tokens = short_step(prefill_tokens_per_s)
        num_decodes = num_tokens // _DECODE_TOKENS // (1 + have_prompts)
        waiting = {sequence.seq_id: sequence for sequence in decoding}
        order = {seq_id: None for seq_id in self._last_served if seq_id in waiting}
        order.update(dict.fromkeys(waiting))
        served = list(islice(order, num_decodes))
        for seq_id in served:
            del order[seq_id]
        self._last_served = {**order, **dict.fromkeys(served)}
        num_left = num_tokens - _DECODE_TOKENS * len(served)
        return (
            {waiting[seq_id] for seq_id in served},
            dict.fromkeys(heavy, max(1, num_left // len(heavy))),
        )
