"""The wall between policy and device: one step's plan and its result.

Everything that crosses is plain, picklable data without torch, so that a batch can be sent
to another rank as it is. A sequence is sent whole when it enters or re-enters a device;
afterwards only its id, its number of new tokens and its new block ids are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.engine.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEntry:
    """A sequence whole: all the device needs to know when it enters or re-enters.

    Attributes:
        token_ids: prompt and output so far; every id is known (none in flight).
        num_prompt_tokens: how many of them are prompt.
        num_computed_tokens: how many already have KV in the blocks of this step's table.
        index: the branch of its request; part of the sampling draw.
        num_logprobs: None, or the likeliest tokens to report beside each sampled one (a beam
            search wants more than a user may ask for).
        num_prompt_logprobs: the same for each prompt token this entry computes.
    """

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    index: int
    params: SamplingParams
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


@dataclass(slots=True, kw_only=True)  # not frozen: made for every token
class ScheduledSequence:
    """One sequence's share of a step.

    The device computes tokens `num_computed_tokens … + num_new_tokens` and, if that reaches
    the sequence's last token, samples the next one and appends it to its own copy: the input
    of a later step that policy has not seen yet.

    Attributes:
        new_block_ids: appended to the sequence's block table before the step.
        entry: set when the sequence enters or re-enters; its table then starts empty.
    """

    seq_id: int
    num_new_tokens: int
    new_block_ids: tuple[int, ...] = ()
    entry: SequenceEntry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMoves:
    """Copies of whole blocks, ordered before anything the step computes: pairs (source,
    destination), destinations distinct.

    The three kinds run in this order, and of each kind all sources are read before any destination
    is written: what is swapped out is saved before its block gets a new content, and what is
    swapped in can be copied.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One iteration's work.

    Attributes:
        scheduled: sequences in the order of their rows.
        left_seq_ids: sequences that finished, were aborted or preempted since the last batch;
            the device forgets them before it looks at `scheduled`.
    """

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    left_seq_ids: tuple[int, ...] = ()
    moves: BlockMoves = field(default_factory=BlockMoves)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_new_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What a step sampled.

    Attributes:
        token_ids: sequence id → 0…k new tokens (none while a prompt is still being computed).
        logprobs: the same keys for the sequences that asked for them, one entry per token.
        failed_seq_ids: sequences that were to get a token, but whose logits are no distribution
            (NaN, or everything masked); they have none in `token_ids`.
        prompt_logprobs: sequence id → (position, entries): of the prompt tokens at `position` and
            following, for the sequences that asked and computed what predicts them in this step.
        compute_s: seconds the step took without its swaps.
        swap_out_s, swap_in_s: seconds that swaps took; where they run beside the compute, those
            that ended since the last result.
    """

    step: int
    token_ids: Mapping[int, tuple[int, ...]]
    logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    failed_seq_ids: tuple[int, ...] = ()
    prompt_logprobs: Mapping[int, tuple[int, tuple[TokenLogprobs, ...]]] = field(
        default_factory=dict
    )
    compute_s: float = 0.0
    swap_out_s: float = 0.0
    swap_in_s: float = 0.0
