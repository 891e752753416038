"""Log-probabilities of sampled tokens and of prompt tokens, from the model's unmodified logits.

The hidden state of the token at position p predicts the one at p + 1, so the first prompt token has
no log-probability, and the token after the last one is sampled. A prompt's logits are computed a
limited number of rows at a time: a long prompt's would not fit into memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.request import TokenLogprobs
from penstock.kernels.token_logprobs import token_logprobs
from penstock.kernels.token_masks import TokenMasks, mask_logits


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprobs:
    """Tokens with their log-probabilities and ranks, on the device, one per row.

    Attributes:
        rows: their indices among the rows of a step.
        logprobs, ranks: [num_rows]
        top_ids, top_logprobs: [num_rows, num_top], likeliest first
    """

    rows: list[int]
    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def map(self, copy: Callable[[Tensor], Tensor]) -> TopLogprobs:
        """These log-probabilities with a copy of every tensor."""
        return TopLogprobs(
            rows=self.rows,
            token_ids=copy(self.token_ids),
            logprobs=copy(self.logprobs),
            ranks=copy(self.ranks),
            top_ids=copy(self.top_ids),
            top_logprobs=copy(self.top_logprobs),
        )

    def entries(self) -> list[TokenLogprobs]:
        """One entry per row; waits for the device."""
        return [
            TokenLogprobs(
                token_id=token_id,
                logprob=logprob,
                rank=rank,
                top=tuple(
                    pair
                    for pair in zip(top_ids, top_logprobs, strict=True)
                    if pair[1] > -math.inf  # a grammar excludes them
                ),
            )
            for token_id, logprob, rank, top_ids, top_logprobs in zip(
                self.token_ids.tolist(),
                self.logprobs.tolist(),
                self.ranks.tolist(),
                self.top_ids.tolist(),
                self.top_logprobs.tolist(),
                strict=True,
            )
        ]


def describe(
    logits: Tensor,
    token_ids: Tensor,
    num_top: int,
    *,
    rows: list[int] | None = None,
    masks: TokenMasks | None = None,
) -> TopLogprobs:
    """Each row's token with its log-probability and rank, and the num_top likeliest tokens.

    Args:
        logits: [num_rows, vocab_size]
        token_ids: int64 [num_rows]
        masks: which tokens may be among the likeliest; there may then be fewer. Their
            probabilities are as without masks.
    """
    num_top = min(num_top, logits.shape[1])
    logprobs, ranks, top_logprobs, top_ids = token_logprobs(logits, token_ids, num_top)
    if masks is not None:
        logprobs_of_all = logits.float().log_softmax(dim=-1)
        top_logprobs, top_ids = mask_logits(logprobs_of_all, masks).topk(num_top)
    return TopLogprobs(
        rows=list(range(len(token_ids))) if rows is None else rows,
        token_ids=token_ids,
        logprobs=logprobs,
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def describe_some(
    logits: Tensor,
    token_ids: Tensor,
    num_tops: Mapping[int, int],
    *,
    masks: TokenMasks | None = None,
) -> tuple[TopLogprobs, ...]:
    """The rows in `num_tops`, grouped by num_top, so that no row's result depends on another's
    num_top.

    Args:
        logits: [num_rows, vocab_size]
        token_ids: int64 [num_rows]
        num_tops: row → num_top.
        masks: as in `describe`.
    """
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for row, num_top in num_tops.items():
        groups[num_top].append(row)
    described = []
    for num_top, rows in groups.items():
        index = torch.tensor(rows, device=logits.device)
        own_masks = None if masks is None else TokenMasks(masks.bits, masks.indices[index])
        described.append(
            describe(logits[index], token_ids[index], num_top, rows=rows, masks=own_masks)
        )
    return tuple(described)


_MAX_ROWS = 64  # at once: with a vocabulary of 150,000 a row takes 600 kB, in a few copies


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpan:
    """Prompt tokens that one step's hidden states predict.

    Attributes:
        position: of `token_ids[0]` in its sequence.
        first_row: row of the step's hidden states that predicts `token_ids[0]`; the others follow
            in order.
        num_top: how many of the likeliest tokens to report with each.
    """

    seq_id: int
    position: int
    token_ids: Sequence[int]
    first_row: int
    num_top: int


def prompt_logprobs(
    spans: Sequence[PromptSpan], hidden: Tensor, head: Callable[[Tensor], Tensor]
) -> dict[int, tuple[int, tuple[TokenLogprobs, ...]]]:
    """Sequence id → (position, entries), as in `BatchResult.prompt_logprobs`.

    Args:
        hidden: [num_tokens, hidden_size], of the whole step.
        head: hidden [num_rows, hidden_size] → logits [num_rows, vocab_size].
    """
    return {span.seq_id: (span.position, tuple(_entries(span, hidden, head))) for span in spans}


def _entries(
    span: PromptSpan, hidden: Tensor, head: Callable[[Tensor], Tensor]
) -> Iterator[TokenLogprobs]:
    token_ids = torch.tensor(span.token_ids, device=hidden.device)
    rows = hidden[span.first_row : span.first_row + len(token_ids)]
    for start in range(0, len(rows), _MAX_ROWS):
        part = slice(start, start + _MAX_ROWS)
        yield from describe(head(rows[part]), token_ids[part], span.num_top).entries()
