"""Ends a thought that has used up its budget: `thinking_token_budget`, as in vLLM.

From the budget on a mask leaves one token, the next of those that end the thought. As masks do,
this depends on the output's tokens alone: a draft, a fork, a swap, another engine or another
gateway change nothing. Tokens of marks do not count, neither those of the end.

The last tokens before the budget are whole characters each, so that none is cut in two.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engine.request import ThoughtLimit
from penstock.engine.structured_outputs.compiler import GrammarCompiler

_Words = npt.NDArray[np.uint32]
_NUM_WHOLE = 4  # a character has at most as many bytes, and each may be a token
_SPECIAL = "\ufdd0".encode()  # before the name that the grammars' tokenizer has for a special token


class _Phase(Enum):
    BEFORE = 0  # a thought may begin
    WITHIN = 1
    OVER = 2  # none may begin any more


class ThoughtState(NamedTuple):
    """After some tokens of an output.

    Attributes:
        num: tokens of thoughts so far.
        num_ending: how many of the tokens that end the thought came.
        tail: the newest bytes; before the first thought, all but white space.
    """

    phase: _Phase
    num: int = 0
    num_ending: int = 0
    tail: bytes = b""


class ThoughtRules:
    """What may follow in the outputs of one request.

    Args:
        budget: tokens of thoughts.
        compiler: has the vocabulary.
    """

    def __init__(self, limit: ThoughtLimit, budget: int, compiler: GrammarCompiler) -> None:
        self._budget, self._tokenizer = budget, compiler.read_tokenizer()
        self._begins = tuple(each.encode() for each in limit.begins)
        self._ends = tuple(each.encode() for each in limit.ends)
        self._marks = {token_id: text.encode() for token_id, text in limit.marks}
        self._end_token_ids, self._recurs = limit.end_token_ids, limit.recurs
        self._never = [(self._marks.get(one, b""), other) for one, other in limit.never]
        self._whole = compiler.whole_tokens
        self._num_kept = max(_NUM_WHOLE, *map(len, (*self._begins, *self._ends)))
        self.begin = ThoughtState(_Phase.WITHIN if limit.is_thinking else _Phase.BEFORE)

    def after(self, state: ThoughtState, token_ids: Sequence[int]) -> ThoughtState:
        """The state after more tokens."""
        for token_id in token_ids:
            if state.phase is _Phase.OVER:
                break
            state = self._after(state, token_id)
        return state

    def to_come(self, state: ThoughtState) -> tuple[int, ...]:
        """The tokens that must come next, if the budget is used up."""
        if state.phase is not _Phase.WITHIN:
            return ()
        if state.num < self._budget and not state.num_ending:
            return ()
        return self._end_token_ids[state.num_ending :]

    def may_restrict(self, state: ThoughtState, num_tokens: int) -> bool:
        """Whether some token may be forbidden after at most `num_tokens` more."""
        if state.phase is _Phase.OVER:
            return False
        return state.num_ending > 0 or state.num + num_tokens + _NUM_WHOLE >= self._budget

    def restrict(self, mask: _Words, state: ThoughtState) -> bool:
        """Take out of a mask what may not follow; whether one token is left, that must come next.
        Where the mask does not have it, as a grammar may end a character first, it stays."""
        if state.phase is _Phase.OVER:
            return False
        to_come = self.to_come(state)
        if to_come:
            word, bit = to_come[0] // 32, np.uint32(1 << to_come[0] % 32)
            if mask[word] & bit:
                mask[:] = 0
                mask[word] = bit
                return True
        elif state.phase is _Phase.WITHIN:
            if state.num + _NUM_WHOLE >= self._budget and not _is_cut(state.tail):
                left = mask & self._whole
                if left.any():
                    mask[:] = left
        elif state.num >= self._budget:
            for before, token_id in self._never:
                if before and state.tail.endswith(before):
                    mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return False

    def _after(self, state: ThoughtState, token_id: int) -> ThoughtState:
        to_come = self.to_come(state)
        if to_come and to_come[0] == token_id:
            if len(to_come) > 1:
                return state._replace(num_ending=state.num_ending + 1)
            return self._ended(state.num)
        written = self._marks.get(token_id)
        if written is None:
            written = self._tokenizer.decode_bytes([token_id])
            if written.startswith(_SPECIAL):
                written = b""  # it is not shown
        tail = state.tail + written
        if state.phase is _Phase.WITHIN:
            if any(tail.find(end) >= 0 for end in self._ends):
                return self._ended(state.num)
            return ThoughtState(_Phase.WITHIN, state.num + 1, 0, tail[-self._num_kept :])
        if self._recurs:
            if any(tail.find(begin) >= 0 for begin in self._begins):
                return ThoughtState(_Phase.WITHIN, state.num)
            return state._replace(tail=tail[-self._num_kept :])
        tail = tail.lstrip()
        if tail.startswith(self._begins):
            return ThoughtState(_Phase.WITHIN, state.num)
        may_begin = any(begin.startswith(tail) for begin in self._begins)
        return ThoughtState(_Phase.BEFORE if may_begin else _Phase.OVER, state.num, 0, tail)

    def _ended(self, num: int) -> ThoughtState:
        return ThoughtState(_Phase.BEFORE if self._recurs else _Phase.OVER, num)


thought_rules = lru_cache(maxsize=64)(ThoughtRules)  # a request's branches share one


def _is_cut(text: bytes) -> bool:
    """Whether a text ends within a character."""
    for size, byte in enumerate(text[:-_NUM_WHOLE:-1], 1):
        if byte >> 6 != 0b10:  # the first byte of a character
            return byte >= 0b11000000 and size < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
