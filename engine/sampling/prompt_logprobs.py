"""Log-probabilities of a prompt's own tokens, as far as a step computes what predicts them.

The hidden state of the token at position p predicts the one at p + 1, so the first prompt token has
no log-probability and what follows the last one is sampled. Logits are computed a bounded number
of rows at a time: a long prompt's would not fit beside a large vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.request import TokenLogprobs
from penstock.engine.sampling.logprobs import describe

_MAX_ROWS = 64  # at once: with a vocabulary of 150,000 each takes 600 kB, in a few copies


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSpan:
    """Prompt tokens that one step's hidden states predict.

    Attributes:
        position: of `token_ids[0]` in its sequence.
        first_row: of the step's hidden states, the one that predicts `token_ids[0]`; the others
            follow in order.
        num_top: likeliest tokens to report beside each.
    """

    seq_id: int
    position: int
    token_ids: Sequence[int]
    first_row: int
    num_top: int


def prompt_logprobs(
    spans: Sequence[PromptSpan], hidden: Tensor, head: Callable[[Tensor], Tensor]
) -> dict[int, tuple[int, tuple[TokenLogprobs, ...]]]:
    """Sequence id → (position, entries), as `BatchResult.prompt_logprobs` has it.

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
