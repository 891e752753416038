"""A step's budget among tenants with prompts to compute: equal parts, what one leaves to others.

Without it a long prompt that is under way would take whole steps until its end, and whoever comes
would wait for it. A tenant that is alone takes all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from penstock.engine.request import Sequence


def prompt_limits(
    missing: Mapping[Sequence, int], budget: int, *, entering: Sequence | None, num_entering: int
) -> dict[int, int]:
    """Tokens at most of each prompt under way, by seq_id; empty where no tenants compete.

    Args:
        missing: tokens of the prompts under way; in this order a tenant's are computed.
        budget: tokens that are left of the step.
        entering: who is next to enter, if there is a place, with so many tokens.
    """
    needs = Counter[str]()
    for sequence, num_tokens in missing.items():
        needs[sequence.request.tenant] += num_tokens
    if entering is not None:
        needs[entering.request.tenant] += num_entering
    if len(needs) < 2:
        return {}
    parts = prompt_parts(needs, max(0, budget))
    limits = {}
    for sequence, num_tokens in missing.items():
        tenant = sequence.request.tenant
        part = min(num_tokens, parts[tenant])
        limits[sequence.seq_id] = max(1, part)  # it must get on, whoever cannot enter after all
        parts[tenant] -= part
    return limits


def prompt_parts(needs: Mapping[str, int], budget: int) -> dict[str, int]:
    """Tokens for each tenant in this step, by what it could use; never more than that.

    All of the budget is given out, if there is use for it, but for less than one token a tenant.
    """
    parts: dict[str, int] = {}
    by_need = sorted(needs, key=lambda tenant: needs[tenant])
    for number, tenant in enumerate(by_need):
        parts[tenant] = min(needs[tenant], budget // (len(by_need) - number))
        budget -= parts[tenant]
    return parts
