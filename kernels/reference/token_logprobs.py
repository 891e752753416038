"""Log-probabilities of chosen tokens and of the likeliest, in plain torch: the specification."""

from __future__ import annotations

from torch import Tensor


def token_logprobs_reference(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability and rank of each row's token, and the likeliest tokens.

    Args:
        logits: [num_rows, vocab_size], float32, bfloat16 or float16
        token_ids: int64 [num_rows]
        num_top: at most vocab_size

    Returns:
        Log-probabilities of the tokens, float32 [num_rows]; their ranks, int64 [num_rows], from 1
        for the likeliest, with ties sharing the better rank; log-probabilities and ids of the
        num_top likeliest, float32 and int64 [num_rows, num_top], likeliest first.
    """
    chosen = token_ids[:, None]
    logprobs = logits.float().log_softmax(dim=-1)
    ranks = (logits > logits.gather(1, chosen)).sum(dim=1) + 1
    top = logprobs.topk(num_top)
    return logprobs.gather(1, chosen)[:, 0], ranks, top.values, top.indices
