"""A step that was launched, and its result when the device has come that far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from penstock.engine.batch import BatchResult
from penstock.engine.request import TokenLogprobs
from penstock.engine.runner.sampled_tokens import Tokens
from penstock.engine.runner.timing import Stopwatch

PromptLogprobs = Mapping[int, tuple[int, tuple[TokenLogprobs, ...]]]


class Swaps(Protocol):
    """What moves blocks between the tiers."""

    def take_seconds(self) -> tuple[float, float]: ...


class StepInFlight:
    """One step, from now on.

    Args:
        stopwatch: started when the step was.
        seq_ids: the sequences that get a token, in the order of `tokens`.
        tokens: None where nothing was computed.
    """

    __slots__ = ("_prompt_logprobs", "_seq_ids", "_step", "_stopwatch", "_swaps", "_tokens")

    def __init__(
        self,
        step: int,
        stopwatch: Stopwatch,
        swaps: Swaps,
        seq_ids: tuple[int, ...] = (),
        tokens: Tokens | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        stopwatch.mark_end()
        self._step, self._stopwatch, self._swaps = step, stopwatch, swaps
        self._seq_ids, self._tokens, self._prompt_logprobs = seq_ids, tokens, prompt_logprobs

    def result(self) -> BatchResult:
        """Wait for the step's own end, not for what was launched after it."""
        if self._tokens is None:
            swap_out_s, swap_in_s = self._swaps.take_seconds()
            return BatchResult(
                step=self._step, token_ids={}, swap_out_s=swap_out_s, swap_in_s=swap_in_s
            )
        seq_ids, sampled = self._seq_ids, self._tokens.read()
        is_valid = sampled.is_valid
        tokens = zip(seq_ids, sampled.token_ids, is_valid, strict=True)
        swap_out_s, swap_in_s = self._swaps.take_seconds()
        return BatchResult(
            step=self._step,
            token_ids={seq_id: (token_id,) for seq_id, token_id, is_good in tokens if is_good},
            logprobs={
                seq_ids[row]: (entry,) for row, entry in sampled.logprobs.items() if is_valid[row]
            },
            failed_seq_ids=()
            if all(is_valid)
            else tuple(seq_ids[row] for row, is_good in enumerate(is_valid) if not is_good),
            prompt_logprobs=self._prompt_logprobs or {},
            compute_s=self._stopwatch.seconds(),
            swap_out_s=swap_out_s,
            swap_in_s=swap_in_s,
        )
