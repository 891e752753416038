"""A draft model: a smaller model of the same vocabulary that guesses the next tokens.

It draws each guess as the target would draw that token (the same seed, index and position), so the
two agree about random tokens too wherever their distributions do. The target then checks all
guesses at once (`penstock.engine.speculative`).

It computes prompts together with the target, and output tokens only when it is to guess what
follows them (`draft_progress`).

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from penstock.engine.batch import ScheduledSequence
from penstock.engine.models.language_model import LanguageModel, StepOutput
from penstock.engine.runner.input_batch import InputBatch, StepInputs
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.speculative.device.draft_progress import Drafter, Spans


class DraftModel(Drafter):
    """
    Args:
        kv_pool: the target's.
        num_host_blocks: of the target's host tier.
        batch: the sequences on the device.
        max_num_tokens: of one forward pass.
        vocab_size: of the two models, the smaller.
    """

    def __init__(
        self,
        model: LanguageModel,
        kv_pool: Tensor,
        num_host_blocks: int,
        batch: InputBatch,
        sampler: Sampler,
        *,
        max_num_tokens: int,
        vocab_size: int,
    ) -> None:
        super().__init__(
            model.state_spec, kv_pool, num_host_blocks, batch, max_num_tokens=max_num_tokens
        )
        self._model, self._sampler = model, sampler
        self._max_token_id = vocab_size - 1
        (self._pool,) = self.pools

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    def follow(
        self, scheduled: Sequence[ScheduledSequence], inputs: StepInputs, _: StepOutput
    ) -> None:
        context = inputs.context
        lacks_lens = self._model.needs_prompt_lens and context.prompt_lens is None
        if inputs.drafts or context.layout.max_query_len == 1 or lacks_lens:
            return  # it catches up when it is to guess
        self._forward(inputs)
        for item in scheduled:
            end = self._batch.num_computed(item.seq_id)
            if self.count(item.seq_id) >= end - item.num_new_tokens:
                self.note(item.seq_id, end)

    def _inputs(self, spans: Spans) -> StepInputs:
        return self._batch.inputs_of(
            spans, self._pool, needs_prompt_lens=self._model.needs_prompt_lens
        )

    def _forward(self, inputs: StepInputs) -> None:
        self._model(self._known(inputs.input_ids), replace(inputs.context, kv_pool=self._pool))

    def _compute(self, spans: Spans) -> None:
        self._forward(self._inputs(spans))

    def _draw(self, spans: Spans) -> Sequence[int]:
        inputs = self._inputs(spans)
        sampling = inputs.sampling
        output = self._model.step(
            self._known(inputs.input_ids),
            inputs.context,
            inputs.sampled_tokens,
            sampling.parameters,
            sampling.draws,
        )
        if output.drawn is not None:
            token_ids, _ = output.drawn.read()
        else:
            token_ids = self._sampler.choose(output.logits, sampling.plain()).read().token_ids
        return [min(token_id, self._max_token_id) for token_id in token_ids]

    def _known(self, token_ids: Tensor) -> Tensor:
        """Token ids that both models have."""
        return token_ids.clamp(max=self._max_token_id)
