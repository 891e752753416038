"""What a decode step reads of memory, and at what share of the rate that memory can be read at.

Weights are read once a step, whatever the number of sequences; keys and values once for each.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.engine.messages import EngineInfo
from penstock.engine.models.registry import read_model_config
from penstock.load.engine.runs import Lengths, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What a decode step has to read: each number once.

    Attributes:
        weights: all matrices. Norms, biases and scales are too few to count.
        kv: of all sequences, at the mean length they have while they decode. All of the past
            counts, of which a layer with a window would read less.
    """

    weights: int
    kv: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """How fast runs read memory.

    Attributes:
        rates: bytes a second, of each run's decode steps.
        ceilings: bytes a second that memory was read at just before each.
    """

    step_bytes: StepBytes
    rates: Sequence[float]
    ceilings: Sequence[float]

    @property
    def share(self) -> float:
        """Of the ceiling: the median over runs, each against its own."""
        pairs = zip(self.rates, self.ceilings, strict=True)
        return statistics.median(rate / ceiling for rate, ceiling in pairs)


def memory_use(info: EngineInfo, runs: Sequence[Run], ceilings: Sequence[float]) -> MemoryUse:
    """Of runs of equally many sequences."""
    step = step_bytes(info, runs[0].lengths, num_seqs=len(runs[0].tokens))
    times_s = [statistics.fmean(step.step_s for step in run.phase("decode")) for run in runs]
    rates = [(step.weights + step.kv) / time_s for time_s in times_s]
    return MemoryUse(step_bytes=step, rates=rates, ceilings=ceilings)


def step_bytes(info: EngineInfo, lengths: Lengths, *, num_seqs: int) -> StepBytes:
    mean_len = lengths.prompt_tokens + lengths.output_tokens / 2
    kv = num_seqs * mean_len * info.bytes_per_block / info.block_size
    return StepBytes(weights=_weight_bytes(info), kv=round(kv))


def _weight_bytes(info: EngineInfo) -> int:
    _, config = read_model_config(Path(info.model_path))
    itemsize: int = getattr(torch, info.dtype).itemsize
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * query + 2 * kv + 3 * config.intermediate_size)
    layers = config.num_layers * layer * (1 if info.quantization == "int8" else itemsize)
    return layers + config.vocab_size * config.hidden_size * itemsize
