"""A KV cache of signed bytes in plain torch: the specification of its numbers.

Each vector (the key or the value of one token and KV head) has a scale of its own, as in per-token
quantization (Yao et al., "ZeroQuant", 2022): x ≈ codes · scale, where scale = max|x| / 127. The
scale is stored behind the codes, so a block holds all that its tokens need, and whatever moves
whole blocks moves the scales too. Caches therefore have the shape [num_blocks, block_size,
num_kv_heads, head_dim + SCALE_BYTES]. (The CPU kernels keep other orders within a block: see
`cpu/attention.inc.c`.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.reference.linear_quantized import quantize_rows_reference

SCALE_BYTES = 4  # a float32, in the machine's byte order


def encode(x: Tensor) -> Tensor:
    """x [..., head_dim] → int8 [..., head_dim + SCALE_BYTES]

    A vector with a NaN or an infinity gets that as its scale, so it decodes to nothing finite.
    """
    codes, scales = quantize_rows_reference(x.flatten(0, -2))
    stored = torch.cat([codes, scales[:, None].view(torch.int8)], dim=1)
    return stored.view(*x.shape[:-1], stored.shape[1])


def decode(stored: Tensor) -> Tensor:
    """stored int8 [..., head_dim + SCALE_BYTES] → float32 [..., head_dim]"""
    codes, scales = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    # A copy of the scales, since a head size need not be a multiple of their alignment.
    return codes.float() * scales.clone(memory_format=torch.contiguous_format).view(torch.float32)
