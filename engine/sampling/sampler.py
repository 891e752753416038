"""The sampling recipe: logits in, one token per row out.

In order: float32 · raw logprobs · logit_bias · repetition penalty · frequency and presence
penalties · min_tokens · then, for rows that are not greedy: temperature · top_k · top_p ·
min_p · draw. What no row asks for costs nothing, and no row's result depends on another's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.sampling.draw import draw_uniforms
from penstock.engine.sampling.logprobs import describe_sampled, raw_logprobs
from penstock.engine.sampling.penalties import (
    add_logit_bias,
    apply_output_penalties,
    apply_repetition_penalty,
    mask_early_stops,
)
from penstock.engine.sampling.rows import Sampled, SamplingRow
from penstock.engine.sampling.truncation import (
    apply_temperature,
    keep_min_p,
    keep_top_k,
    keep_top_p,
)


def sample(
    logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Sequence[int] = ()
) -> list[Sampled]:
    """The next token of each row.

    Args:
        logits: [num_rows, vocab_size], as the model gave them; may be overwritten.
        eos_token_ids: masked together with a row's stop tokens until its `min_tokens`.
    """
    logits = logits.float()
    raw = raw_logprobs(logits, rows)
    logits = add_logit_bias(logits, rows)
    logits = apply_repetition_penalty(logits, rows)
    logits = apply_output_penalties(logits, rows)
    logits = mask_early_stops(logits, rows, eos_token_ids)
    token_ids, is_valid = _choose(logits, rows)
    logprobs = describe_sampled(raw, token_ids)
    return [
        Sampled(token_id=token_id, is_valid=valid, logprobs=logprobs.get(row))
        for row, (token_id, valid) in enumerate(
            zip(token_ids.tolist(), is_valid.tolist(), strict=True)
        )
    ]


def _choose(logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor]:
    """Token ids [num_rows] and whether each row had a distribution; greedy rows by argmax."""
    best, token_ids = logits.max(dim=-1)  # NaN wins, so that it shows
    is_valid = best.isfinite()
    random = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if random:
        index = torch.tensor(random, device=logits.device)
        drawn = _draw(logits[index], [rows[row] for row in random])
        token_ids = token_ids.index_copy(0, index, drawn)
    return token_ids, is_valid


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Token ids [num_rows] by inverting each row's cumulative distribution.

    The sum runs in vocabulary order in float64. A draw u < 1 has 53 bits, so u · total rounds
    to less than total, and the first sum above it belongs to a token that was kept.
    """
    logits = apply_temperature(logits, rows)
    logits = keep_top_k(logits, rows)
    probabilities = logits.softmax(dim=-1)
    probabilities = keep_top_p(probabilities, rows)
    probabilities = keep_min_p(probabilities, rows)
    cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
    uniforms = draw_uniforms(
        [row.params.seed for row in rows],
        [row.index for row in rows],
        [len(row.token_ids) for row in rows],
    )
    targets = torch.from_numpy(uniforms).to(logits.device)[:, None] * cumulative[:, -1:]
    token_ids = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return token_ids.clamp(max=logits.shape[1] - 1)  # a row of NaN ends here
