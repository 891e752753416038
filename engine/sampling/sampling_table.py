"""The sampling parameters of all sequences on a device, as columns of a table.

A sequence's column is filled when it enters, and each step reads the columns of its sequences at
once: rows that only need a draw cost no Python each. Those that need more have a `SamplingRow`,
whose `TokenCounts` are for the penalties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.request import SamplingParams
from penstock.engine.sampling.grammars import StepMasks

# Rows of the table: four floats, then three integers of 64 bits.
_PARAMETERS, _DRAWS = slice(0, 4), slice(4, 7)
_TEMPERATURE, _SEED, _INDEX, _POSITION = 0, 4, 5, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The sampling parameters of a step's rows.

    Attributes:
        parameters: float64 [4, num_rows]: temperature, top_k, top_p and min_p, as in
            `sample_tokens`.
        draws: int64 [3, num_rows]: as in `draw_uniforms`; None if every row is greedy.
        changed: the rows whose logits are changed before the draw.
        num_tops: row → how many of the likeliest tokens to report, for rows that want
            log-probabilities.
        num_tokens: [num_rows], of each sequence; on a CPU the same memory as in `draws`.
        masks: what the rows' grammars allow; None if no row has one.
    """

    parameters: Tensor
    draws: Tensor | None
    changed: Mapping[int, ProcessedRow]
    num_tops: Mapping[int, int]
    num_tokens: npt.NDArray[np.int64]
    masks: StepMasks | None = None

    @property
    def has_plain_rows(self) -> bool:
        """Whether some row's logits are not changed."""
        return len(self.changed) < len(self.num_tokens)

    def plain(self) -> SamplingBatch:
        """These rows, drawn from the logits as they are."""
        return replace(self, changed={}, num_tops={}, masks=None)


class SamplingTable:
    """The sequences on a device, each in the column with the number of its device row.

    Args:
        max_num_seqs: number of columns.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._columns = np.zeros((7, max_num_seqs), dtype=np.int64)
        self._floats = self._columns.view(np.float64)
        self._device = device

    def enter(self, column: int, params: SamplingParams, index: int) -> None:
        """Fill a column, replacing its previous sequence.

        Args:
            index: the branch of its request; part of the draw.
        """
        top_k = max(params.top_k, 0)
        self._floats[_PARAMETERS, column] = params.temperature, top_k, params.top_p, params.min_p
        self._columns.view(np.uint64)[_SEED, column] = params.seed
        self._columns[_INDEX, column] = index

    def select(
        self,
        column_ids: npt.NDArray[np.int64],
        num_tokens: npt.NDArray[np.int64],
        special: SpecialRows | None = None,
    ) -> SamplingBatch:
        """The sequences in these columns, in their order.

        Args:
            column_ids: [num_rows]
            num_tokens: [num_rows], of each sequence, prompt and output, up to its row: a sequence
                with drafts has a row for each of them too.
            special: what these rows need besides a draw.
        """
        columns = self._columns.take(column_ids, axis=1)
        columns[_POSITION] = num_tokens
        is_random = bool(columns[_TEMPERATURE].any())  # as bits: only 0.0 has none set
        on_device = torch.from_numpy(columns).to(self._device, non_blocking=True)
        special = special or SpecialRows()
        return SamplingBatch(
            parameters=on_device[_PARAMETERS].view(torch.float64),
            draws=on_device[_DRAWS] if is_random else None,
            changed=special.changed,
            num_tops=special.num_tops,
            num_tokens=columns[_POSITION],
            masks=special.masks,
        )


@dataclass(slots=True, kw_only=True)
class SpecialRows:
    """What some rows of a step need besides a draw; attributes as of `SamplingBatch`."""

    changed: dict[int, ProcessedRow] = field(default_factory=dict)
    num_tops: dict[int, int] = field(default_factory=dict)
    masks: StepMasks | None = None

    def add(self, rows: Sequence[int], sequence: SamplingRow, num_known: int) -> None:
        """
        Args:
            rows: of the sequence: after its last token, and after each of its drafts.
            num_known: tokens before the drafts.
        """
        for num_drafts, row in enumerate(rows):
            changed = ProcessedRow(sequence, num_known + num_drafts, num_drafts)
            if changed.is_changed:
                self.changed[row] = changed
            if sequence.num_logprobs is not None:
                self.num_tops[row] = sequence.num_logprobs


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """What the sampler needs of one sequence besides its column.

    Attributes:
        token_ids: prompt and output so far; grows from step to step.
        num_logprobs: None, or how many of the likeliest tokens to report with the sampled one.
        seen: counts of each token in prompt and output.
        output: counts of each token in the output.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_logprobs: int | None = None
    seen: TokenCounts = field(init=False)
    output: TokenCounts = field(init=False)

    def __post_init__(self) -> None:
        self.seen = TokenCounts(self.token_ids, 0)
        self.output = TokenCounts(self.token_ids, self.num_prompt_tokens)

    @property
    def is_special(self) -> bool:
        """Whether any of its rows may need more than a draw."""
        is_changed = ProcessedRow(self, self.num_prompt_tokens).is_changed
        return is_changed or self.num_logprobs is not None


class ProcessedRow:
    """How the logits of a row are changed: by its sequence's parameters and tokens.

    Args:
        num_tokens: of its sequence, those before the token that is drawn.
        num_drafts: the last of them, which the sequence may lose again.
    """

    __slots__ = ("num_drafts", "num_tokens", "params", "sequence")

    def __init__(self, sequence: SamplingRow, num_tokens: int, num_drafts: int = 0) -> None:
        self.sequence, self.params = sequence, sequence.params
        self.num_tokens, self.num_drafts = num_tokens, num_drafts

    @property
    def is_too_short(self) -> bool:
        """Whether the sequence may not end yet."""
        return self.num_tokens - self.sequence.num_prompt_tokens < self.params.min_tokens

    @property
    def is_cut(self) -> bool:
        """Whether `top_n_sigma` changes its draw; the largest logit is always kept."""
        return self.params.top_n_sigma > 0 and self.params.temperature > 0

    @property
    def is_changed(self) -> bool:
        """Whether its logits are changed before the draw."""
        params = self.params
        has_penalty = params.presence_penalty or params.frequency_penalty
        is_plain = params.repetition_penalty == 1.0 and not has_penalty and not params.logit_bias
        return not is_plain or self.is_cut or self.is_too_short


class TokenCounts:
    """Counts of each token in a growing sequence. Each call only counts the new tokens, and takes
    back the drafts of the last one.

    Args:
        token_ids: grows at its end.
        start: tokens before this position, which must exist, do not count.
    """

    def __init__(self, token_ids: Sequence[int], start: int) -> None:
        self._sequence = token_ids
        self._num_seen = start
        self._drafts: Sequence[int] = ()  # counted too
        self._had_drafts = False
        self._indices: dict[int, int] = {}  # by token id, into the arrays
        self._token_ids = np.empty(16, dtype=np.int64)
        self._counts = np.zeros(16, dtype=np.float32)

    def read(
        self, num_tokens: int, *, num_drafts: int = 0
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Token ids and counts of the sequence's first tokens; valid until the next call.

        Args:
            num_tokens: how many; without the drafts not fewer than before.
            num_drafts: the last of them, which the sequence may lose again.
        """
        num_known = num_tokens - num_drafts
        if self._drafts:
            self._add(self._drafts, -1)
        self._add(self._sequence[self._num_seen : num_known], 1)
        self._num_seen = num_known
        self._drafts = self._sequence[num_known:num_tokens]
        if self._drafts:
            self._add(self._drafts, 1)
            self._had_drafts = True
        num_distinct = len(self._indices)
        token_ids, counts = self._token_ids[:num_distinct], self._counts[:num_distinct]
        if self._had_drafts:
            is_counted = counts > 0  # wrong drafts are not
            return token_ids[is_counted], counts[is_counted]
        return token_ids, counts

    def _add(self, token_ids: Sequence[int], sign: int) -> None:
        for token_id, count in Counter(token_ids).items():
            index = self._index_of(token_id)
            self._counts[index] += sign * count

    def _index_of(self, token_id: int) -> int:
        index = self._indices.setdefault(token_id, len(self._indices))
        if index == len(self._counts):
            self._token_ids = np.concatenate((self._token_ids, np.empty_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._token_ids[index] = token_id
        return index
