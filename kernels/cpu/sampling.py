"""Python interface of the kernels that sample tokens."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.token_masks import TokenMasks

_MIN_SHARED_LOGITS = 1 << 19  # fewer are processed in the time that waking threads takes


def can_sample(library: CpuLibrary, logits: Tensor) -> bool:
    """Whether the library was compiled for logits like these."""
    return logits.device.type == "cpu" and logits.dtype in (library.dtype, torch.float32)


def sample_tokens_cpu(
    library: CpuLibrary,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    masks: TokenMasks | None,
) -> tuple[Tensor, Tensor]:
    """Draw the next token of each row; arguments and result are those of
    `kernels.sampling.sample_tokens`, and every tensor must be contiguous."""
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    is_valid = torch.empty(num_rows, dtype=torch.bool)
    bits, indices = masks or (None, None)
    is_shared, rows = logits.numel() >= _MIN_SHARED_LOGITS, ctypes.c_int64(num_rows)
    library.run(
        "sample_tokens", dtype=logits.dtype, is_shared=is_shared, token_ids=token_ids,
        is_valid=is_valid, logits=logits, temperature=temperature, top_k=top_k, top_p=top_p,
        min_p=min_p, uniforms=uniforms, masks=bits, mask_indices=indices, num_rows=rows,
        vocab_size=vocab_size,
    )  # fmt: skip
    return token_ids, is_valid


def draw_uniforms_cpu(library: CpuLibrary, draws: Tensor) -> Tensor:
    """The number in [0, 1) of each row: float64 [num_rows]; draws: int64 [3, num_rows], the seeds,
    indices and positions."""
    num_rows = draws.shape[1]
    uniforms = torch.empty(num_rows, dtype=torch.float64)
    rows, (seeds, indices, positions) = ctypes.c_int64(num_rows), draws
    library.run(
        "draw_uniforms", is_shared=False, uniforms=uniforms, seeds=seeds, indices=indices,
        positions=positions, num_rows=rows,
    )  # fmt: skip
    return uniforms
