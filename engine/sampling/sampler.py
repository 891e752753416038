"""The sampler: logits in, one token per row out.

In order: float32 · grammar · logit_bias · repetition penalty · frequency and presence penalties ·
min_tokens · top_n_sigma · temperature · top_k · top_p · min_p · draw. Log-probabilities are of the
unmodified logits. Features that no row uses cost nothing, and no row's result depends on another's.

Each step of `change_logits` collects the (row, token id) pairs of all rows and changes them at
once. Ids outside the vocabulary cannot be sampled and are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.request import TokenLogprobs
from penstock.engine.sampling.logprobs import TopLogprobs, describe_some
from penstock.engine.sampling.sampling_table import ProcessedRow, SamplingBatch
from penstock.kernels.cpu.library import CpuLibrary
from penstock.kernels.draw_uniforms import draw_uniforms
from penstock.kernels.sampling import sample_tokens
from penstock.kernels.token_masks import TokenMasks, mask_logits


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """A step's tokens, row by row.

    Attributes:
        is_valid: False where the logits are not a distribution (NaN, or everything masked): the
            token is then arbitrary and its sequence should end in an error.
        logprobs: row → entry, for rows that asked for them.
        rows: the rows of the step that these are; None: all.
    """

    token_ids: list[int]
    is_valid: list[bool]
    logprobs: Mapping[int, TokenLogprobs]
    rows: Sequence[int] | None = None

    def read(self) -> Sampled:
        """Nothing to wait for."""
        return self

    def select(self, rows: Sequence[int]) -> Sampled:
        """Only these rows."""
        logprobs = self.logprobs
        return Sampled(
            token_ids=[self.token_ids[row] for row in rows],
            is_valid=[self.is_valid[row] for row in rows],
            logprobs={new: logprobs[row] for new, row in enumerate(rows) if row in logprobs},
            rows=rows,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTokens:
    """A result on the device, where it may not be computed yet; [num_rows] each, int64 and bool."""

    token_ids: Tensor
    is_valid: Tensor
    described: tuple[TopLogprobs, ...]

    def map(self, copy: Callable[[Tensor], Tensor]) -> ChosenTokens:
        """This result with a copy of every tensor."""
        return ChosenTokens(
            token_ids=copy(self.token_ids),
            is_valid=copy(self.is_valid),
            described=tuple(each.map(copy) for each in self.described),
        )

    def read(self) -> Sampled:
        """Wait for the device."""
        return Sampled(
            token_ids=self.token_ids.tolist(),
            is_valid=self.is_valid.tolist(),
            logprobs={
                row: entry
                for described in self.described
                for row, entry in zip(described.rows, described.entries(), strict=True)
            },
        )


class Sampler:
    """Chooses tokens.

    Args:
        eos_token_ids: masked together with a row's stop tokens until its `min_tokens`.
        library: the CPU kernels, if there are any.
    """

    def __init__(
        self, eos_token_ids: Sequence[int] = (), *, library: CpuLibrary | None = None
    ) -> None:
        self._eos_token_ids = eos_token_ids
        self._library = library
        self._changed = torch.empty(0, 0)  # kept, since fresh pages cost more than the changes

    def choose(
        self, logits: Tensor, batch: SamplingBatch, *, drawn: tuple[Tensor, Tensor] | None = None
    ) -> ChosenTokens:
        """The next token of each row.

        Args:
            logits: [num_rows, vocab_size], the model's own; not modified.
            drawn: the result of `sample_tokens` for them, if the model drew already.
        """
        if drawn is None or batch.changed:
            drawn = self._choose(logits, batch, drawn)
        token_ids, is_valid = drawn
        if not batch.num_tops:
            return ChosenTokens(token_ids=token_ids, is_valid=is_valid, described=())
        beams = batch.masks.beam_rows if batch.masks is not None else ()
        num_tops = {row: num for row, num in batch.num_tops.items() if row not in beams}
        described = describe_some(logits, token_ids, num_tops)
        if batch.masks is not None and beams:
            num_tops = {row: batch.num_tops[row] for row in beams}
            described += describe_some(logits, token_ids, num_tops, masks=batch.masks.masks)
        return ChosenTokens(token_ids=token_ids, is_valid=is_valid, described=described)

    def _choose(
        self, logits: Tensor, batch: SamplingBatch, drawn: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Token ids and whether each row had a distribution."""
        uniforms = batch.parameters[0]  # not read if all rows are greedy
        if batch.draws is not None:
            uniforms = draw_uniforms(batch.draws, library=self._library)
        masks = None if batch.masks is None else batch.masks.masks
        if not batch.changed:
            return self._sample(logits, batch.parameters, uniforms, masks)
        if len(batch.changed) == len(logits):
            changed = self._change(logits, batch.changed.values(), masks)
            return self._sample(changed, batch.parameters, uniforms)
        token_ids, is_valid = drawn or self._sample(logits, batch.parameters, uniforms, masks)
        rows = torch.tensor(list(batch.changed), device=logits.device)
        own_masks = None if masks is None else TokenMasks(masks.bits, masks.indices[rows])
        changed = self._change(logits[rows], batch.changed.values(), own_masks)
        chosen = self._sample(changed, batch.parameters[:, rows].contiguous(), uniforms[rows])
        return token_ids.index_copy(0, rows, chosen[0]), is_valid.index_copy(0, rows, chosen[1])

    def _change(
        self, logits: Tensor, rows: Collection[ProcessedRow], masks: TokenMasks | None
    ) -> Tensor:
        """The logits with these rows' changes, float32, valid until the next call."""
        num_rows, vocab_size = logits.shape
        if num_rows > len(self._changed):
            self._changed = torch.empty(num_rows, vocab_size, device=logits.device)
        changed = self._changed[:num_rows].copy_(logits)
        if masks is not None:
            changed = mask_logits(changed, masks)
        change_logits(changed, list(rows), self._eos_token_ids)
        return changed

    def _sample(
        self,
        logits: Tensor,
        parameters: Tensor,
        uniforms: Tensor,
        masks: TokenMasks | None = None,
    ) -> tuple[Tensor, Tensor]:
        temperature, top_k, top_p, min_p = parameters.unbind()
        return sample_tokens(
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            uniforms,
            masks=masks,
            library=self._library,
        )


# A row, token ids, and a value for each of them.
_Entry = tuple[int, npt.NDArray[np.int64], npt.NDArray[np.float32]]


def change_logits(
    logits: Tensor, rows: Sequence[ProcessedRow], eos_token_ids: Sequence[int] = ()
) -> None:
    """Apply bias, penalties, `min_tokens` and `top_n_sigma`, in this order.

    Args:
        logits: [num_rows, vocab_size] float32, modified in place
        eos_token_ids: masked together with a row's stop tokens until its `min_tokens`.
    """
    _add_logit_bias(logits, rows)
    _apply_repetition_penalty(logits, rows)
    _apply_output_penalties(logits, rows)
    _mask_early_stops(logits, rows, eos_token_ids)
    _cut_below_sigmas(logits, rows)


def _add_logit_bias(logits: Tensor, rows: Sequence[ProcessedRow]) -> None:
    """Add each row's `logit_bias`."""
    entries = [
        _known(number, list(row.params.logit_bias), list(row.params.logit_bias.values()), logits)
        for number, row in enumerate(rows)
        if row.params.logit_bias
    ]
    if entries:
        index, bias = _columns(entries, logits.device)
        logits[index] += bias


def _apply_repetition_penalty(logits: Tensor, rows: Sequence[ProcessedRow]) -> None:
    """Divide positive and multiply negative logits of tokens seen in prompt or output
    (Keskar et al., "CTRL", 2019, §4.1, with the sign of later implementations)."""
    entries = []
    for number, row in enumerate(rows):
        if row.params.repetition_penalty != 1.0:
            token_ids, counts = row.sequence.seen.read(row.num_tokens, num_drafts=row.num_drafts)
            penalties = np.full_like(counts, row.params.repetition_penalty)
            entries.append((number, token_ids, penalties))
    if entries:
        index, penalty = _columns(entries, logits.device)
        seen = logits[index]
        logits[index] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _apply_output_penalties(logits: Tensor, rows: Sequence[ProcessedRow]) -> None:
    """Subtract count · frequency_penalty + presence_penalty of tokens in the output
    (OpenAI's API reference, "Frequency and presence penalties")."""
    entries = []
    for number, row in enumerate(rows):
        params = row.params
        if params.frequency_penalty or params.presence_penalty:
            token_ids, counts = row.sequence.output.read(row.num_tokens, num_drafts=row.num_drafts)
            penalties = counts * params.frequency_penalty + params.presence_penalty
            entries.append((number, token_ids, penalties))
    if entries:
        index, penalty = _columns(entries, logits.device)
        logits[index] -= penalty


def _mask_early_stops(
    logits: Tensor, rows: Sequence[ProcessedRow], eos_token_ids: Sequence[int]
) -> None:
    """Mask EOS and stop tokens in rows with fewer than `min_tokens` of output."""
    entries = []
    for number, row in enumerate(rows):
        if row.is_too_short:
            token_ids = [*eos_token_ids, *row.params.stop_token_ids]
            entries.append(_known(number, token_ids, [0.0] * len(token_ids), logits))
    if entries:
        index, _ = _columns(entries, logits.device)
        logits[index] = -torch.inf


def _cut_below_sigmas(logits: Tensor, rows: Sequence[ProcessedRow]) -> None:
    """Mask logits more than `top_n_sigma` standard deviations below the row's largest (Tang et al.,
    "Top-nσ: Not All Logits Are You Need", 2024, arXiv:2411.07641, algorithm 1). The paper divides
    by the temperature first, which changes nothing. As in llama.cpp's sampler, masked logits do not
    count, the deviation is the population's, and all other truncation comes later."""
    for number, row in enumerate(rows):
        if row.is_cut:
            # Row by row: torch sums a row in another order beside others than alone.
            values = logits[number].double()
            is_possible = values > -torch.inf
            num_possible = is_possible.sum()
            mean = values.where(is_possible, 0).sum() / num_possible
            variance = (values - mean).where(is_possible, 0).square().sum() / num_possible
            threshold = values.max() - row.params.top_n_sigma * variance.sqrt()
            logits[number].masked_fill_(values < threshold, -torch.inf)


def _known(row: int, token_ids: Sequence[int], values: Sequence[float], logits: Tensor) -> _Entry:
    """An entry without the ids outside the vocabulary."""
    ids = np.array(token_ids, dtype=np.int64)
    is_known = (ids >= 0) & (ids < logits.shape[1])
    return row, ids[is_known], np.array(values, dtype=np.float32)[is_known]


def _columns(
    entries: Sequence[_Entry], device: torch.device
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """All entries as an index into the logits and a float32 tensor of values."""
    rows = np.repeat([row for row, _, _ in entries], [len(ids) for _, ids, _ in entries])
    token_ids = np.concatenate([ids for _, ids, _ in entries])
    values = np.concatenate([values for _, _, values in entries])
    index = torch.from_numpy(np.stack((rows, token_ids))).to(device)
    return (index[0], index[1]), torch.from_numpy(values).to(device)
