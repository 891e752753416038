"""The uniform numbers behind sampled tokens: Triton has the same generator."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


@triton.jit
def draw_uniforms_kernel(uniforms_ptr, draws_ptr, num_rows, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = rows < num_rows
    seed = tl.load(draws_ptr + rows, is_inside, 0)
    index = tl.load(draws_ptr + num_rows + rows, is_inside, 0)
    position = tl.load(draws_ptr + 2 * num_rows + rows, is_inside, 0)
    # Its counter's first two words are the position, the others the branch.
    first, second, _, _ = tl.philox(
        seed, _low(position), _high(position), _low(index), _high(index), 10
    )
    bits = (second.to(tl.uint64) << 32 | first.to(tl.uint64)) >> 11
    tl.store(uniforms_ptr + rows, bits.to(tl.float64) * 1.1102230246251565e-16, is_inside)  # 2^-53


@triton.jit
def _low(x):
    return x.to(tl.uint32)


@triton.jit
def _high(x):
    return (x >> 32).to(tl.uint32)


def draw_uniforms_triton(draws: Tensor) -> Tensor:
    assert draws.is_contiguous()
    num_rows = draws.shape[1]
    uniforms = torch.empty(num_rows, dtype=torch.float64, device=draws.device)
    if num_rows:
        grid = (triton.cdiv(num_rows, _BLOCK),)
        draw_uniforms_kernel[grid](uniforms, draws, num_rows, BLOCK=_BLOCK, num_warps=4)
    return uniforms
