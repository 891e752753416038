"""The sampler as tests call it: logits and sequences in, a result for each out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.request import TokenLogprobs
from penstock.engine.sampling.grammars import GrammarMasks, SequenceGrammar, StepMasks
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.sampling.sampling_table import SamplingRow, SamplingTable, SpecialRows
from penstock.kernels.cpu.library import load_library


@dataclass(frozen=True)
class Result:
    token_id: int
    is_valid: bool
    logprobs: TokenLogprobs | None


@dataclass(kw_only=True)
class Row(SamplingRow):
    """A sequence whose next token is drawn."""

    index: int = 0
    grammar: SequenceGrammar | None = None


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
        rows: Sequence[Row],
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
        table, special = SamplingTable(len(rows) + 2, self._device), SpecialRows()
        places = np.arange(len(rows))[::-1] + 1
        grammars: dict[int, SequenceGrammar] = {}
        num_tokens: list[int] = []
        for place, item in zip(places, rows, strict=True):
            table.enter(place, item.params, item.index)
            num_known = len(item.token_ids) - num_drafts
            own = range(len(num_tokens), len(num_tokens) + num_drafts + 1)
            special.add(own, item, num_known)
            if item.grammar is not None:
                grammars |= dict.fromkeys(own, item.grammar)
            num_tokens += range(num_known, len(item.token_ids) + 1)
        if grammars:
            memory = GrammarMasks(len(grammars), logits.shape[1], self._device)
            special.masks = StepMasks(memory, grammars, len(num_tokens))
        batch = table.select(places.repeat(num_drafts + 1), np.array(num_tokens), special)
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
