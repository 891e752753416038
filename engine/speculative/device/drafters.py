"""Drafts by an EAGLE-3 head; which drafters there are on a device, and what each needs.

One is loaded before the pools are sized, since its own count, and made after them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.batch import ScheduledSequence
from penstock.engine.models.backends import fastest
from penstock.engine.models.language_model import StateSpec, StepOutput
from penstock.engine.models.loader import DraftingModel
from penstock.engine.runner.device import use_kv_dtype
from penstock.engine.runner.input_batch import InputBatch, StepInputs
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.speculative.device.draft_model import DraftModel
from penstock.engine.speculative.device.draft_progress import Drafter, Spans
from penstock.engine.speculative.device.eagle3_head import Eagle3Head
from penstock.kernels.cpu.library import CpuLibrary

_LAG = 1  # a position is computed with the token after it


class Eagle3Drafter(Drafter):
    """Drafts by an EAGLE-3 head (`eagle3_head`): it continues the target's hidden states.

    The features of all tokens are in a pool too, written in every step beside the target's keys and
    values. So whatever brings those back (a prefix hit, a swap, a copied block) brings the
    features, and the head can catch up with any sequence at any time. It computes prompts together
    with the target, and output tokens when it is to guess what follows them.

    The head's keys and values at a position depend on the token after it. Where sequences share a
    block and go on differently, those of the block's last position are the ones computed last: a
    guess of another sequence may be a little worse for it. Keys and values of guesses are computed
    again once the target has seen the tokens, since its own features are better than the head's.

    Args:
        kv_pool: the target's.
        num_host_blocks: of the target's host tier.
        batch: the sequences on the device.
        max_num_tokens: of one forward pass.
    """

    def __init__(
        self,
        head: Eagle3Head,
        kv_pool: Tensor,
        num_host_blocks: int,
        batch: InputBatch,
        sampler: Sampler,
        *,
        max_num_tokens: int,
    ) -> None:
        super().__init__(
            head.state_spec,
            kv_pool,
            num_host_blocks,
            batch,
            max_num_tokens=max_num_tokens,
            lag=_LAG,
            keeps_guesses=False,
        )
        self._head, self._sampler = head, sampler
        self._pool, features = self.pools
        self._features = features.view(2, -1, features.shape[-1])  # a half of each in each

    @property
    def weight_bytes(self) -> int:
        return self._head.weight_bytes

    def follow(
        self, scheduled: Sequence[ScheduledSequence], inputs: StepInputs, output: StepOutput
    ) -> None:
        layout = inputs.context.layout
        self._store(layout.slot_mapping, self._head.fuse(output.features))
        if inputs.drafts or layout.max_query_len == 1:
            return
        spans = {}
        for item in scheduled:
            start, end = self.count(item.seq_id), self._batch.num_computed(item.seq_id)
            is_next = start >= end - item.num_new_tokens - _LAG
            end = min(end, len(self._batch.token_ids(item.seq_id)) - _LAG)
            if is_next and start < end:
                spans[item.seq_id] = start, end
        if spans:
            self._compute(spans)
            for seq_id, (_, end) in spans.items():
                self.note(seq_id, end)

    def _compute(self, spans: Spans) -> None:
        self._forward(self._inputs(spans))

    def _draw(self, spans: Spans) -> Sequence[int]:
        inputs = self._inputs(spans)
        hidden, features = (each[inputs.sampled_tokens] for each in self._forward(inputs))
        # Of the next guess, until the target's own are there.
        slots = [self._batch.slot(seq_id, end) for seq_id, (_, end) in spans.items()]
        self._store(torch.tensor(slots), features)
        return (
            self._sampler.choose(self._head.logits(hidden), inputs.sampling.plain())
            .read()
            .token_ids
        )

    def _inputs(self, spans: Spans) -> StepInputs:
        return self._batch.inputs_of(
            spans, self._pool, needs_prompt_lens=self._head.needs_prompt_lens, lag=_LAG
        )

    def _forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        slots = inputs.context.layout.slot_mapping
        features = self._features[:, slots].transpose(0, 1).reshape(len(slots), -1)
        hidden: tuple[Tensor, Tensor] = self._head(inputs.input_ids, features, inputs.context)
        return hidden

    def _store(self, slots: Tensor, features: Tensor) -> None:
        """features [num_slots, hidden_size]"""
        self._features[:, slots] = features.view(len(slots), 2, -1).transpose(0, 1)


def draft_state_spec(model: DraftingModel | None, kv_dtype: torch.dtype) -> StateSpec:
    """What a drafter's pools hold, with keys and values in this dtype; an EAGLE-3 head's have its
    own."""
    if model is None:
        return ()
    if isinstance(model, Eagle3Head):
        return model.state_spec
    use_kv_dtype(model, kv_dtype)
    return model.state_spec


def make_drafter(
    model: DraftingModel | None,
    kv_pool: Tensor,
    num_host_blocks: int,
    batch: InputBatch,
    sampler: Sampler,
    library: CpuLibrary | None,
    *,
    max_num_tokens: int,
    vocab_size: int,
) -> Drafter | None:
    """None: there is no model that drafts.

    Args:
        model: loses its weights to the drafter.
        kv_pool: the target's.
        num_host_blocks: of the target's host tier.
        batch: the sequences on the device.
        max_num_tokens: of one forward pass.
        vocab_size: the target's.
    """
    if model is None:
        return None
    shared = (kv_pool, num_host_blocks, batch, sampler)
    if isinstance(model, Eagle3Head):
        return Eagle3Drafter(model, *shared, max_num_tokens=max_num_tokens)
    return DraftModel(
        fastest(model, kv_pool.shape[3], library),
        *shared,
        max_num_tokens=max_num_tokens,
        vocab_size=min(vocab_size, model.vocab_size),
    )
