"""The uniform number behind a sampled token, in numpy: the specification.

A pure function of seed, branch and position, without state between tokens:
Philox-4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, §5.3) with
the request's seed as key and (token position, sequence index) as counter. A stream that is
preempted, resumed, moved to another engine or batched with others draws the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_NUM_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)

Words = npt.NDArray[np.uint64]  # 32-bit words, held in 64 bits so that products fit


def draw_uniforms_reference(draws: Tensor) -> Tensor:
    """A number in [0, 1) with 53 random bits for each row: float64 [num_rows].

    Args:
        draws: int64 [3, num_rows]: the request's seed (read as unsigned), the branch's index, and
            the number of prompt and output tokens before the drawn one.
    """
    seed, index, position = draws.cpu().numpy().view(np.uint64)
    first, second, _, _ = philox(
        (position & _LOW, position >> _WORD, index & _LOW, index >> _WORD),
        (seed & _LOW, seed >> _WORD),
    )
    bits = (second << _WORD | first) >> np.uint64(11)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-53).to(draws.device)


def as_draws(seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]) -> Tensor:
    """The rows of `draw_uniforms` from plain integers."""
    columns = np.array([seeds, indices, positions], dtype=np.uint64)
    return torch.from_numpy(columns.view(np.int64))


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Philox-4x32-10: four random words for each counter under its key; arrays of rows."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _WORD) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _WORD) ^ c3 ^ k1,
            product0 & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3
