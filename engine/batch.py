"""The interface between policy and device: one step's plan and its result.

Both are plain, picklable data without torch, so a batch can be sent to another rank. They are made
for every token, so they are structs, which takes no Python. A sequence is sent whole when it enters
or re-enters a device; afterwards only its id, its number of new tokens and its new block ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import msgspec

from penstock.engine.pooling.settings import PoolingParams
from penstock.engine.request import FinishReason, ImageInput, SamplingParams, TokenLogprobs


class SequenceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A whole sequence: everything the device needs when it enters or re-enters.

    Attributes:
        token_ids: prompt and output so far; every id is known (none in flight).
        num_prompt_tokens: how many of them are prompt.
        num_computed_tokens: how many already have KV in the blocks of this step's table.
        index: the branch of its request; part of the sampling draw.
        parent_seq_id: the sequence that it was forked from, if it is new.
        num_logprobs: None, or how many of the likeliest tokens to report with each sampled one
            (beam search needs more than a user may ask for).
        num_prompt_logprobs: the same for each prompt token that is computed.
        is_drafted: it may get drafts, so the tokens that its grammar forces may be of use.
        pooling: no token is drawn after it; its hidden states become a vector or a score.
        adapter: the digest of its adapter.
        images: those of the prompt, without their files.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    index: int
    params: SamplingParams
    parent_seq_id: int | None = None
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    is_drafted: bool = False
    pooling: PoolingParams | None = None
    adapter: str | None = None
    images: tuple[ImageInput, ...] = ()


class ScheduledSequence(msgspec.Struct, kw_only=True, gc=False):
    """One sequence's share of a step.

    The device computes tokens `num_computed_tokens … + num_new_tokens`. If that reaches the
    sequence's last token, it samples the next one and appends it to its own copy, where a later
    step may read it before policy has seen it.

    Attributes:
        new_block_ids: appended to the sequence's block table before the step.
        entry: set when the sequence enters or re-enters; its table then starts empty.
        draft_token_ids: guesses of the tokens after the last, the end of the new tokens. The device
            samples after each, and keeps what it sampled as long as the guesses before were right.
        num_wanted_drafts: how many of the new tokens the device's draft model is to guess instead;
            it stores them in `draft_token_ids`.
    """

    seq_id: int
    num_new_tokens: int
    new_block_ids: tuple[int, ...] = ()
    entry: SequenceEntry | None = None
    draft_token_ids: tuple[int, ...] = ()
    num_wanted_drafts: int = 0

    @property
    def num_drafts(self) -> int:
        return self.num_wanted_drafts or len(self.draft_token_ids)


class BlockMoves(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of whole blocks that run before the step's compute: pairs (source, destination),
    destinations distinct.

    The three kinds run in this order, and within a kind all sources are read before any destination
    is written: a block is saved before its content is replaced, and a block that was swapped in can
    be copied.

    Attributes:
        swap_outs: device block → host block.
        swap_ins: host block → device block.
        copies: device block → device block.
    """

    swap_outs: tuple[tuple[int, int], ...] = ()
    swap_ins: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.swap_outs or self.swap_ins or self.copies)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration's work.

    Attributes:
        scheduled: sequences in the order of their rows.
        left_seq_ids: sequences that finished, were aborted or preempted since the last batch;
            the device forgets them before it reads `scheduled`.
        wants_forced: the tokens that grammars force are of use: there is room to draft them.
        spares_core: of two cores one is left to the gateway, which has many tokens to send.
    """

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    left_seq_ids: tuple[int, ...] = ()
    moves: BlockMoves = BlockMoves()
    wants_forced: bool = False
    spares_core: bool = False

    @property
    def num_tokens(self) -> int:
        return sum(map(_NUM_NEW_TOKENS, self.scheduled))


_NUM_NEW_TOKENS = attrgetter("num_new_tokens")


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a step sampled.

    Attributes:
        token_ids: sequence id → 0…k new tokens (none while a prompt is still being computed).
        logprobs: sequence id → one entry per token, for the sequences that asked for them.
        ended_seq_ids: sequences without a next token, which have no entry in `token_ids` → why:
            `ERROR` if their logits are not a distribution (NaN, or everything masked), `STOP` or
            `GRAMMAR` if their grammar allows nothing more, whole or not.
        prompt_logprobs: sequence id → (position, entries): log-probabilities of the prompt tokens
            from `position` on that this step computed, for the sequences that asked for them.
        forced_token_ids: sequence id → tokens that its grammar leaves as the only way to go on, if
            any, for sequences that may get drafts. They are guesses: others may spell the same.
        vectors: sequence id → float32 numbers, lowest byte first, of the sequences with `pooling`
            whose last token this step computed.
        compute_s: seconds the step took without its swaps.
        masks_s: seconds that the masks of grammars took, `num_masks` of them.
        swap_out_s, swap_in_s: seconds that swaps took; where they overlap the compute, of the swaps
            that ended since the last result.
    """

    step: int
    token_ids: Mapping[int, tuple[int, ...]]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = msgspec.field(default_factory=dict)
    ended_seq_ids: Mapping[int, FinishReason] = msgspec.field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[int, tuple[TokenLogprobs, ...]]] = msgspec.field(
        default_factory=dict
    )
    forced_token_ids: Mapping[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    vectors: Mapping[int, bytes] = msgspec.field(default_factory=dict)
    compute_s: float = 0.0
    masks_s: float = 0.0
    num_masks: int = 0
    swap_out_s: float = 0.0
    swap_in_s: float = 0.0

    def result(self) -> BatchResult:
        """As the handle of its own step, which has ended."""
        return self
