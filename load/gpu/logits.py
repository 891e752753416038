"""Rows of logits to sample from, as a server meets them most often."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.kernels.gpu_operations import gpu_operation
from penstock.load.gpu.bench import Bench

_TEMPERATURE, _TOP_P = 0.8, 0.95
_SPREAD = 3.0  # standard deviation of logits, about as models have it


def sampling_inputs(bench: Bench, num_rows: int, vocab_size: int) -> tuple[Tensor, ...]:
    """Logits, temperature, top_k (none), top_p, min_p (none) and uniforms."""

    def column(value: float) -> Tensor:
        return torch.full((num_rows,), value, dtype=torch.float64, device=bench.device)

    logits = _SPREAD * bench.random(num_rows, vocab_size)
    uniforms = bench.random(num_rows, dtype=torch.float64).abs() % 1
    return logits, column(_TEMPERATURE), column(0.0), column(_TOP_P), column(0.0), uniforms


def sample(inputs: tuple[Tensor, ...], **options: Any) -> Tensor:
    """Token ids [num_rows], by our kernel with its options for measurements."""
    token_ids: Tensor = gpu_operation("sample_tokens", "sampling")(*inputs, **options)[0]
    return token_ids
