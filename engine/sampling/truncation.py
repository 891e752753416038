"""Temperature, top-k, top-p and min-p: from logits to the probabilities a token is drawn from.

Each function returns [num_rows, vocab_size] float32 and does nothing where no row asks for it.
Tokens tied with the last one kept are kept too: which of them would go is an accident of
sorting. So no row's result depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.engine.sampling.rows import SamplingRow

_MIN_TEMPERATURE = 1e-30  # smaller ones would vanish in float32
_NUM_LIKELIEST = 1024  # a nucleus is nearly always among so many; a full sort is far slower


def apply_temperature(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Divide by the temperature, the likeliest token's logit becoming 0."""
    temperatures = [max(row.params.temperature, _MIN_TEMPERATURE) for row in rows]
    shifted = logits - logits.amax(dim=-1, keepdim=True)  # first, so that nothing overflows
    return shifted / _column(temperatures, logits)


def keep_top_k(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Mask all but the k largest logits (Fan et al., 2018, §5.4)."""
    vocab_size = logits.shape[1]

    def mask(chosen: Tensor, users: Sequence[SamplingRow]) -> Tensor:
        counts = torch.tensor([row.params.top_k for row in users], device=logits.device)
        largest = chosen.topk(int(counts.max())).values
        thresholds = largest.gather(1, counts[:, None] - 1)
        return chosen.masked_fill(chosen < thresholds, -torch.inf)

    return _where(rows, lambda row: 0 < row.params.top_k < vocab_size, logits, mask)


def keep_top_p(probabilities: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Zero all but the smallest set of likeliest tokens whose sum reaches top_p
    (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, §3.1)."""

    def mask(chosen: Tensor, users: Sequence[SamplingRow]) -> Tensor:
        top_p = _column([row.params.top_p for row in users], chosen).double()
        num_likeliest = min(_NUM_LIKELIEST, chosen.shape[1])
        thresholds, is_reached = _nucleus_threshold(chosen, top_p, num_likeliest)
        if not bool(is_reached.all()):
            full, _ = _nucleus_threshold(chosen, top_p, chosen.shape[1])
            thresholds = torch.where(is_reached, thresholds, full)
        return chosen.masked_fill(chosen < thresholds, 0.0)

    return _where(rows, lambda row: row.params.top_p < 1.0, probabilities, mask)


def keep_min_p(probabilities: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Zero tokens less likely than min_p × the likeliest (Nguyen et al., "Min-p", 2024)."""

    def mask(chosen: Tensor, users: Sequence[SamplingRow]) -> Tensor:
        min_p = _column([row.params.min_p for row in users], chosen)
        return chosen.masked_fill(chosen < min_p * chosen.amax(dim=-1, keepdim=True), 0.0)

    return _where(rows, lambda row: row.params.min_p > 0.0, probabilities, mask)


def _nucleus_threshold(
    probabilities: Tensor, top_p: Tensor, num_likeliest: int
) -> tuple[Tensor, Tensor]:
    """The least probability kept, and whether num_likeliest tokens reach top_p; [num_rows, 1]."""
    likeliest = probabilities.topk(num_likeliest).values
    reached = likeliest.cumsum(dim=-1, dtype=torch.float64) >= top_p
    last = (~reached).sum(dim=-1, keepdim=True).clamp(max=num_likeliest - 1)
    return likeliest.gather(1, last), reached[:, -1:]


def _where(
    rows: Sequence[SamplingRow],
    uses: Callable[[SamplingRow], bool],
    values: Tensor,
    change: Callable[[Tensor, Sequence[SamplingRow]], Tensor],
) -> Tensor:
    """`values` with `change` applied to the rows that use a feature."""
    users = [index for index, row in enumerate(rows) if uses(row)]
    if not users:
        return values
    if len(users) == len(rows):
        return change(values, rows)
    index = torch.tensor(users, device=values.device)
    changed = change(values[index], [rows[user] for user in users])
    return values.index_copy(0, index, changed)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
