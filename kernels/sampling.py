"""Drawing a token from each row of logits: checks shapes, picks the implementation.

The meaning is specified by `kernels.reference.sampling`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.cpu.sampling import can_sample, sample_tokens_cpu
from penstock.kernels.gpu_operations import gpu_operation
from penstock.kernels.reference.sampling import sample_tokens_reference
from penstock.kernels.token_masks import TokenMasks, mask_words


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
    *,
    masks: TokenMasks | None = None,
    library: CpuLibrary | None = None,
) -> tuple[Tensor, Tensor]:
    """Token ids int64 and whether they are valid, bool; [num_rows] each.

    Args:
        logits: [num_rows, vocab_size], not modified
        temperature, top_k, top_p, min_p, uniforms: float64 [num_rows], as in
            `sample_tokens_reference`
        masks: which tokens may be drawn; None: all
        library: the CPU kernels, if there are any
    """
    parameters = (temperature, top_k, top_p, min_p, uniforms)
    assert logits.dim() == 2, f"logits {tuple(logits.shape)}"
    assert logits.is_contiguous()
    for each in parameters:
        assert each.shape == logits.shape[:1], f"{tuple(each.shape)} for {tuple(logits.shape)}"
        assert each.dtype == torch.float64, f"{each.dtype}"
    if masks is not None:
        assert masks.bits.shape[1] == mask_words(logits.shape[1]), f"{tuple(masks.bits.shape)}"
        assert masks.bits.is_contiguous()
        assert masks.indices.shape == logits.shape[:1], f"{tuple(masks.indices.shape)}"
    if library is not None and can_sample(library, logits):
        return sample_tokens_cpu(library, logits, *parameters, masks)
    run = gpu_operation("sample_tokens", "sampling") if logits.is_cuda else sample_tokens_reference
    token_ids, is_valid = run(logits, *parameters, masks)
    return token_ids, is_valid
