"""Which tokens a request's own lists leave: `allowed_token_ids` and `bad_words`, as in vLLM.

They are taken out of the masks that grammars write (`engine.sampling.grammars`), so drafts, beams
and the device treat them alike. A sequence without a grammar has `AnyText` in place of a matcher.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from penstock.engine.request import SamplingParams
from penstock.kernels.token_masks import mask_words

_Words = npt.NDArray[np.uint32]


class TokenLimits:
    """The lists of one request.

    Args:
        allowed_token_ids: only these; None: all.
        bad_token_ids: sequences of tokens that an output never has.
    """

    def __init__(
        self,
        allowed_token_ids: Sequence[int] | None,
        bad_token_ids: Sequence[Sequence[int]],
        vocab_size: int,
    ) -> None:
        never = [token_ids[0] for token_ids in bad_token_ids if len(token_ids) == 1]
        self._left = all_tokens(vocab_size).copy()
        if allowed_token_ids is not None:
            self._left &= _bits(allowed_token_ids, vocab_size)
        self._left &= ~_bits(never, vocab_size)
        # By length and tokens of what comes before the last one.
        self._lasts: dict[int, dict[tuple[int, ...], list[int]]] = defaultdict(dict)
        for *before, last in bad_token_ids:
            if before and last < vocab_size:
                self._lasts[len(before)].setdefault(tuple(before), []).append(last)

    def restrict(self, mask: _Words, output: Sequence[int], start: int, end: int) -> None:
        """Take out of a mask what may not follow.

        Args:
            output: has the output so far from `start` to `end`.
        """
        mask &= self._left
        for num, lasts in self._lasts.items():
            if end - start >= num:
                for token_id in lasts.get(tuple(output[end - num : end]), ()):
                    mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def limits_of(params: SamplingParams, vocab_size: int) -> TokenLimits | None:
    """None: its lists leave every token."""
    if params.allowed_token_ids is None and not params.bad_words_token_ids:
        return None
    return _limits(params.allowed_token_ids, params.bad_words_token_ids, vocab_size)


_limits = lru_cache(maxsize=64)(TokenLimits)  # a request's branches share one


@lru_cache(maxsize=4)
def all_tokens(vocab_size: int) -> _Words:
    """A mask of all tokens."""
    return _bits(range(vocab_size), vocab_size)


def _bits(token_ids: Sequence[int], vocab_size: int) -> _Words:
    words = np.zeros(mask_words(vocab_size), dtype=np.uint32)
    ids = np.array(token_ids, dtype=np.int64)
    ids = ids[ids < vocab_size]
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
    return words


class AnyText:
    """What `SequenceGrammar` uses of a matcher, where any token may follow any other."""

    def __init__(self, vocab_size: int) -> None:
        self._words = all_tokens(vocab_size)

    def deep_copy(self) -> AnyText:
        return self

    def consume_tokens(self, _: Sequence[int]) -> bool:
        return True

    def try_consume_tokens(self, token_ids: Sequence[int]) -> int:
        return len(token_ids)

    def rollback(self, _: int) -> bool:
        return True

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return False

    def is_accepting(self) -> bool:
        """Any text is a whole output."""
        return True

    def compute_ff_tokens(self) -> list[int]:
        """No token is the only one."""
        return []

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        ctypes.memmove(address, self._words.ctypes.data, num_bytes)
