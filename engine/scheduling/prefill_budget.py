"""How many tokens a step computes, and how tenants with prompts share them.

A step ends for all its sequences together, so prompts must not delay decoding for long: beside
decodes, prompts get as many tokens as can be computed in `max_stall_ms` at the measured rate, and
so do turns of sessions, as one that goes first may come. Otherwise they get what can be computed in
`MAX_STEP_MS`: a request that comes or is aborted waits no longer, and whoever waits for a prompt is
told how far it is. So a small model, or a GPU, is never limited, and a large model on a CPU, where
2,048 tokens take many seconds, keeps streaming while a long prompt is computed (Sarathi-Serve, OSDI
2024, §4.3, also derives the budget from such a limit). While several tenants are here, steps are
short: whose request comes next does not wait for another's long prompt. So they are, though less
so, while another tenant, or a session's turn that goes first, is likely to come.

Tenants get equal parts of the budget; what one does not use goes to the others. Otherwise a long
prompt would take whole steps until its end, and other tenants' new requests would wait for it. A
single tenant gets all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from penstock.engine.config import SchedulerConfig
from penstock.engine.request import Sequence

# Prompt tokens of a step, whatever the limit: with fewer rows a CPU's matrix products run below
# their full rate, which would delay first tokens.
MIN_PROMPT_TOKENS = 128
# A step reads all weights, 40 ms for 740 MB: with steps of 1 s a prompt took 4.5 % longer.
MAX_STEP_MS = 4000.0
SHORT_STEP_MS = 10.0  # while several tenants are here
ABSENT_STEP_MS = 30.0  # while another tenant may come back
# While a turn that goes first is likely to come; at least as many rows as cost little beside the
# weights that are read for them.
AWAITING_STEP_MS, MIN_AWAITING_TOKENS = 100.0, 32


def step_budget(
    config: SchedulerConfig,
    *,
    num_decoding: int,
    prefill_tokens_per_s: float,
    are_sessions: bool = False,
    is_awaiting: bool = False,
    are_several_tenants: bool = False,
    may_another_come: bool = False,
    num_microbatches: int = 1,
) -> int:
    """Tokens of the next step.

    Args:
        num_decoding: sequences that wait for their next token.
        prefill_tokens_per_s: measured rate; 0 before the first prompt.
        are_sessions: turns of sessions are here, and one that goes first may come.
        is_awaiting: such a turn is likely to come soon (`Sessions.awaits_turn`).
        are_several_tenants: so are others' requests, none of whom is heavy (`heavy_tenants`).
        may_another_come: another tenant was here a while ago (`TenantSlots.another_may_come`).
        num_microbatches: steps that are computed at once, which share the limit.
    """
    most = config.max_num_batched_tokens
    if config.enable_chunked_prefill:
        most = -(-most // num_microbatches)
    if not config.enable_chunked_prefill or not (prefill_tokens_per_s or are_several_tenants):
        return most
    limit_ms, least = config.max_stall_ms, MIN_PROMPT_TOKENS
    if are_several_tenants:
        limit_ms = min(limit_ms, SHORT_STEP_MS)
    elif is_awaiting:
        limit_ms, least = min(limit_ms, AWAITING_STEP_MS), MIN_AWAITING_TOKENS
    elif may_another_come:
        limit_ms = min(limit_ms, ABSENT_STEP_MS)
    elif not num_decoding and not are_sessions:
        limit_ms = max(limit_ms, MAX_STEP_MS)
    in_time = int(prefill_tokens_per_s * limit_ms / 1e3)
    return min(most, num_decoding + max(least, in_time))


def prefill_budgets(
    missing: Mapping[Sequence, int], budget: int, *, entering: Sequence | None, num_entering: int
) -> dict[int, int]:
    """Maximum tokens for each prompt being computed, by seq_id; empty if no tenants compete.

    Args:
        missing: tokens left to compute of each such prompt; a tenant's prompts go in this order.
        budget: tokens left in the step.
        entering: the next sequence to be admitted, if there is a slot.
        num_entering: its tokens.
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
        # At least one: the next sequence may not be admitted after all, and then nothing would run.
        budgets[sequence.seq_id] = max(1, part)
        parts[tenant] -= part
    return budgets


def split_budget(needs: Mapping[str, int], budget: int) -> dict[str, int]:
    """Tokens for each tenant in this step, at most what it needs.

    All of the budget is given out if it is needed, except for less than one token per tenant.
    """
    parts: dict[str, int] = {}
    by_need = sorted(needs, key=lambda tenant: needs[tenant])
    for number, tenant in enumerate(by_need):
        parts[tenant] = min(needs[tenant], budget // (len(by_need) - number))
        budget -= parts[tenant]
    return parts
