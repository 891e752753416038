"""Changes to logits that depend on a row's tokens or parameters, before any randomness.

Each function returns logits [num_rows, vocab_size] float32, changes its input in place, and
does nothing where no row asks for it. Ids beyond the vocabulary cannot be sampled and are
passed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.sampling.rows import SamplingRow

_MAX_BIAS = 1e30  # float32 must still hold a logit plus its bias


def add_logit_bias(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Add each row's own constants to the logits of the tokens it names."""
    vocab_size = logits.shape[1]
    entries = [
        (row, token_id, max(-_MAX_BIAS, min(bias, _MAX_BIAS)))
        for row, item in enumerate(rows)
        for token_id, bias in item.params.logit_bias.items()
        if 0 <= token_id < vocab_size
    ]
    if not entries:
        return logits
    places, bias = _columns(entries, logits.device)
    logits[places] += bias
    return logits


def apply_repetition_penalty(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Divide positive and multiply negative logits of tokens seen in prompt or output
    (Keskar et al., "CTRL", 2019, §4.1, with the sign as later implementations have it)."""
    entries = [
        (row, token_id, item.params.repetition_penalty)
        for row, item in enumerate(rows)
        if item.params.repetition_penalty != 1.0
        for token_id in set(item.token_ids)
    ]
    if not entries:
        return logits
    places, penalty = _columns(entries, logits.device)
    seen = logits[places]
    logits[places] = torch.where(seen > 0, seen / penalty, seen * penalty)
    return logits


def apply_output_penalties(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Subtract count · frequency_penalty + presence_penalty of tokens in the output
    (OpenAI's API reference, "Frequency and presence penalties")."""
    entries = [
        (row, token_id, count * item.params.frequency_penalty + item.params.presence_penalty)
        for row, item in enumerate(rows)
        if item.params.frequency_penalty or item.params.presence_penalty
        for token_id, count in Counter(item.output_token_ids).items()
    ]
    if not entries:
        return logits
    places, penalty = _columns(entries, logits.device)
    logits[places] -= penalty
    return logits


def mask_early_stops(
    logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Sequence[int]
) -> Tensor:
    """Forbid EOS and stop tokens to rows with fewer than `min_tokens` of output."""
    vocab_size = logits.shape[1]
    entries = [
        (row, token_id, 0.0)
        for row, item in enumerate(rows)
        if item.num_output_tokens < item.params.min_tokens
        for token_id in {*eos_token_ids, *item.params.stop_token_ids}
        if 0 <= token_id < vocab_size
    ]
    if not entries:
        return logits
    places, _ = _columns(entries, logits.device)
    logits[places] = -torch.inf
    return logits


def _columns(
    entries: Sequence[tuple[int, int, float]], device: torch.device
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(row, token id, value) entries as an index into the logits and a float32 tensor."""
    rows, token_ids, values = zip(*entries, strict=True)
    places = torch.tensor([rows, token_ids], dtype=torch.int64).to(device)
    return (places[0], places[1]), torch.tensor(values, dtype=torch.float32).to(device)
