"""The sampler as tests call it: logits and sequences in, a result for each out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.request import TokenLogprobs
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.sampling.sampling_table import SamplingRow, SamplingTable
from penstock.kernels.cpu.library import load_library


@dataclass(frozen=True)
class Result:
    token_id: int
    is_valid: bool
    logprobs: TokenLogprobs | None


class Sample:
    """A sampler on a device, with the CPU's kernels for the dtype of the logits or without."""

    def __init__(self, device: str, *, has_kernels: bool) -> None:
        dtypes = (torch.float32, torch.bfloat16) if has_kernels else ()
        self._libraries = {dtype: load_library(dtype) for dtype in dtypes}
        assert None not in self._libraries.values()
        self._device = torch.device(device)

    def __call__(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        eos_token_ids: Sequence[int] = (),
        *,
        num_drafts: int = 0,
    ) -> list[Result]:
        """
        Args:
            num_drafts: so many of each row's last tokens are drafts; there is a row for each of
                them too.
        """
        logits = logits.to(self._device)
        before = logits.clone()
        table = SamplingTable(len(rows) + 2, self._device, vocab_size=logits.shape[1])
        places = np.arange(len(rows))[::-1] + 1
        for place, item in zip(places, rows, strict=True):
            table.enter(place, item)
        num_tokens = [
            len(item.token_ids) - num_after
            for item in rows
            for num_after in reversed(range(num_drafts + 1))
        ]
        batch = table.select(places.repeat(num_drafts + 1), np.array(num_tokens))
        if batch.masks is not None:
            batch.masks.fill()
        sampler = Sampler(eos_token_ids, library=self._libraries.get(logits.dtype))
        sampled = sampler.choose(logits, batch).read()
        assert torch.equal(logits.nan_to_num(), before.nan_to_num())
        return [
            Result(token_id, is_valid, sampled.logprobs.get(place))
            for place, (token_id, is_valid) in enumerate(
                zip(sampled.token_ids, sampled.is_valid, strict=True)
            )
        ]
