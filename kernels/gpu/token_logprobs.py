"""Log-probabilities of chosen tokens, in Triton: a program computes one row.

Torch finds the likeliest tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_NUM_WARPS = 16


@triton.jit
def token_logprobs_kernel(
    logprobs_ptr,  # float32 [num_rows], of the tokens
    ranks_ptr,  # int64 [num_rows]
    totals_ptr,  # float32 [num_rows]: the log of the sum of e^logit
    logits_ptr,  # [num_rows, size]
    token_ids_ptr,  # int64 [num_rows]
    size,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * size
    chosen = tl.load(logits_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    lanes = tl.arange(0, BLOCK)
    maxima = tl.full([BLOCK], float("-inf"), tl.float32)
    num_above = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, size, BLOCK, num_stages=4):
        x = tl.load(logits_ptr + start + lanes, start + lanes < size, float("-inf")).to(tl.float32)
        maxima = tl.maximum(maxima, x)
        num_above += (x > chosen).to(tl.int32)
    largest = tl.max(maxima, axis=0)
    sums = tl.zeros([BLOCK], tl.float64)
    for start in tl.range(0, size, BLOCK, num_stages=4):
        x = tl.load(logits_ptr + start + lanes, start + lanes < size, float("-inf")).to(tl.float32)
        sums += tl.exp(x - largest).to(tl.float64)
    total = largest + tl.log(tl.sum(sums, axis=0))
    tl.store(logprobs_ptr + row, (chosen - total).to(tl.float32))
    tl.store(ranks_ptr + row, tl.sum(num_above, axis=0).to(tl.int64) + 1)
    tl.store(totals_ptr + row, total.to(tl.float32))


def token_logprobs_triton(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert logits.is_contiguous()
    num_rows, size = logits.shape
    logprobs, totals = torch.empty(2, num_rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        token_logprobs_kernel[(num_rows,)](
            logprobs, ranks, totals, logits, token_ids, size, BLOCK=_BLOCK, num_warps=_NUM_WARPS
        )
    top = logits.topk(num_top)
    return logprobs, ranks, top.values.float() - totals[:, None], top.indices
