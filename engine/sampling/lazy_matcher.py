"""A grammar that begins only where an output writes a certain text, such as the mark of a call.

Until then any token may follow any other, and no masks are made (`SequenceGrammar.needs_mask`):
what a token costs is to look at its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.engine.request import StructuredOutputs
from penstock.engine.sampling.token_limits import AnyText

if TYPE_CHECKING:
    from llguidance import LLMatcher

_NUM_KEPT = 64  # tokens whose state is kept, for drafts that are taken back
_MAX_TAIL_BYTES = 256


class _State(NamedTuple):
    """Before a token.

    Attributes:
        tail: the newest bytes of the output.
        is_thinking: within a thought, where no call begins.
        num: tokens that the grammar took.
    """

    tail: bytes
    is_thinking: bool
    num: int


class LazyMatcher:
    """What `SequenceGrammar` uses of a matcher.

    Args:
        grammar: with what it begins after.
        begin: a matcher at its beginning.
        tokenizer: llguidance's.
    """

    def __init__(
        self,
        grammar: StructuredOutputs,
        begin: Callable[[], LLMatcher],
        tokenizer: Any,
        vocab_size: int,
    ) -> None:
        self._begin, self._tokenizer = begin, tokenizer
        self._any = AnyText(vocab_size)
        self._triggers = [_mark(each) for each in grammar.triggers]
        self._thought = [_mark(each) for each in grammar.thought]
        marks = [*self._triggers, *self._thought]
        self._last_bytes = {each[-1] for each in marks if isinstance(each, bytes) and each}
        self._ids = {each for each in marks if isinstance(each, int)}
        self._state = _State(b"", grammar.is_thinking, 0)
        self._states: list[_State] = []
        self._matcher: LLMatcher | None = None
        self._is_off = False  # the output is nothing that the grammar knows

    def deep_copy(self) -> LazyMatcher:
        copy = object.__new__(LazyMatcher)
        copy.__dict__.update(self.__dict__)
        copy._states = list(self._states)
        copy._matcher = None if self._matcher is None else self._matcher.deep_copy()
        return copy

    @property
    def is_active(self) -> bool:
        return self._matcher is not None

    def would_begin(self, token_ids: Sequence[int]) -> bool:
        """Whether the grammar would begin within these tokens."""
        if not any(self._is_marked(each) for each in token_ids):
            return False
        copy = self.deep_copy()
        copy.consume_tokens(token_ids)
        return copy.is_active

    def consume_tokens(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            self._states.append(self._state)
            self._take(token_id)
        del self._states[:-_NUM_KEPT]
        return True

    def try_consume_tokens(self, token_ids: Sequence[int]) -> int:
        matcher = self._matcher
        if matcher is None:
            self.consume_tokens(token_ids)
            return len(token_ids)
        num = matcher.try_consume_tokens(list(token_ids))
        for _ in range(num):
            self._states.append(self._state)
            self._state = self._state._replace(num=self._state.num + 1)
        del self._states[:-_NUM_KEPT]
        return num

    def rollback(self, num: int) -> bool:
        if num > len(self._states):
            return False
        was, self._state = self._state, self._states[-num]
        del self._states[-num:]
        if self._matcher is None:
            return True
        if self._state.num == 0:
            self._matcher = None  # it had begun within them
            return True
        return bool(self._matcher.rollback(was.num - self._state.num))

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        if self._matcher is not None:
            self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
            if not self._matcher.is_error():
                return
            self._give_up()
        self._any.unsafe_compute_mask_ptr(address, num_bytes)

    def compute_ff_tokens(self) -> list[int]:
        return [] if self._matcher is None else list(self._matcher.compute_ff_tokens())

    def is_error(self) -> bool:
        return False

    def is_stopped(self) -> bool:
        return self._matcher is not None and self._matcher.is_stopped()

    def is_accepting(self) -> bool:
        return self._matcher is None or self._matcher.is_accepting()

    def _give_up(self) -> None:
        self._matcher, self._is_off = None, True

    def _is_marked(self, token_id: int) -> bool:
        """Whether a mark may end with this token."""
        if self._is_off:
            return False
        if self._matcher is not None or token_id in self._ids:
            return True
        return not self._last_bytes.isdisjoint(self._tokenizer.decode_bytes([token_id]))

    def _take(self, token_id: int) -> None:
        if self._is_off:
            return
        tail, is_thinking, num = self._state
        if self._matcher is not None:
            if not self._matcher.consume_token(token_id):
                self._give_up()
            self._state = _State(tail, is_thinking, num + 1)
            return
        written = self._tokenizer.decode_bytes([token_id])
        if token_id in self._ids:
            written = b""
            if token_id in self._thought:
                is_thinking = token_id == self._thought[0]
            elif not is_thinking:
                self._start([token_id])
        elif not self._last_bytes.isdisjoint(written):
            tail += written
            is_thinking, rest = self._looked_at(tail, len(written), is_thinking=is_thinking)
            if rest:
                self._start(self._tokenizer.tokenize_bytes(rest))
            written = b""
        tail = (tail + written)[-_MAX_TAIL_BYTES:]
        self._state = _State(tail, is_thinking, 1 if self._matcher is not None else 0)

    def _looked_at(self, tail: bytes, size: int, *, is_thinking: bool) -> tuple[bool, bytes]:
        """Whether the output is within a thought after the newest `size` bytes; and what of it the
        grammar is to take, if one of its marks ends there."""
        found = []
        for number, mark in enumerate((*self._thought, *self._triggers)):
            if isinstance(mark, bytes) and mark:
                at = tail.rfind(mark)
                if at >= 0 and at + len(mark) > len(tail) - size:
                    found.append((at, number))
        for at, number in sorted(found):
            if number < len(self._thought):
                is_thinking = number == 0
            elif not is_thinking:
                return is_thinking, tail[at:]
        return is_thinking, b""

    def _start(self, token_ids: Sequence[int]) -> None:
        self._matcher = self._begin()
        if not self._matcher.consume_tokens(list(token_ids)):
            self._give_up()


def _mark(mark: str | int) -> bytes | int:
    return mark if isinstance(mark, int) else mark.encode()
