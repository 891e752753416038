"""What scheduling counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start; they only grow."""

    num_steps: int = 0
    num_refused: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_swaps: int = 0  # victims whose KV went to the host tier
    num_recomputes: int = 0  # victims whose KV was dropped
    num_fallbacks: int = 0  # of those, because the host tier was full
    swap_out_s: float = 0.0
    swap_in_s: float = 0.0

    @property
    def num_preemptions(self) -> int:
        return self.num_swaps + self.num_recomputes
