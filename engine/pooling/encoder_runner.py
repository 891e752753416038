"""The device's part of a step where the model is an encoder: texts in, numbers out."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from penstock.engine.batch import Batch, BatchResult
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigError
from penstock.engine.lora.slots import NO_ADAPTERS
from penstock.engine.pooling.encoder import Encoder
from penstock.engine.pooling.pooler import PooledSequence, PooledSpan, Pooler, Vectors, activated
from penstock.engine.pooling.settings import ModelPooling
from penstock.engine.request import FinishReason
from penstock.engine.runner.device import resolve_max_model_len, select_device
from penstock.engine.runner.kv_swap import NoBlockBytes
from penstock.engine.runner.model_runner import Progress, RunnerInfo
from penstock.engine.structured_outputs.compiler import GrammarCompiler


class EncoderRunner:
    """The device's part of a step with an encoder, which has no KV. Policy counts blocks all the
    same, with which it bounds the texts of a step; there is no memory behind them.

    Raises:
        ModelLoadError: the model's files are invalid.
        ConfigError: the settings do not fit the model.
    """

    def __init__(self, config: EngineConfig, model_path: Path, *, pooling: ModelPooling) -> None:
        if config.device.deterministic:
            raise ConfigError("--deterministic is not supported for an encoder")
        speculation = config.scheduler.speculation
        if speculation is not None and speculation.method != "auto":
            raise ConfigError("--speculative-config needs a model that generates")
        if config.lora.enable_lora:
            raise ConfigError("--enable-lora is not supported for an encoder")
        self.adapters, self.block_bytes = NO_ADAPTERS, NoBlockBytes()
        device = select_device(config.device)
        self._encoder = encoder = Encoder(config.model, model_path, pooling, device)
        self._pooling = pooling
        self._pooler = Pooler(pooling)
        self.progress = Progress(encoder.module, device, None, layers=torch.nn.Linear)
        self.grammars = GrammarCompiler(model_path, vocab_size=encoder.vocab_size, eos_token_ids=())
        max_model_len = resolve_max_model_len(config.model, encoder.context_len)
        block_size = config.cache.block_size
        self.info = RunnerInfo(
            max_model_len=max_model_len,
            vocab_size=encoder.vocab_size,
            num_blocks=config.scheduler.max_num_seqs * -(-max_model_len // block_size) * 2,
            block_size=block_size,
            num_host_blocks=0,
            bytes_per_block=0,
            block_move_s=0.0,
            needs_prompt_lens=False,
            dtype=str(encoder.dtype).removeprefix("torch."),
            kv_cache_dtype="none",
            kv_layout="none",
            quantization="none",
            weight_bytes=encoder.weight_bytes,
            async_scheduling=False,
            device=str(device),
            num_threads=torch.get_num_threads(),
        )

    @torch.inference_mode()
    def execute(self, batch: Batch) -> BatchResult:
        """Run one step, which has whole texts only."""
        began_s = time.perf_counter()
        entries = [item.entry for item in batch.scheduled]
        texts = [entry.token_ids for entry in entries if entry is not None]
        params = [each.pooling for each in entries if each is not None and each.pooling is not None]
        assert len(texts) == len(params) == len(entries), "a text in parts"
        seq_ids = [item.seq_id for item in batch.scheduled]
        vectors: dict[int, bytes] = {}
        spoilt: list[int] = []
        for numbers, hidden in self._encoder(texts, [each.num_first_tokens for each in params]):
            if "embed" not in self._pooling.tasks:
                scores = activated(hidden.double(), self._pooling.activation)
                found = Vectors([seq_ids[number] for number in numbers], scores.float())
            else:
                spans, first_row = [], 0
                for number in numbers:
                    num_rows = len(texts[number])
                    spans.append(
                        PooledSpan(
                            seq_id=seq_ids[number],
                            first_row=first_row,
                            num_rows=num_rows,
                            start=0,
                            is_last=True,
                            sequence=PooledSequence(params[number]),
                        )
                    )
                    first_row += num_rows
                pooled = self._pooler.pool(spans, hidden)
                assert pooled is not None
                found = pooled
            read, failed = found.read()
            vectors |= read
            spoilt += failed
        return BatchResult(
            step=batch.step,
            token_ids={},
            vectors=vectors,
            ended_seq_ids=dict.fromkeys(spoilt, FinishReason.ERROR),
            compute_s=time.perf_counter() - began_s,
        )
