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

from penstock.engine.batch import Batch
from penstock.engine.models.language_model import LanguageModel, StepOutput
from penstock.engine.runner.input_batch import InputBatch, StepInputs
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.speculative.device.draft_progress import DraftProgress, Spans


class DraftModel:
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
        self._model, self._batch, self._sampler = model, batch, sampler
        self._max_token_id = vocab_size - 1
        self._progress = DraftProgress(
            model.state_spec, kv_pool, num_host_blocks, batch, max_num_tokens=max_num_tokens
        )
        (self._pool,) = self._progress.pools
        self._proposed: dict[int, int] = {}  # how far, with guesses not checked yet

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    def update(self, batch: Batch) -> None:
        """Follow the batch's moves, and what its sequences' tables hold now."""
        self._progress.update(batch)

    def propose(self, batch: Batch) -> None:
        """Guess as many tokens as each item of the batch wants."""
        self._proposed |= self._progress.propose(batch, self._compute, self._draw)

    def follow(self, batch: Batch, inputs: StepInputs, _: StepOutput) -> None:
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
            if self._progress.count(item.seq_id) >= end - item.num_new_tokens:
                self._progress.note(item.seq_id, end)

    def settle(self, seq_ids: Sequence[int]) -> None:
        """Keep what was computed for guesses of these sequences that were right."""
        for seq_id in seq_ids if self._proposed else ():
            end = self._proposed.pop(seq_id, None)
            if end is not None and seq_id in self._progress:  # it has not left
                self._progress.note(seq_id, min(end, len(self._batch.token_ids(seq_id)) - 1))

    def _inputs(self, spans: Spans) -> StepInputs:
        return self._batch.inputs_of(
            spans, self._pool, needs_prompt_lens=self._model.needs_prompt_lens
        )

    def _forward(self, inputs: StepInputs) -> None:
        self._model(self._known(inputs.input_ids), replace(inputs.context, kv_pool=self._pool))

    def _compute(self, spans: Spans) -> None:
        self._forward(self._inputs(spans))

    def _draw(self, spans: Spans) -> Sequence[int]:
        """The token after each span."""
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
