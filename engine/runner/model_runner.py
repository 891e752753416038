"""One device's half of a step: `Batch` in, forward, sample, `BatchResult` out.

Charter of this file: only what every model and every request needs. The rarer a feature, the
further from here it lives; one that needs a line in `execute` has to earn it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.config import EngineConfig
from penstock.engine.models.loader import load_model
from penstock.engine.runner.device import select_device, settle_max_model_len
from penstock.engine.runner.input_batch import InputBatch
from penstock.engine.runner.kv_cache import KVShape, choose_num_blocks
from penstock.engine.runner.memory import available_bytes, check_fits
from penstock.engine.sampling.sampler import sample
from penstock.kernels.copy_blocks import copy_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerInfo:
    """What was settled at start: policy plans within it.

    Attributes:
        max_model_len: tokens of a sequence at most, prompt and output.
        num_blocks, block_size: the KV pool.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    dtype: str
    device: str


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
        self._model = load_model(config.model, model_path, self._device)
        self._eos_token_ids = eos_token_ids
        decoder, dtype = self._model.config, self._model.dtype
        max_model_len = settle_max_model_len(config.model, decoder)
        shape = KVShape.of(decoder, config.cache.block_size, dtype)
        num_blocks = choose_num_blocks(
            config.cache,
            shape,
            available_bytes=lambda: available_bytes(config, self._model, shape),
            max_model_len=max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
        )
        check_fits(num_blocks * shape.bytes_per_block, self._device)
        self._kv_pool = shape.allocate(num_blocks, self._device)
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
            dtype=str(dtype).removeprefix("torch."),
            device=str(self._device),
        )

    @torch.inference_mode()
    def execute(self, batch: Batch) -> BatchResult:
        """Run one step. Sequences whose last known token it computes get one more token."""
        self._batch.update(batch)
        copy_blocks(self._kv_pool, batch.moves.copies)
        if not batch.scheduled:
            return BatchResult(step=batch.step, token_ids={})
        inputs = self._batch.prepare(
            batch, self._kv_pool, needs_prompt_lens=self._model.needs_prompt_lens
        )
        hidden = self._model(inputs.input_ids, inputs.context)
        if not inputs.sampled_seq_ids:
            return BatchResult(step=batch.step, token_ids={})
        logits = self._model.logits(hidden[inputs.sampled_tokens])
        rows = self._batch.sampling_rows(inputs.sampled_seq_ids)
        sampled = dict(
            zip(inputs.sampled_seq_ids, sample(logits, rows, self._eos_token_ids), strict=True)
        )
        valid = {seq_id: item for seq_id, item in sampled.items() if item.is_valid}
        for seq_id, item in valid.items():
            self._batch.append(seq_id, item.token_id)
        return BatchResult(
            step=batch.step,
            token_ids={seq_id: (item.token_id,) for seq_id, item in valid.items()},
            logprobs={
                seq_id: (item.logprobs,)
                for seq_id, item in valid.items()
                if item.logprobs is not None
            },
            failed_seq_ids=tuple(seq_id for seq_id in sampled if seq_id not in valid),
        )
