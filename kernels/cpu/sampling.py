"""Python interface of the kernels that sample tokens."""

from __future__ import annotations

import ctypes
from ctypes import addressof

import torch
from torch import Tensor

from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.structures import DrawUniformsArgs, SampleTokensArgs

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
) -> tuple[Tensor, Tensor]:
    """As `sample_tokens`; every tensor must be contiguous."""
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    is_valid = torch.empty(num_rows, dtype=torch.bool)
    rows = ctypes.c_int64(num_rows)
    args = SampleTokensArgs(
        token_ids.data_ptr(),
        is_valid.data_ptr(),
        logits.data_ptr(),
        temperature.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        uniforms.data_ptr(),
        addressof(rows),
        vocab_size,
    )
    is_shared = logits.numel() >= _MIN_SHARED_LOGITS
    library.run("sample_tokens", args, dtype=logits.dtype, is_shared=is_shared)
    return token_ids, is_valid


def draw_uniforms_cpu(library: CpuLibrary, draws: Tensor) -> Tensor:
    """As `draw_uniforms`."""
    num_rows = draws.shape[1]
    uniforms = torch.empty(num_rows, dtype=torch.float64)
    rows = ctypes.c_int64(num_rows)
    args = DrawUniformsArgs(
        uniforms.data_ptr(),
        *(each.data_ptr() for each in draws),
        addressof(rows),
    )
    library.run("draw_uniforms", args, is_shared=False)
    return uniforms
