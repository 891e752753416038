"""Changes to logits that depend on a row's tokens or parameters, before any randomness.

Each step of `change_logits` collects the (row, token id) pairs that rows ask for and changes them
all at once; where no row asks it does nothing. Ids beyond the vocabulary cannot be sampled and are
passed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.sampling.rows import SamplingRow

_MAX_BIAS = 1e30  # float32 must still hold a logit plus its bias
# A row's place, token ids, and a value for each of them.
_Entry = tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]


def change_logits(
    logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Sequence[int] = ()
) -> None:
    """Bias, penalties, and no end before `min_tokens`, in this order.

    Args:
        logits: [num_rows, vocab_size] float32, changed
        eos_token_ids: forbidden together with a row's stop tokens until its `min_tokens`.
    """
    _add_logit_bias(logits, rows)
    _apply_repetition_penalty(logits, rows)
    _apply_output_penalties(logits, rows)
    _mask_early_stops(logits, rows, eos_token_ids)


def _add_logit_bias(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Add each row's own constants to the logits of the tokens it names."""
    entries = [
        _known(place, list(row.params.logit_bias), list(row.params.logit_bias.values()), logits)
        for place, row in enumerate(rows)
        if row.params.logit_bias
    ]
    if entries:
        places, bias = _columns(entries, logits.device)
        logits[places] += bias


def _apply_repetition_penalty(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Divide positive and multiply negative logits of tokens seen in prompt or output
    (Keskar et al., "CTRL", 2019, §4.1, with the sign as later implementations have it)."""
    entries = []
    for place, row in enumerate(rows):
        if row.params.repetition_penalty != 1.0:
            token_ids, counts = row.seen.read()
            penalties = np.full_like(counts, row.params.repetition_penalty)
            entries.append((place, token_ids, penalties))
    if entries:
        places, penalty = _columns(entries, logits.device)
        seen = logits[places]
        logits[places] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _apply_output_penalties(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Subtract count · frequency_penalty + presence_penalty of tokens in the output
    (OpenAI's API reference, "Frequency and presence penalties")."""
    entries = []
    for place, row in enumerate(rows):
        params = row.params
        if params.frequency_penalty or params.presence_penalty:
            token_ids, counts = row.output.read()
            penalties = counts * params.frequency_penalty + params.presence_penalty
            entries.append((place, token_ids, penalties))
    if entries:
        places, penalty = _columns(entries, logits.device)
        logits[places] -= penalty


def _mask_early_stops(
    logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]
) -> None:
    """Forbid EOS and stop tokens to rows with fewer than `min_tokens` of output."""
    entries = []
    for place, row in enumerate(rows):
        if row.is_too_short:
            token_ids = [*eos_token_ids, *row.params.stop_token_ids]
            entries.append(_known(place, token_ids, [0.0] * len(token_ids), logits))
    if entries:
        places, _ = _columns(entries, logits.device)
        logits[places] = -torch.inf


def _known(place: int, token_ids: Sequence[int], values: Sequence[float], logits: Tensor) -> _Entry:
    """An entry without the ids that are beyond the vocabulary."""
    ids = np.array(token_ids, dtype=np.int64)
    is_known = (ids >= 0) & (ids < logits.shape[1])
    bounded = np.array(values).clip(-_MAX_BIAS, _MAX_BIAS).astype(np.float32)
    return place, ids[is_known], bounded[is_known]


def _columns(
    entries: Sequence[_Entry], device: torch.device
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """All entries as an index into the logits and a float32 tensor."""
    places = np.repeat([place for place, _, _ in entries], [len(ids) for _, ids, _ in entries])
    token_ids = np.concatenate([ids for _, ids, _ in entries])
    values = np.concatenate([values for _, _, values in entries])
    index = torch.from_numpy(np.stack((places, token_ids))).to(device)
    return (index[0], index[1]), torch.from_numpy(values).to(device)
