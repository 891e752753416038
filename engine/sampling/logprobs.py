"""Log-probabilities of tokens, from the model's unmodified logits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.request import TokenLogprobs
from penstock.engine.sampling.rows import SamplingRow


@dataclass(frozen=True, slots=True)
class LogprobGroup:
    """Rows that ask for equally many tokens: no row's result depends on another's number.

    Attributes:
        rows: their places among all rows.
        logprobs: [len(rows), vocab_size] float32
    """

    num_top: int
    rows: Tensor
    logprobs: Tensor


def raw_logprobs(logits: Tensor, rows: Sequence[SamplingRow]) -> list[LogprobGroup]:
    """Log-probabilities of the rows that ask for them; logits [num_rows, vocab_size] float32."""
    users: defaultdict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        if row.num_logprobs is not None:
            users[row.num_logprobs].append(place)
    groups = []
    for num_top, places in users.items():
        index = torch.tensor(places, device=logits.device)
        groups.append(LogprobGroup(num_top, index, logits[index].log_softmax(dim=-1)))
    return groups


def describe_sampled(
    groups: Sequence[LogprobGroup], token_ids: Tensor
) -> Mapping[int, TokenLogprobs]:
    """Row → its entry, once token_ids int64 [num_rows] are sampled."""
    return {
        row: entry
        for group in groups
        for row, entry in zip(
            group.rows.tolist(),
            describe(group.logprobs, token_ids[group.rows], group.num_top),
            strict=True,
        )
    }


def describe(logprobs: Tensor, token_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    """One entry a row: its token within its distribution, and the num_top likeliest.

    Args:
        logprobs: [num_rows, vocab_size]
        token_ids: int64 [num_rows]
    """
    chosen = logprobs.gather(1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=1) + 1
    return [
        TokenLogprobs(token_id=token_id, logprob=logprob, rank=rank, top=top)
        for token_id, logprob, rank, top in zip(
            token_ids.tolist(),
            chosen[:, 0].tolist(),
            ranks.tolist(),
            _likeliest(logprobs, num_top),
            strict=True,
        )
    ]


def _likeliest(logprobs: Tensor, num_top: int) -> list[tuple[tuple[int, float], ...]]:
    """(token id, log-probability) of each row's num_top likeliest, likeliest first."""
    if num_top == 0:
        return [()] * len(logprobs)
    top = logprobs.topk(min(num_top, logprobs.shape[1]))
    return [
        tuple(zip(token_ids, values, strict=True))
        for token_ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
