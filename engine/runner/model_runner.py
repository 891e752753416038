"""One device's half of a step: `Batch` in, forward, sample, `BatchResult` out.

Charter of this file: only what every model and every request needs. The rarer a feature, the
further from here it lives; one that needs a line in `execute` has to earn it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.config import EngineConfig
from penstock.engine.models.fast_path import check_deterministic, cpu_kernels, fastest
from penstock.engine.models.loader import load_model
from penstock.engine.runner.device import select_device, settle_max_model_len
from penstock.engine.runner.input_batch import InputBatch
from penstock.engine.runner.kv_cache import KVShape
from penstock.engine.runner.memory import allocate_host_tier, allocate_pool
from penstock.engine.runner.timing import Stopwatch
from penstock.engine.sampling.prompt_logprobs import prompt_logprobs
from penstock.engine.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What was settled at start: policy plans within it.

    Attributes:
        max_model_len: tokens of a sequence at most, prompt and output.
        num_blocks, block_size: the KV pool.
        num_host_blocks: the host tier; 0 if there is none.
        block_move_s: seconds to move one block between the tiers, measured at start.
        needs_prompt_lens: KV depends on the prompt's length (dynamic NTK), not on tokens alone.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    num_host_blocks: int
    bytes_per_block: int
    block_move_s: float
    needs_prompt_lens: bool
    dtype: str
    device: str
    num_threads: int


class ModelRunner:
    """A model with its KV pool and the sequences it is working on.

    Args:
        model_path: the directory of the model's files.
        eos_token_ids: masked while a sequence has fewer than `min_tokens`.

    Raises:
        ModelLoadError: the model's files are at fault.
        ConfigError: the settings do not fit the model, the device or its memory.
    """

    def __init__(
        self, config: EngineConfig, model_path: Path, *, eos_token_ids: tuple[int, ...] = ()
    ) -> None:
        self._device = select_device(config.device)
        model = load_model(config.model, model_path, self._device)
        decoder, dtype = model.config, model.dtype
        max_model_len = settle_max_model_len(config.model, decoder)
        shape = KVShape.of(decoder, config.cache.block_size, dtype)
        self._kv_pool = allocate_pool(config, model, shape, max_model_len)
        self._host_tier = allocate_host_tier(config, shape, self._kv_pool)
        library = cpu_kernels(model, shape.block_size, num_threads=config.device.num_threads)
        if config.device.deterministic:
            check_deterministic(model, shape.block_size, library)
        self._sampler = Sampler(eos_token_ids, library=library)
        # Last: it takes the weights.
        self._model = fastest(model, shape.block_size, library, config.model.quantization)
        num_blocks = self._kv_pool.shape[2]
        self._batch = InputBatch(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_blocks=min(num_blocks, shape.num_blocks_for(max_model_len)),
            block_size=shape.block_size,
            device=self._device,
        )
        self.info = RunnerInfo(
            max_model_len=max_model_len,
            vocab_size=decoder.vocab_size,
            num_blocks=num_blocks,
            block_size=shape.block_size,
            num_host_blocks=self._host_tier.num_blocks,
            bytes_per_block=shape.bytes_per_block,
            block_move_s=self._host_tier.block_move_s,
            needs_prompt_lens=self._model.needs_prompt_lens,
            dtype=str(dtype).removeprefix("torch."),
            device=str(self._device),
            num_threads=self._model.num_threads,
        )

    @torch.inference_mode()
    def execute(self, batch: Batch) -> BatchResult:
        """Run one step. Sequences whose last known token it computes get one more token."""
        self._batch.update(batch)
        self._host_tier.execute(batch.moves)
        stopwatch = Stopwatch(self._device)
        result = self._compute(batch)
        compute_s = stopwatch.stop()
        swap_out_s, swap_in_s = self._host_tier.take_seconds()
        return replace(result, compute_s=compute_s, swap_out_s=swap_out_s, swap_in_s=swap_in_s)

    def _compute(self, batch: Batch) -> BatchResult:
        """The forward pass, and the tokens and log-probabilities that follow from it."""
        if not batch.scheduled:
            return BatchResult(step=batch.step, token_ids={})
        inputs = self._batch.prepare(
            batch, self._kv_pool, needs_prompt_lens=self._model.needs_prompt_lens
        )
        hidden = self._model(inputs.input_ids, inputs.context)
        at = inputs.sampled_tokens
        logits = self._model.logits(hidden if at is None else hidden[at])
        seq_ids = inputs.sampled_seq_ids
        sampled = self._sampler.choose(logits, inputs.sampling).read()
        # Of a failed one too: a step already planned may count on a token.
        self._batch.append(seq_ids, sampled.token_ids)
        rows = [row for row, is_valid in enumerate(sampled.is_valid) if is_valid]
        return BatchResult(
            step=batch.step,
            token_ids={seq_ids[row]: (sampled.token_ids[row],) for row in rows},
            logprobs={
                seq_ids[row]: (sampled.logprobs[row],) for row in rows if row in sampled.logprobs
            },
            failed_seq_ids=tuple(
                seq_id
                for seq_id, is_valid in zip(seq_ids, sampled.is_valid, strict=True)
                if not is_valid
            ),
            prompt_logprobs=prompt_logprobs(inputs.prompt_spans, hidden, self._model.logits),
        )
