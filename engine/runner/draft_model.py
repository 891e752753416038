"""A draft model: a smaller model of the same vocabulary that guesses the next tokens.

It draws each guess as the target would draw that token (the same seed, index and position), so the
two agree about random tokens too wherever their distributions do. The target then checks all
guesses at once (`penstock.engine.speculative`).

Its keys and values are in a pool of their own that has the target's block ids, so that whatever
moves, copies or shares a block does so in both. It computes prompts together with the target, and
output tokens only when it is to guess what follows them. So a block's content may lag behind here,
which `_num_known` counts.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from penstock.engine.batch import Batch
from penstock.engine.models.backends import run_step
from penstock.engine.models.language_model import LanguageModel
from penstock.engine.runner.input_batch import InputBatch, StepInputs
from penstock.engine.runner.kv_swap import HostTier, NoHostTier
from penstock.engine.sampling.sampler import Sampler


class NoDraftModel:
    """Stands in for `DraftModel` where there is none."""

    weight_bytes = 0

    def update(self, batch: Batch) -> None:
        """Nothing to move."""

    def propose(self, batch: Batch) -> None:
        assert not any(item.num_wanted_drafts for item in batch.scheduled), "no draft model"

    def follow(self, batch: Batch, inputs: StepInputs) -> None:
        """Nothing to compute."""

    def settle(self, seq_ids: Sequence[int]) -> None:
        """Nothing to keep."""


NO_DRAFT_MODEL = NoDraftModel()


class DraftModel:
    """
    Args:
        pool: its keys and values, as many blocks as the target's pool has.
        host_tier: of this pool, as many blocks as the target's host tier has.
        batch: the sequences on the device.
        max_num_tokens: of one forward pass.
        vocab_size: of the two models, the smaller.
    """

    def __init__(
        self,
        model: LanguageModel,
        pool: Tensor,
        host_tier: HostTier | NoHostTier,
        batch: InputBatch,
        sampler: Sampler,
        *,
        max_num_tokens: int,
        vocab_size: int,
    ) -> None:
        self._model, self._pool, self._host_tier = model, pool, host_tier
        self._batch, self._sampler = batch, sampler
        self._max_num_tokens = max_num_tokens
        self._max_token_id = vocab_size - 1
        self._block_size = pool.shape[3]
        # Of each block: how many of its first tokens have keys and values here.
        self._num_known = np.zeros(pool.shape[2], dtype=np.int64)
        self._num_known_on_host = np.zeros(host_tier.num_blocks, dtype=np.int64)
        self._num_computed: dict[int, int] = {}  # by seq_id, as far as it was looked up
        self._proposed: dict[int, int] = {}  # the same, with guesses not checked yet

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    def update(self, batch: Batch) -> None:
        """Follow the batch's moves, and what its sequences' tables hold now."""
        self._host_tier.execute(batch.moves)
        known, on_host = self._num_known, self._num_known_on_host
        for pairs, sources, destinations in (
            (batch.moves.swap_outs, known, on_host),
            (batch.moves.swap_ins, on_host, known),
            (batch.moves.copies, known, known),
        ):
            if pairs:
                froms, tos = (list(column) for column in zip(*pairs, strict=True))
                destinations[tos] = sources[froms]
        for seq_id in batch.left_seq_ids:
            self._num_computed.pop(seq_id, None)
        for item in batch.scheduled:
            block_ids = item.new_block_ids
            if item.entry is not None:
                self._num_computed[item.seq_id] = 0
                num_full, num_more = divmod(item.entry.num_computed_tokens, self._block_size)
                if num_more:
                    block_id = block_ids[num_full]
                    known[block_id] = min(known[block_id], num_more)
                block_ids = block_ids[num_full + (num_more > 0) :]
            if block_ids:
                known[list(block_ids)] = 0

    def propose(self, batch: Batch) -> None:
        """Guess as many tokens as each item of the batch wants."""
        wanted = {
            item.seq_id: item.num_wanted_drafts
            for item in batch.scheduled
            if item.num_wanted_drafts
        }
        if not wanted:
            return
        ends = {seq_id: self._catch_up(seq_id, len(wanted)) for seq_id in wanted}
        for number in range(max(wanted.values())):
            spans = {
                seq_id: (ends[seq_id], len(self._batch.token_ids(seq_id)))
                for seq_id, num_wanted in wanted.items()
                if num_wanted > number
            }
            for seq_id, guess in zip(spans, self._draw(self._inputs(spans)), strict=True):
                ends[seq_id] = spans[seq_id][1]
                self._batch.token_ids(seq_id).append(guess)
        for item in batch.scheduled:
            if item.num_wanted_drafts:  # the batch appends them where it expects drafts
                token_ids = self._batch.token_ids(item.seq_id)
                item.draft_token_ids = tuple(token_ids[-item.num_wanted_drafts :])
                del token_ids[-item.num_wanted_drafts :]
        self._proposed |= ends

    def follow(self, batch: Batch, inputs: StepInputs) -> None:
        """Compute the prompts of a step here too.

        Args:
            inputs: of the target.
        """
        context = inputs.context
        lacks_lens = self._model.needs_prompt_lens and context.prompt_lens is None
        if inputs.drafts or context.layout.max_query_len == 1 or lacks_lens:
            return  # it catches up when it is to guess
        self._forward(inputs)
        for item in batch.scheduled:
            end = self._batch.num_computed(item.seq_id)
            if self._count(item.seq_id) >= end - item.num_new_tokens:
                self._note(item.seq_id, end)

    def settle(self, seq_ids: Sequence[int]) -> None:
        """Keep what was computed for guesses of these sequences that were right."""
        for seq_id in seq_ids if self._proposed else ():
            end = self._proposed.pop(seq_id, None)
            if end is not None and seq_id in self._num_computed:  # it has not left
                self._note(seq_id, min(end, len(self._batch.token_ids(seq_id)) - 1))

    def _catch_up(self, seq_id: int, num_sequences: int) -> int:
        """Compute a sequence's tokens, until a pass may contain those that are left; how many have
        been computed."""
        num_computed, num_tokens = self._count(seq_id), len(self._batch.token_ids(seq_id))
        most = self._max_num_tokens // num_sequences
        while num_tokens - num_computed > most:
            end = num_computed + most
            self._forward(self._inputs({seq_id: (num_computed, end)}))
            self._note(seq_id, end)
            num_computed = end
        return num_computed

    def _count(self, seq_id: int) -> int:
        """How many of a sequence's first tokens, except the newest, have keys and values here."""
        count, size = self._num_computed[seq_id], self._block_size
        block_ids = self._batch.block_ids(seq_id)
        for number in range(count // size, len(block_ids)):
            num_known = int(self._num_known[block_ids[number]])
            count = max(count, number * size + num_known)
            if num_known < size:
                break
        count = min(count, len(self._batch.token_ids(seq_id)) - 1)
        self._num_computed[seq_id] = count
        return count

    def _note(self, seq_id: int, end: int) -> None:
        """The tokens before `end` have keys and values."""
        first, size = self._num_computed[seq_id] // self._block_size, self._block_size
        last = -(-end // size)
        block_ids = self._batch.block_ids(seq_id)[first:last]
        if len(block_ids):
            self._num_known[block_ids] = size
            self._num_known[block_ids[-1]] = end - (last - 1) * size
        self._num_computed[seq_id] = end

    def _inputs(self, spans: dict[int, tuple[int, int]]) -> StepInputs:
        return self._batch.inputs_of(
            spans, self._pool, needs_prompt_lens=self._model.needs_prompt_lens
        )

    def _forward(self, inputs: StepInputs) -> None:
        self._model(self._known(inputs.input_ids), replace(inputs.context, kv_pool=self._pool))

    def _draw(self, inputs: StepInputs) -> Sequence[int]:
        """The token after each span."""
        sampling = inputs.sampling
        output = run_step(
            self._model,
            self._known(inputs.input_ids),
            inputs.context,
            inputs.sampled_tokens,
            sampling.parameters,
            sampling.draws,
        )
        if output.drawn is not None:
            token_ids, _ = output.drawn.read()
        else:
            plain = replace(sampling, changed={}, num_tops={}, masks=None)
            token_ids = self._sampler.choose(output.logits, plain).read().token_ids
        return [min(token_id, self._max_token_id) for token_id in token_ids]

    def _known(self, token_ids: Tensor) -> Tensor:
        """Token ids that both models have."""
        return token_ids.clamp(max=self._max_token_id)
