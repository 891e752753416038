"""How many tokens a step computes: prompts must not hold up for long those who decode.

A step ends for all of its sequences together. Where nobody waits for a next token it is as large
as it may be; beside decodes, prompts get what can be computed in `max_stall_ms`, by the rate that
was measured. So a small model, or a GPU, is never limited, and a large model on a CPU, where 2,048
tokens take many seconds, streams on while a long prompt is computed (Sarathi-Serve, OSDI 2024,
§4.3, finds the budget from such a limit, too).
"""

from __future__ import annotations

from penstock.engine.config import SchedulerConfig

# Of prompts, whatever the limit: with fewer rows the products of a CPU leave their full rate, and
# those who wait for their first token would pay for it.
MIN_PROMPT_TOKENS = 128


def step_budget(config: SchedulerConfig, *, num_decoding: int, prefill_tokens_per_s: float) -> int:
    """Tokens of the next step.

    Args:
        num_decoding: sequences that wait for their next token.
        prefill_tokens_per_s: as measured; 0 before the first prompt.
    """
    most = config.max_num_batched_tokens
    if not num_decoding or not prefill_tokens_per_s or not config.enable_chunked_prefill:
        return most
    in_time = int(prefill_tokens_per_s * config.max_stall_ms / 1e3)
    return min(most, num_decoding + max(MIN_PROMPT_TOKENS, in_time))
