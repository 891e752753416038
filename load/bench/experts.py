"""`penstock bench experts`: a mixture of experts beside a dense model that reads as many bytes.

Both have random weights and the same attention; the dense MLP is as wide as a token's experts
together. So what differs is the work of choosing experts, sorting rows and combining outputs, and
for prompts that each expert's matrix multiplies few rows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.engine.config import (
    DTYPES,
    QUANTIZATIONS,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.startup import build_core
from penstock.engine.transport.messages import EngineInfo
from penstock.load.cpu_limits import read_weights
from penstock.load.engine_runs import Lengths, Run, make_requests, run_requests
from penstock.load.machine import frozen_garbage
from penstock.load.memory_rate import MemoryReader
from penstock.load.report.options import add_out, counts
from penstock.load.report.tables import publish, table

# Fields of `config.json`: a mixture in which sorting and choosing weigh much, and one that is used.
SHAPES: Mapping[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 4096, "num_experts": 64,
        "num_experts_per_tok": 4, "moe_intermediate_size": 512,
    },
    "qwen3-30b-a3b": {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
}  # fmt: skip
_CONTEXT = 8192
_COMMON = {"max_position_embeddings": _CONTEXT, "norm_topk_prob": True, "dtype": "bfloat16"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--shape", default="small", choices=SHAPES, help="sizes of the mixture")
    add("--num-layers", type=int, default=0, help="layers, if not the shape's own")
    add("--dtype", default="auto", choices=DTYPES, help="dtype of the weights")
    add("--quantization", default="none", choices=QUANTIZATIONS, help="of the weights")
    add("--num-threads", type=int, default=0, help="CPU threads; 0: the engine's choice")
    add("--num-seqs", type=counts, default="1", help="numbers of concurrent sequences")
    add("--prompt-tokens", type=int, default=512, help="prompt tokens per request")
    add("--output-tokens", type=int, default=64, help="output tokens per request")
    add("--repeats", type=int, default=3, help="runs of each model, in turn")
    add("--seed", type=int, default=0, help="seed of weights and prompts")
    add_out(parser)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Medians over the runs of one number of sequences."""

    num_seqs: int
    prefill_tokens_per_s: Mapping[str, float]
    decode_step_ms: Mapping[str, float]
    read_bytes: int  # for one token of the mixture

    @property
    def prefill_share(self) -> float:
        """The mixture's rate ÷ the dense model's."""
        return self.prefill_tokens_per_s["experts"] / self.prefill_tokens_per_s["dense"]

    @property
    def step_ratio(self) -> float:
        """The mixture's decode step ÷ the dense model's."""
        return self.decode_step_ms["experts"] / self.decode_step_ms["dense"]


def run(parsed: argparse.Namespace) -> int:
    """Measure both models in turn; print and write the table."""
    lengths = Lengths(prompt_tokens=parsed.prompt_tokens, output_tokens=parsed.output_tokens)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cores = {}
        for name, config in configs(SHAPES[parsed.shape], parsed.num_layers).items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
            cores[name] = build(folder / name, parsed)
            stack.callback(cores[name][0].close)
        mixture = cores["experts"][1]
        read_bytes = read_weights(mixture).num_bytes
        reader = stack.enter_context(MemoryReader(mixture.num_threads))
        stack.enter_context(frozen_garbage())
        memory = reader.measure()
        found = [
            measure(cores, lengths, count, read_bytes, parsed) for count in sorted(parsed.num_seqs)
        ]
    report = markdown(parsed, mixture, memory, found)
    data = {
        "weight_bytes": mixture.weight_bytes,
        "memory_bytes_per_s": memory,
        "cells": [
            asdict(each) | {"prefill_share": each.prefill_share, "step_ratio": each.step_ratio}
            for each in found
        ],
    }
    publish(parsed.out, "experts", "A mixture of experts", report, data)
    return 0


def configs(shape: Mapping[str, Any], num_layers: int) -> dict[str, dict[str, Any]]:
    """`config.json` of the dense model and of the mixture, in the order in which they are built:
    a dense model takes more room while it is quantized than it does afterwards."""
    mixture = {**_COMMON, **shape, "intermediate_size": shape["moe_intermediate_size"]}
    if num_layers:
        mixture["num_hidden_layers"] = num_layers
    width = shape["num_experts_per_tok"] * shape["moe_intermediate_size"]
    return {
        "dense": mixture | {"architectures": ["Qwen3ForCausalLM"], "intermediate_size": width},
        "experts": mixture | {"architectures": ["Qwen3MoeForCausalLM"]},
    }


def build(path: Path, parsed: argparse.Namespace) -> tuple[EngineCore, EngineInfo]:
    return build_core(
        EngineConfig(
            model=ModelConfig(
                model=str(path), load_format="dummy", dtype=parsed.dtype, seed=parsed.seed,
                quantization=parsed.quantization, max_model_len=_CONTEXT,
            ),
            cache=CacheConfig(enable_prefix_caching=False),
            scheduler=SchedulerConfig(),
            device=DeviceConfig(device="cpu", num_threads=parsed.num_threads or None),
        )
    )  # fmt: skip


def measure(
    cores: Mapping[str, tuple[EngineCore, EngineInfo]],
    lengths: Lengths,
    num_seqs: int,
    read_bytes: int,
    parsed: argparse.Namespace,
) -> Figures:
    """Runs of both models in turn, after one that warms up."""
    rng = random.Random(parsed.seed)
    runs: dict[str, list[Run]] = {name: [] for name in cores}
    for repeat in range(parsed.repeats + 1):
        for name, (core, info) in cores.items():
            requests = make_requests(num_seqs, lengths, vocab_size=info.vocab_size, rng=rng)
            done = run_requests(core, requests, lengths)
            if repeat:
                runs[name].append(done)
    return Figures(
        num_seqs=num_seqs,
        prefill_tokens_per_s={
            name: statistics.median(run.prefill_tokens_per_s for run in each)
            for name, each in runs.items()
        },
        decode_step_ms={
            name: 1e3 * statistics.median(_decode_steps_s(each)) for name, each in runs.items()
        },
        read_bytes=read_bytes,
    )


def _decode_steps_s(runs: Sequence[Run]) -> list[float]:
    return [step.step_s for run in runs for step in run.phase("decode")]


def markdown(
    parsed: argparse.Namespace, info: EngineInfo, memory: float, found: Sequence[Figures]
) -> str:
    header = (
        "sequences", "prefill tok/s", "dense", "share", "decode ms", "dense", "times", "tok/s",
    )  # fmt: skip
    rows = [
        [
            f"{each.num_seqs}",
            *(f"{each.prefill_tokens_per_s[name]:,.0f}" for name in ("experts", "dense")),
            f"{each.prefill_share:.2f}",
            *(f"{each.decode_step_ms[name]:.2f}" for name in ("experts", "dense")),
            f"{each.step_ratio:.2f}",
            f"{1e3 * each.num_seqs / each.decode_step_ms['experts']:,.1f}",
        ]
        for each in found
    ]
    first = found[0]
    rate = first.read_bytes / first.decode_step_ms["experts"] * 1e3
    return "\n\n".join(
        [
            f"{parsed.shape}, {info.dtype}, quantization {info.quantization}, CPU threads: "
            f"{info.num_threads}; {info.weight_bytes / 1e9:,.2f} GB of weights",
            table(header, rows),
            f"A token reads {first.read_bytes / 1e9:,.3f} GB of weights: {rate / 1e9:,.1f} GB/s "
            f"while decoding {first.num_seqs}, where memory was read at {memory / 1e9:,.1f} GB/s.",
        ]
    )
