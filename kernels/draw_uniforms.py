"""The uniform numbers behind sampled tokens: checks shapes, picks the implementation.

The meaning is specified by `draw_uniforms_reference`; every implementation gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.sampling import draw_uniforms_cpu
from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.reference.draw_uniforms import draw_uniforms_reference


def draw_uniforms(draws: Tensor, *, library: CpuLibrary | None = None) -> Tensor:
    """Numbers in [0, 1): float64 [num_rows].

    Args:
        draws: int64 [3, num_rows], contiguous: seeds, sequence indices, positions
        library: the CPU kernels, if there are any
    """
    assert draws.dim() == 2, f"draws {tuple(draws.shape)}"
    assert len(draws) == 3, f"draws {tuple(draws.shape)}"
    assert draws.dtype == torch.int64, f"{draws.dtype}"
    if draws.is_cuda:
        uniforms: Tensor = gpu_operation("draw_uniforms")(draws)
        return uniforms
    if library is not None:
        return draw_uniforms_cpu(library, draws)
    return draw_uniforms_reference(draws)
