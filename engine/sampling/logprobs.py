"""Log-probabilities of sampled tokens, from the model's unmodified logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.engine.request import TokenLogprobs
from penstock.engine.sampling.rows import SamplingRow


def raw_logprobs(logits: Tensor, rows: Sequence[SamplingRow]) -> Mapping[int, Tensor]:
    """Row → log-probabilities [vocab_size], for the rows that ask for them."""
    users = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if not users:
        return {}
    logprobs = logits[torch.tensor(users, device=logits.device)].log_softmax(dim=-1)
    return dict(zip(users, logprobs, strict=True))


def describe(logprobs: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """The sampled token within logprobs [vocab_size], and the num_top likeliest."""
    chosen = logprobs[token_id]
    top = logprobs.topk(min(num_top, logprobs.numel()))
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(chosen),
        rank=int((logprobs > chosen).sum()) + 1,
        top=tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)),
    )
