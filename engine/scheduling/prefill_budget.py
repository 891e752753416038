"""How many tokens a step computes, and how tenants with prompts share them.

Prompts must not hold up decoding for long. A step ends for all of its sequences together. Where
nobody waits for a next token it is as large as it may be; beside decodes, prompts get what can be
computed in `max_stall_ms`, by the rate that was measured. So a small model, or a GPU, is never
limited, and a large model on a CPU, where 2,048 tokens take many seconds, streams on while a long
prompt is computed (Sarathi-Serve, OSDI 2024, §4.3, finds the budget from such a limit, too).

Tenants get equal parts of it, and what one leaves goes to the others. Otherwise a long prompt would
take whole steps until its end, and newcomers would wait for it. A tenant that is alone takes all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from penstock.engine.config import SchedulerConfig
from penstock.engine.request import Sequence

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


def prefill_budgets(
    missing: Mapping[Sequence, int], budget: int, *, entering: Sequence | None, num_entering: int
) -> dict[int, int]:
    """Tokens at most of each prompt under way, by seq_id; empty where no tenants compete.

    Args:
        missing: tokens of the prompts under way; in this order a tenant's are computed.
        budget: tokens that are left of the step.
        entering: who is next to enter, if there is a slot, with so many tokens.
    """
    needs = Counter[str]()
    for sequence, num_tokens in missing.items():
        needs[sequence.request.tenant] += num_tokens
    if entering is not None:
        needs[entering.request.tenant] += num_entering
    if len(needs) < 2:
        return {}
    parts = split_budget(needs, max(0, budget))
    budgets = {}
    for sequence, num_tokens in missing.items():
        tenant = sequence.request.tenant
        part = min(num_tokens, parts[tenant])
        budgets[sequence.seq_id] = max(1, part)  # it must get on, whoever cannot enter after all
        parts[tenant] -= part
    return budgets


def split_budget(needs: Mapping[str, int], budget: int) -> dict[str, int]:
    """Tokens for each tenant in this step, by what it could use; never more than that.

    All of the budget is given out, if there is use for it, but for less than one token a tenant.
    """
    parts: dict[str, int] = {}
    by_need = sorted(needs, key=lambda tenant: needs[tenant])
    for number, tenant in enumerate(by_need):
        parts[tenant] = min(needs[tenant], budget // (len(by_need) - number))
        budget -= parts[tenant]
    return parts
