"""What sequences ask of the sampler: a row for each, and their parameters in columns.

Columns are filled when a sequence enters and read in one go each step: a step over rows that ask
for nothing but a draw costs no Python for each of them. `TokenCounts` serve the penalties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.request import SamplingParams

# Rows of the table: four floats, then three integers of 64 bits.
_PARAMETERS, _DRAWS = slice(0, 4), slice(4, 7)
_TEMPERATURE, _SEED, _INDEX, _POSITION = 0, 4, 5, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """The rows of a step, and what each asks for.

    Attributes:
        parameters: float64 [4, num_rows]: temperature, top_k, top_p and min_p, as `sample_tokens`
            has them.
        draws: int64 [3, num_rows]: as `draw_uniforms` has them; None if every row is greedy.
        changed: row → its sequence, where logits are changed before the draw.
        num_tops: row → how many of the likeliest tokens to report, where log-probabilities are
            wanted.
        num_tokens: [num_rows], of each sequence; on a CPU the same memory as in `draws`.
    """

    parameters: Tensor
    draws: Tensor | None
    changed: Mapping[int, SamplingRow]
    num_tops: Mapping[int, int]
    num_tokens: npt.NDArray[np.int64]

    @property
    def has_plain_rows(self) -> bool:
        """Whether some row's logits stay as they are."""
        return len(self.changed) < len(self.num_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether every row asks for a draw alone."""
        return not self.changed and not self.num_tops


class SamplingTable:
    """The sequences on a device, at the places it gave them.

    Args:
        num_places: sequences at once.
    """

    def __init__(self, num_places: int, device: torch.device) -> None:
        self._columns = np.zeros((7, num_places), dtype=np.int64)
        self._floats = self._columns.view(np.float64)
        self._sequences: list[SamplingRow | None] = [None] * num_places
        self._is_special = np.zeros(num_places, dtype=np.bool_)  # asks for more than a draw
        self._device = device

    def enter(self, place: int, sequence: SamplingRow) -> None:
        """Fill a place, whoever had it before."""
        params = sequence.params
        top_k = max(params.top_k, 0)
        self._floats[_PARAMETERS, place] = params.temperature, top_k, params.top_p, params.min_p
        self._columns.view(np.uint64)[_SEED, place] = params.seed
        self._columns[_INDEX, place] = sequence.index
        self._is_special[place] = sequence.changes_logits or sequence.num_logprobs is not None
        self._sequences[place] = sequence

    def select(
        self, places: npt.NDArray[np.int64], num_tokens: npt.NDArray[np.int64]
    ) -> SamplingBatch:
        """The sequences at some places, in their order.

        Args:
            places: [num_rows]
            num_tokens: [num_rows], of each sequence, prompt and output.
        """
        columns = self._columns.take(places, axis=1)
        columns[_POSITION] = num_tokens
        is_random = bool(columns[_TEMPERATURE].any())  # as bits: only 0.0 has none
        on_device = torch.from_numpy(columns).to(self._device, non_blocking=True)
        changed, num_tops = {}, {}
        for row in np.flatnonzero(self._is_special[places]).tolist():
            sequence = self._sequences[places[row]]
            assert sequence is not None
            if sequence.changes_logits:
                changed[row] = sequence
            if sequence.num_logprobs is not None:
                num_tops[row] = sequence.num_logprobs
        return SamplingBatch(
            parameters=on_device[_PARAMETERS].view(torch.float64),
            draws=on_device[_DRAWS] if is_random else None,
            changed=changed,
            num_tops=num_tops,
            num_tokens=columns[_POSITION],
        )


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """One sequence about to get its next token, for as long as it is on the device.

    Attributes:
        token_ids: prompt and output so far; grows from step to step.
        index: the branch of its request; part of the draw.
        num_logprobs: None, or the likeliest tokens to report beside the sampled one.
        seen: how often each token is in prompt and output.
        output: how often it is in the output.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt_tokens: int
    index: int
    num_logprobs: int | None = None
    seen: TokenCounts = field(init=False)
    output: TokenCounts = field(init=False)

    def __post_init__(self) -> None:
        self.seen = TokenCounts(self.token_ids, 0)
        self.output = TokenCounts(self.token_ids, self.num_prompt_tokens)

    @property
    def is_too_short(self) -> bool:
        """Whether it may not end yet."""
        return len(self.token_ids) - self.num_prompt_tokens < self.params.min_tokens

    @property
    def changes_logits(self) -> bool:
        """Whether anything but the draw is asked for."""
        params = self.params
        has_penalty = params.presence_penalty or params.frequency_penalty
        is_plain = params.repetition_penalty == 1.0 and not has_penalty and not params.logit_bias
        return not is_plain or self.is_too_short


class TokenCounts:
    """How often each token occurs in a sequence that grows. A long prompt is counted once;
    then only what is new is.

    Args:
        token_ids: grows at its end.
        start: tokens before this position, all there, do not count.
    """

    def __init__(self, token_ids: Sequence[int], start: int) -> None:
        self._sequence = token_ids
        self._num_seen = start
        self._places: dict[int, int] = {}
        self._token_ids = np.empty(16, dtype=np.int64)
        self._counts = np.zeros(16, dtype=np.float32)

    def read(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Token ids and counts so far; good until the next call."""
        for token_id, count in Counter(self._sequence[self._num_seen :]).items():
            place = self._place_of(token_id)
            self._counts[place] += count
        self._num_seen = len(self._sequence)
        num_distinct = len(self._places)
        return self._token_ids[:num_distinct], self._counts[:num_distinct]

    def _place_of(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._counts):
            self._token_ids = np.concatenate((self._token_ids, np.empty_like(self._token_ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._token_ids[place] = token_id
        return place
