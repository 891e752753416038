"""Masks of the tokens that the grammars of a step's sequences allow, and limits beside grammars.

A sequence's matcher is behind its newest token until the next step: then it takes the tokens that
came since (2 µs each), and writes a mask. A sequence that enters or re-enters the device takes its
output so far in the same way, so a swap, a recomputation, another engine or another gateway change
nothing; a fork copies its parent's matcher. For the masks after drafts it takes these too, and is
rolled back.

A grammar may begin only where an output writes a certain text, such as the mark of a call
(`LazyMatcher`). Until then any token may follow any other, and no masks are made: what a token
costs is to look at its bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.batch import ScheduledSequence, SequenceEntry
from penstock.engine.request import FinishReason, StructuredOutputs
from penstock.engine.sampling.thought_limit import ThoughtRules, ThoughtState, thought_rules
from penstock.engine.sampling.token_limits import AnyText, TokenLimits, limits_of
from penstock.engine.structured_outputs.compiler import GrammarCompiler
from penstock.kernels.token_masks import TokenMasks, mask_words

if TYPE_CHECKING:
    from llguidance import LLMatcher


_NUM_KEPT = 64  # tokens whose state is kept, for drafts that are taken back
_MAX_TAIL_BYTES = 256


class SequenceGrammar:
    """The grammar of one sequence on the device.

    Args:
        grammar: None: any text.
        token_ids: prompt and output so far; grows from step to step.
        num_prompt: how many of them are the prompt's.
        min_tokens: with fewer in the output, none of `end_token_ids` is allowed.
        never_token_ids: not allowed at all.
        limits: of the request.
        thoughts: how its thoughts are limited; None: not at all.
        is_beam: its likeliest allowed tokens are wanted, not a draw.
        is_drafted: `forced` is wanted.
    """

    __slots__ = (
        "_compiler",
        "_early_token_ids",
        "_grammar",
        "_kept",
        "_limits",
        "_matcher",
        "_never_token_ids",
        "_num_prompt",
        "_num_short",
        "_num_taken",
        "_thought",
        "_thoughts",
        "_token_ids",
        "is_beam",
        "is_drafted",
    )

    def __init__(
        self,
        compiler: GrammarCompiler,
        grammar: StructuredOutputs | None,
        token_ids: Sequence[int],
        num_prompt: int,
        *,
        min_tokens: int,
        end_token_ids: Sequence[int],
        never_token_ids: Sequence[int],
        is_beam: bool,
        is_drafted: bool = False,
        limits: TokenLimits | None = None,
        thoughts: ThoughtRules | None = None,
    ) -> None:
        self._compiler, self._grammar, self._limits = compiler, grammar, limits
        self._kept = None if grammar is None else compiler.compiled(grammar)
        self._thoughts = thoughts
        self._token_ids = token_ids
        self._num_prompt = num_prompt
        self._matcher: LLMatcher | AnyText | LazyMatcher
        self._thought: ThoughtState | None
        self._begin_again()
        self._num_short = num_prompt + min_tokens
        self._early_token_ids = (*end_token_ids, *never_token_ids)
        self._never_token_ids = never_token_ids
        self.is_beam, self.is_drafted = is_beam, is_drafted

    @classmethod
    def of(
        cls, entry: SequenceEntry, token_ids: Sequence[int], compiler: GrammarCompiler
    ) -> SequenceGrammar | None:
        """A new sequence's, from the beginning of its output; None: any token may come next."""
        params, vocab_size, eos = entry.params, compiler.vocab_size, compiler.eos_token_ids
        if not params.is_masked:
            return None
        has_grammar = params.structured_outputs is not None
        ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *eos)
        return cls(
            compiler,
            params.structured_outputs,
            token_ids,
            entry.num_prompt_tokens,
            min_tokens=params.min_tokens,
            end_token_ids=[each for each in ends if each < vocab_size],
            never_token_ids=[each for each in eos if each < vocab_size]
            if params.ignore_eos and has_grammar
            else (),
            is_beam=params.beam_search is not None,
            is_drafted=entry.is_drafted and (has_grammar or params.thought_limit is not None),
            limits=limits_of(params, vocab_size),
            thoughts=None
            if params.thought_limit is None or params.thinking_token_budget < 0
            else thought_rules(params.thought_limit, params.thinking_token_budget, compiler),
        )

    def _at_begin(self) -> LLMatcher | AnyText | LazyMatcher:
        """A matcher at the beginning of an output."""
        kept, grammar = self._kept, self._grammar
        if kept is None or grammar is None:
            return AnyText(self._compiler.vocab_size)
        if not grammar.triggers:
            return kept.matcher.deep_copy()
        begin, compiler = kept.matcher.deep_copy, self._compiler
        return LazyMatcher(grammar, begin, compiler.tokenizer, compiler.vocab_size)

    def _begin_again(self) -> None:
        self._matcher, self._num_taken = self._at_begin(), self._num_prompt
        self._thought = None if self._thoughts is None else self._thoughts.begin

    @property
    def is_idle_at_times(self) -> bool:
        """Whether there may be steps in which it allows every token."""
        is_lazy = isinstance(self._matcher, LazyMatcher | AnyText)
        return is_lazy and self._limits is None and not self.is_beam

    def needs_mask(self, num_known: int, drafts: Sequence[int]) -> bool:
        """Whether it may forbid a token now, or after drafts.

        Args:
            num_known: tokens before the drafts.
        """
        matcher = self._matcher
        if not self.is_idle_at_times:
            return True
        token_ids = self._token_ids
        num_unknown = 0  # to the host
        while num_known > self._num_taken and token_ids[num_known - 1] < 0:
            num_known -= 1
            num_unknown += 1
        self._advance(num_known)
        if (
            self._thoughts is not None
            and self._thought is not None
            and self._thoughts.may_restrict(self._thought, num_unknown + len(drafts))
        ):
            return True
        if not isinstance(matcher, LazyMatcher):
            return False
        known = [each for each in drafts if each >= 0]
        return matcher.is_active or matcher.would_begin(known)

    def changes(self, is_masked: bool, item: ScheduledSequence) -> bool:
        """Whether a step needs a mask where the one before had none, or the other way round."""
        return is_masked != self.needs_mask(len(self._token_ids), item.draft_token_ids)

    def fork(self, token_ids: Sequence[int]) -> SequenceGrammar:
        """For a sequence that begins with all tokens which this one's matcher has taken."""
        fork = object.__new__(SequenceGrammar)
        for name in self.__slots__:
            setattr(fork, name, getattr(self, name))
        fork._matcher, fork._token_ids = self._matcher.deep_copy(), token_ids
        return fork

    def write_masks(self, address: int, masks: npt.NDArray[np.uint32]) -> FinishReason | None:
        """Take the tokens that came since the last call, and write which may be next, a bit each.
        If there is none, why: `STOP` if the output is whole, else `GRAMMAR`.

        Args:
            address: of `masks`.
            masks: [1 + num_drafts, num_words]. As many of the last tokens are drafts; after the
                first mask, each is for what comes after one of them.
        """
        num_drafts = len(masks) - 1
        num_known = len(self._token_ids) - num_drafts
        self._advance(num_known)
        self._compute(address, masks[0])
        if self._matcher.is_error():
            self._start_again(address, masks[0], num_known)
        end = self._restrict(masks[0], num_known, self._thought)
        if num_drafts:
            self._write_after_drafts(address, masks, num_known)
        return end

    def forced(self) -> tuple[int, ...]:
        """Take the tokens that came since the last call; those that must come next, as the
        tokenizer would write their text. None while only the device knows the newest token."""
        if self._token_ids[-1] < 0:
            return ()
        self._advance(len(self._token_ids))
        if self._thoughts is not None and self._thought is not None:
            to_come = self._thoughts.to_come(self._thought)
            if to_come:
                return to_come
        if self._matcher.is_error() or self._matcher.is_stopped():
            return ()
        return tuple(self._matcher.compute_ff_tokens())

    def _write_after_drafts(
        self, address: int, masks: npt.NDArray[np.uint32], num_known: int
    ) -> None:
        """The masks from the second on; zeros from the first draft on that cannot be. A row with
        such a mask has no token: it is drawn again in the next step, if the drafts are right."""
        matcher, thought = self._matcher, self._thought
        masks[1:] = 0
        num_taken = 0
        for mask, token_id in zip(masks[1:], self._token_ids[num_known:], strict=True):
            if matcher.is_stopped() or not matcher.try_consume_tokens([token_id]):
                break
            num_taken += 1
            self._compute(address + num_taken * mask.nbytes, mask)
            if matcher.is_error():
                mask[:] = 0
                break
            if self._thoughts is not None and thought is not None:
                thought = self._thoughts.after(thought, (token_id,))
            self._restrict(mask, num_known + num_taken, thought)
        if matcher.is_error() or not (num_taken == 0 or matcher.rollback(num_taken)):
            self._begin_again()

    def _advance(self, num_tokens: int) -> None:
        if num_tokens > self._num_taken:
            new = list(self._token_ids[self._num_taken : num_tokens])
            self._matcher.consume_tokens(new)
            if self._thoughts is not None and self._thought is not None:
                self._thought = self._thoughts.after(self._thought, new)
            self._num_taken = num_tokens

    def _compute(self, address: int, mask: npt.NDArray[np.uint32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(address, mask.nbytes)
        if self._kept is not None:
            self._kept.num_masks += 1

    def _restrict(
        self, mask: npt.NDArray[np.uint32], num_tokens: int, thought: ThoughtState | None
    ) -> FinishReason | None:
        """Take out of a mask what its sequence of so many tokens may not have; why it has no next
        token, if that leaves none."""
        is_short = num_tokens < self._num_short
        banned = self._early_token_ids if is_short else self._never_token_ids
        is_stopped = self._matcher.is_stopped()
        if self._thoughts is not None and thought is not None and not is_stopped:
            is_forced = self._thoughts.restrict(mask, thought)
            if is_forced:  # no list of the request's forbids the tokens that end a thought
                return None
        if not (is_stopped or banned or self._limits):
            return None
        is_whole = self._matcher.is_accepting() and not self._matcher.is_error()
        if is_stopped and not is_whole:
            mask[:] = 0  # llguidance would allow the end
        for token_id in banned:
            mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        if self._limits is not None:
            self._limits.restrict(mask, self._token_ids, self._num_prompt, num_tokens)
        if mask.any():
            return None
        return FinishReason.STOP if is_whole else FinishReason.GRAMMAR

    def _start_again(self, address: int, mask: npt.NDArray[np.uint32], num_tokens: int) -> None:
        """Matchers of a grammar share a lexer. What it has found so far counts for the limits of
        all of them, and helps all of them: so try it again, and then with another lexer."""
        assert self._grammar is not None
        for stale in (None, self._kept):
            self._kept = self._compiler.compiled(self._grammar, stale=stale)
            self._begin_again()
            self._advance(num_tokens)
            self._compute(address, mask)
            if not self._matcher.is_error():
                return


class GrammarMasks:
    """Memory for the masks of a step. It is kept, so that a recorded program may point to it.

    Args:
        max_num: most masks of a step.
    """

    def __init__(self, max_num: int, vocab_size: int, device: torch.device) -> None:
        num_words = mask_words(vocab_size)
        is_cuda = device.type == "cuda"
        self._bits = torch.zeros(max_num, num_words, dtype=torch.int32, pin_memory=is_cuda)
        self._words: npt.NDArray[Any] = self._bits.numpy().view(np.uint32)
        self._address, self._row_bytes = self._bits.data_ptr(), num_words * 4
        self.on_device = torch.empty_like(self._bits, device=device) if is_cuda else self._bits

    def __len__(self) -> int:
        return len(self._bits)

    def write(self, number: int, grammar: SequenceGrammar, num: int = 1) -> FinishReason | None:
        """Write `num` masks of a grammar from this number on (`SequenceGrammar.write_masks`)."""
        address = self._address + number * self._row_bytes
        return grammar.write_masks(address, self._words[number : number + num])

    def upload(self, num: int) -> None:
        """Have the device read the first masks as they are now."""
        if self.on_device is not self._bits:
            self.on_device[:num].copy_(self._bits[:num], non_blocking=True)


class StepMasks:
    """The masks of one step, or of successive steps with the same rows.

    Args:
        grammars: row → its sequence's; the other rows have none. The rows of a sequence with
            drafts follow each other.

    Attributes:
        masks: for `sample_tokens`; what they contain is known once they are filled.
        beam_rows: rows of beams.
        ends: rows that no token can follow → why.
        seconds: how long the last `fill` took.
    """

    def __init__(
        self, memory: GrammarMasks, grammars: Mapping[int, SequenceGrammar], num_rows: int
    ) -> None:
        indices = torch.full((num_rows,), -1, dtype=torch.int64)
        indices[list(grammars)] = torch.arange(len(grammars))
        bits = memory.on_device[: len(grammars)]
        self.masks = TokenMasks(bits, indices.to(bits.device, non_blocking=True))
        self.beam_rows = [row for row, each in grammars.items() if each.is_beam]
        self.ends: dict[int, FinishReason] = {}
        self.seconds = 0.0
        self._memory, self._num = memory, len(grammars)
        self._rows = [
            (grammar, [row for row, _ in items])
            for grammar, items in groupby(grammars.items(), key=itemgetter(1))
        ]

    def __len__(self) -> int:
        """Number of masks."""
        return self._num

    def fill(self) -> None:
        """Advance every grammar to its sequence's end, and write its masks."""
        started_s = time.perf_counter()
        self.ends = {}
        number = 0
        for grammar, rows in self._rows:
            end = self._memory.write(number, grammar, len(rows))
            if end is not None:
                self.ends[rows[0]] = end
            number += len(rows)
        self._memory.upload(self._num)
        self.seconds = time.perf_counter() - started_s

    def forced(self) -> dict[int, tuple[int, ...]]:
        """The first row of each sequence that may get drafts → the tokens that must come next, if
        any. The step's tokens must be known."""
        started_s = time.perf_counter()
        found = {rows[0]: grammar.forced() for grammar, rows in self._rows if grammar.is_drafted}
        self.seconds += time.perf_counter() - started_s
        return {row: token_ids for row, token_ids in found.items() if token_ids}


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
