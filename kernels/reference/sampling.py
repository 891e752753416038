"""Drawing a token from each row of logits, in plain torch: the specification.

In order: float32 · mask · temperature · top_k · top_p · min_p · draw. Truncation keeps all tokens
from some logit upwards, including ties with the last one kept, since dropping some of them would
depend on the sort.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.token_masks import TokenMasks, mask_logits

_MIN_TEMPERATURE = 1e-30  # smaller ones would underflow in float32
_NUM_LIKELIEST = 1024  # nearly always contain the nucleus; a full sort is far slower


def sample_tokens_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    masks: TokenMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """The next token of each row, and whether the row was a valid distribution.

    A token's weight is e^((logit - largest logit) / temperature); a token is drawn by inverting the
    cumulative sum of the kept weights, in vocabulary order and float64. No row's result depends on
    another's.

    Args:
        logits: [num_rows, vocab_size], float32, bfloat16 or float16; -inf never gets drawn.
        temperature: float64 [num_rows], as are the others; 0 takes the first of the largest logits.
        top_k: keep this many largest logits (Fan et al., "Hierarchical Neural Story Generation",
            2018, §5.4); 0 keeps all.
        top_p: keep the smallest set of largest logits whose share of the weight reaches this, in
            (0, 1] (Holtzman et al., "The Curious Case of Neural Text Degeneration", 2020, §3.1).
        min_p: drop tokens less likely than min_p × the likeliest, in [0, 1] (Nguyen et al.,
            "Turning Up the Heat: Min-p Sampling", 2024).
        uniforms: in [0, 1), with 53 bits.
        masks: which tokens may be drawn; the others count as -inf. None: all.

    Returns:
        int64 and bool [num_rows]. A row with NaN or +inf, or with only -inf, is invalid: its token
        is arbitrary. What a mask excludes does not count.
    """
    logits = logits.float()
    if masks is not None:
        logits = mask_logits(logits, masks)
    largest, token_ids = logits.max(dim=-1)  # NaN if there is one
    is_valid = largest.isfinite()
    rows = ((temperature > 0) & is_valid).nonzero()[:, 0]
    if len(rows):
        parameters = (temperature, top_k, top_p, min_p, uniforms)
        token_ids[rows] = _draw(logits[rows], *(each[rows, None] for each in parameters))
    return token_ids, is_valid


def _draw(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> Tensor:
    """Token ids [num_rows]; each parameter is [num_rows, 1].

    A draw u < 1 has 53 bits, so u · total rounds to less than total, and the first sum above it
    belongs to a kept token.
    """
    largest = logits.amax(dim=-1, keepdim=True).double()
    temperature = temperature.clamp(min=_MIN_TEMPERATURE)

    def weigh(values: Tensor, threshold: Tensor) -> Tensor:
        scaled = (values.double() - largest) / temperature
        return scaled.masked_fill(values < threshold, -torch.inf).exp()

    threshold = _top_k_threshold(logits, top_k)
    if bool((top_p < 1.0).any()):
        reduced = _top_p_threshold(logits, top_p, lambda values: weigh(values, threshold))
        threshold = torch.where(top_p < 1.0, reduced, threshold)
    threshold = torch.maximum(threshold, (largest + temperature * min_p.log()).float())
    cumulative = weigh(logits, threshold).cumsum(dim=-1)
    return torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)[:, 0]


def _top_k_threshold(logits: Tensor, top_k: Tensor) -> Tensor:
    """The smallest logit kept; [num_rows, 1]."""
    is_used = (top_k > 0) & (top_k < logits.shape[1])
    unlimited = torch.full_like(logits[:, :1], -torch.inf)
    if not bool(is_used.any()):
        return unlimited
    counts = torch.where(is_used, top_k, 1).long()
    largest = logits.topk(int(counts.max())).values
    return torch.where(is_used, largest.gather(1, counts - 1), unlimited)


def _top_p_threshold(logits: Tensor, top_p: Tensor, weigh: Callable[[Tensor], Tensor]) -> Tensor:
    """The smallest logit kept; [num_rows, 1]."""
    target = top_p * weigh(logits).sum(dim=-1, keepdim=True)

    def among(num_likeliest: int) -> tuple[Tensor, bool]:
        likeliest = logits.topk(num_likeliest).values
        is_reached = weigh(likeliest).cumsum(dim=-1) >= target
        last = (~is_reached).sum(dim=-1, keepdim=True).clamp(max=num_likeliest - 1)
        return likeliest.gather(1, last), bool(is_reached[:, -1].all())

    threshold, is_complete = among(min(_NUM_LIKELIEST, logits.shape[1]))
    return threshold if is_complete else among(logits.shape[1])[0]
