"""Which drafters there are on a device, and what each needs.

One is loaded before the pools are sized, since its own count, and made after them.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from penstock.engine.models.backends import fastest
from penstock.engine.models.eagle3_head import Eagle3Head
from penstock.engine.models.loader import DraftingModel
from penstock.engine.runner.device import use_kv_dtype
from penstock.engine.runner.draft_model import NO_DRAFT_MODEL, DraftModel, NoDraftModel
from penstock.engine.runner.draft_progress import KVSpecs
from penstock.engine.runner.eagle3_drafter import Eagle3Drafter
from penstock.engine.runner.input_batch import InputBatch
from penstock.engine.sampling.sampler import Sampler
from penstock.kernels.cpu.library import CpuLibrary

Drafter: TypeAlias = DraftModel | Eagle3Drafter | NoDraftModel


def draft_kv_specs(model: DraftingModel | None, kv_dtype: torch.dtype) -> KVSpecs:
    """Of a drafter's pools, with keys and values in this dtype; an EAGLE-3 head's have its own."""
    if model is None:
        return ()
    if isinstance(model, Eagle3Head):
        return model.kv_specs
    use_kv_dtype(model, kv_dtype)
    return (model.kv_spec,)


def make_drafter(
    model: DraftingModel | None,
    kv_pool: Tensor,
    num_host_blocks: int,
    batch: InputBatch,
    sampler: Sampler,
    library: CpuLibrary | None,
    *,
    max_num_tokens: int,
    vocab_size: int,
) -> Drafter:
    """
    Args:
        model: loses its weights to the drafter.
        kv_pool: the target's.
        num_host_blocks: of the target's host tier.
        batch: the sequences on the device.
        max_num_tokens: of one forward pass.
        vocab_size: the target's.
    """
    if model is None:
        return NO_DRAFT_MODEL
    shared = (kv_pool, num_host_blocks, batch, sampler)
    if isinstance(model, Eagle3Head):
        return Eagle3Drafter(model, *shared, max_num_tokens=max_num_tokens)
    return DraftModel(
        fastest(model, kv_pool.shape[3], library),
        *shared,
        max_num_tokens=max_num_tokens,
        vocab_size=min(vocab_size, model.vocab_size),
    )
