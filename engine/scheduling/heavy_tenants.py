"""What heavy tenants get of a step while a light one is here, or was a moment ago.

A new request waits for the end of the step that runs, and its first token for the end of its own
step. With a hundred sequences of another tenant in both, or a part of its long prompt, that takes
longer than its own prompt. Who is heavy by its sequences, `TenantSlots` says; then:

    a step with a light tenant's prompt   leaves the heavy ones' sequences out, at most twice in a
                                          row and in half of all steps
    any other step                        takes a few milliseconds where that is enough for some
                                          tokens; those that decode take turns, so each of n has
                                          its token in one of the next `n ÷ MIN_DECODES` such steps

Heavy by their prompts are those with more tokens of them than another (`with_long_prompts`). Their
prompts have no part of the steps that leave them out, and a short one's tokens of any other.

A heavy tenant's tokens are computed all the same, in more and shorter steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice

from penstock.engine.request import Sequence
from penstock.engine.scheduling.prefill_budget import SHORT_STEP_MS

_SHORT_PROMPT, _VERY_SHORT_PROMPT = 128, 64  # tokens
# Of a step; where more are computed in `SHORT_STEP_MS`, it has more. As many times the rows that
# take the time of one are computed at their full rate: on a CPU with AMX 64 rows took 8.7 ms,
# 128 17.3, and what a step costs beside them 0.4.
_FULL_RATE, _MAX_TOKENS = 8, 128
# A step of those with many sequences is shorter, since light ones decode in it too. With 10 ms,
# 200 streams of the demo model got 9,300 tokens/s, a light one 130, and its p99 of TTFT was 3.4
# to 5 times as long as alone; with 3 ms 6,200, 300, and 1.9 to 2.2 times.
_DECODING_STEP_MS, _LESS_THAN_SHORT = 3.0, 0.625
# Of prompts. Where more are computed, the gateway takes a good part of a core for a flood's tokens:
# of two cores it gets one, or a light tenant's request waits for it. So p99 is 1.5 to 1.7 times as
# long as alone.
MANY_TOKENS_PER_S = 5000.0
_DECODE_TOKENS = 2  # what a decode costs, in tokens of a prompt: it has logits, and draws a token
MIN_DECODES = 16
# Of a step, however short light tenants' prompts are: a step costs something beside its tokens.
_LEAST_TOKENS = 32
_WEIGHT = 0.2  # of a new measurement in the running mean
_MIN_LEFT_OUT, _MAX_LEFT_OUT = 32, 2  # tokens; steps in a row


def with_long_prompts(demand: Mapping[str, float]) -> frozenset[str]:
    """The tenants whose prompts have more tokens than those of another, or than a short one that
    may come.

    Args:
        demand: tokens of the prompts of each tenant that has any, by weight.
    """
    least = min(demand.values()) if len(demand) > 1 else float(_SHORT_PROMPT)
    return frozenset(tenant for tenant, num_tokens in demand.items() if num_tokens > least)


class HeavyTenants:
    """Shares the steps that heavy tenants are in.

    Args:
        num_verify_rows: tokens that a step computes in about the time of one.
    """

    def __init__(self, num_verify_rows: int) -> None:
        self._min_tokens = min(_FULL_RATE * num_verify_rows, _MAX_TOKENS)
        self._last_served: dict[int, None] = {}  # ids of those that decode, the longest ago first
        self._num_spare = _MAX_LEFT_OUT  # steps that may leave them out
        self._num_light_tokens = 0.0  # of these steps, the mean; 0: none yet

    def may_be_left_out(self, num_tokens: int) -> bool:
        """Whether the next step may do without them.

        Args:
            num_tokens: what their running sequences have to compute: a few tokens cost little.
        """
        return self._num_spare > 0 and num_tokens >= _MIN_LEFT_OUT

    def note(self, *, left_out: bool) -> None:
        """Record whether the step that was planned leaves them out."""
        self._num_spare = min(self._num_spare + (-1 if left_out else 1), _MAX_LEFT_OUT)

    def note_light(self, num_tokens: int) -> None:
        """Record how many tokens the step that was planned without them has. A light tenant waits
        for one like it in any case, so beside very short prompts those with heavy tenants are to
        take about as long. Beside longer ones that would cost more work than it spares waiting."""
        known = self._num_light_tokens or num_tokens
        self._num_light_tokens = known + _WEIGHT * (num_tokens - known)

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
        num_tokens = int(prefill_tokens_per_s * _DECODING_STEP_MS / 1e3)
        num_tokens = max(int(_LESS_THAN_SHORT * self._min_tokens), num_tokens)
        if 0 < self._num_light_tokens <= _VERY_SHORT_PROMPT:
            num_tokens = min(num_tokens, max(int(self._num_light_tokens), _LEAST_TOKENS))
        num_decodes = max(MIN_DECODES, num_tokens // _DECODE_TOKENS // (1 + have_prompts))
        waiting = {sequence.seq_id: sequence for sequence in decoding}
        order = {seq_id: None for seq_id in self._last_served if seq_id in waiting}
        order.update(dict.fromkeys(waiting))
        served = list(islice(order, num_decodes))
        for seq_id in served:
            del order[seq_id]
        self._last_served = {**order, **dict.fromkeys(served)}
        # With fewer tokens of prompts, too few sequences would decode to fill steps.
        num_left = max(3 * num_tokens // 4, num_tokens - _DECODE_TOKENS * len(served))
        return (
            {waiting[seq_id] for seq_id in served},
            dict.fromkeys(heavy, max(1, num_left // len(heavy))),
        )

    def prompt_limits(
        self, tenants: Collection[str], *, most: int, prefill_tokens_per_s: float
    ) -> dict[str, int]:
        """How many tokens of prompts each tenant may compute in this step, at least one.

        Args:
            tenants: those with long prompts.
            most: for all of them.
            prefill_tokens_per_s: measured rate; 0 before the first prompt.
        """
        num_tokens = max(self._min_tokens, int(prefill_tokens_per_s * SHORT_STEP_MS / 1e3))
        return dict.fromkeys(tenants, max(1, min(most, num_tokens) // max(1, len(tenants))))
