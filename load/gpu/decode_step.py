"""The engine's decode step, compared with reading weights and KV once at copy bandwidth.

The engine's own mode runs at every batch; others show the effect of graphs, overlap and
determinism. The model is only a `config.json`: its weights follow from a seed.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.models.registry import read_model_config
from penstock.engine.protocol.messages import EngineInfo
from penstock.engine.startup import build_core
from penstock.load.engine_runs import make_requests, run_requests
from penstock.load.gpu.bench import COPY, Bench, DecodeSizes
from penstock.load.machine import frozen_garbage

_FIGURE = "decode_step_of_roofline"
_SECTION = "decode_step"
_MAX_BATCHED_TOKENS = 8192
OWN_MODE = "graphs"


@dataclass(frozen=True, slots=True)
class Mode:
    """How a step is run."""

    device: Mapping[str, Any] = field(default_factory=dict)  # of `DeviceConfig`
    max_steps_in_flight: int | None = None  # None: the engine's choice


# The engine's own first: the bar is of that.
MODES: Mapping[str, Mode] = {
    OWN_MODE: Mode(),
    "eager": Mode({"cudagraph_mode": "none"}),
    "graphs, one step at a time": Mode(max_steps_in_flight=1),
    "deterministic": Mode({"deterministic": True}),
}


def measure(bench: Bench) -> None:
    """The engine's own mode at every batch gives the figure; others run at the smallest and
    largest."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(bench.sizes.model), encoding="utf-8")
        shares = {mode: _measure_mode(bench, folder, mode) for mode in MODES}
    num_cells = len(bench.sizes.decode.batches)
    bench.results.conclude(_FIGURE, shares[OWN_MODE], num_cells=num_cells)


def num_weights_read(path: Path) -> int:
    """Numbers of the weights that a step must read: all but the embedding, which is looked up."""
    _, config = read_model_config(path)
    query, kv = (count * config.head_dim for count in (config.num_heads, config.num_kv_heads))
    attention = config.hidden_size * 2 * (query + kv)
    mlp = 3 * config.hidden_size * config.intermediate_size
    layer = attention + mlp + 2 * config.hidden_size
    return config.num_layers * layer + config.hidden_size * (config.vocab_size + 1)


def roofline_s(info: EngineInfo, *, batch: int, context: float, bytes_per_s: float) -> float:
    """Seconds to read the weights once and each sequence's KV once."""
    itemsize = 4 if info.dtype == "float32" else 2
    kv_bytes = batch * context * info.bytes_per_block / info.block_size
    return (num_weights_read(Path(info.model_path)) * itemsize + kv_bytes) / bytes_per_s


def _measure_mode(bench: Bench, model: str, mode: str) -> list[float]:
    """The roofline share of every batch that is in time."""
    sizes = bench.sizes.decode
    batches = sizes.batches if mode == OWN_MODE else (sizes.batches[0], sizes.batches[-1])
    if bench.remaining_s <= 0:  # no time to load it either
        bench.results.add_note(f"{_SECTION}: no time left for {mode}")
        return []
    core, info = build_core(_config(model, sizes, bench, MODES[mode]))
    try:
        return [
            _add_row(bench, info, mode, batch, _step_s(core, info, batch, sizes))
            for batch in bench.in_time(_SECTION, batches)
        ]
    finally:
        core.close()
        del core
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _step_s(core: EngineCore, info: EngineInfo, batch: int, sizes: DecodeSizes) -> float:
    """The median of the steps in which every sequence gets a token."""
    rng = random.Random(batch)
    lengths = (sizes.prompt_tokens, sizes.output_tokens)
    for _ in range(2):  # kernels are compiled, and pools filled, in the first
        requests = make_requests(batch, *lengths, vocab_size=info.vocab_size, rng=rng)
        with frozen_garbage():
            run = run_requests(core, requests)
    return statistics.median(step.step_s for step in run.phase("decode"))


def _add_row(bench: Bench, info: EngineInfo, mode: str, batch: int, step_s: float) -> float:
    """Note a cell; return its share of the roofline."""
    sizes, rate = bench.sizes.decode, bench.results.ceilings[COPY]
    context = sizes.prompt_tokens + sizes.output_tokens / 2  # on average
    bound_s = roofline_s(info, batch=batch, context=context, bytes_per_s=rate)
    row = {"mode": mode, "batch": batch, "context": context, "step_ms": 1e3 * step_s}
    row |= {"roofline_ms": 1e3 * bound_s, "of_roofline": bound_s / step_s}
    bench.results.add_row(_SECTION, row)
    return bound_s / step_s


def _config(model: str, sizes: DecodeSizes, bench: Bench, mode: Mode) -> EngineConfig:
    """An engine with room for the largest batch and no more."""
    block_size = bench.sizes.attention.block_size
    num_tokens = sizes.prompt_tokens + sizes.output_tokens
    blocks_per_seq = -(-num_tokens // block_size) + 1
    return EngineConfig(
        model=ModelConfig(model=model, load_format="dummy", max_model_len=num_tokens),
        cache=CacheConfig(
            block_size=block_size,
            num_blocks=blocks_per_seq * (max(sizes.batches) + 1),
            swap_space=0,
            enable_prefix_caching=False,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=max(sizes.batches),
            max_num_batched_tokens=_MAX_BATCHED_TOKENS,
            max_steps_in_flight=mode.max_steps_in_flight,
        ),
        device=DeviceConfig(device=bench.device.type, **mode.device),  # type: ignore[arg-type]
    )
