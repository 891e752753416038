"""Log-probabilities of chosen tokens and of the likeliest: checks shapes, picks the implementation.

The meaning is specified by `token_logprobs_reference`.
"""

from __future__ import annotations

from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.reference.token_logprobs import token_logprobs_reference


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities and ranks of token_ids [num_rows] in logits [num_rows, vocab_size], and
    values and ids of the likeliest [num_rows, num_top]; see `token_logprobs_reference`."""
    assert logits.dim() == 2, f"logits {tuple(logits.shape)}"
    assert token_ids.shape == logits.shape[:1], f"{tuple(token_ids.shape)}"
    assert 0 <= num_top <= logits.shape[1], f"{num_top} of {logits.shape[1]}"
    run = gpu_operation("token_logprobs") if logits.is_cuda else token_logprobs_reference
    logprobs, ranks, top_logprobs, top_ids = run(logits, token_ids, num_top)
    return logprobs, ranks, top_logprobs, top_ids
