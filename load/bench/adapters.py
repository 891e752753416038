"""`penstock bench adapters`: decoding with adapters beside decoding without, on the CPU.

Adapters of random numbers on all projections are written for the model. In turns, the same number
of streams runs in an engine without `--enable-lora`, and in one with it: without an adapter, with
one for all, and with a different one for each. A figure is the median of the ratios to the
neighbouring run without. Prefixes are not cached.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from penstock.engine.config import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.lora.files import CONFIG_FILE, WEIGHTS_FILE, find_adapter
from penstock.engine.model_files import resolve_model
from penstock.engine.request import Adapter
from penstock.engine.startup import build_core
from penstock.load.engine_runs import Lengths, make_requests, run_requests
from penstock.load.machine import frozen_garbage
from penstock.load.report.options import add_out, counts, positive
from penstock.load.report.tables import publish, table_of

_KV_BYTES = 512 << 20
# The ratio that is wanted, by what the streams have.
_NO_ADAPTER, _ONE, _DIFFERENT = "no adapter", "one adapter", "different adapters"
_BARS = {_NO_ADAPTER: 0.98, _ONE: 0.94, _DIFFERENT: 0.75}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One case. Ratios are those to an engine without `--enable-lora`, run by run."""

    case: str
    num_seqs: int
    tokens_per_s: float
    plain_tokens_per_s: float
    ratio: float
    ratios: Sequence[float]

    @property
    def verdict(self) -> str:
        return f"{'held' if self.ratio >= _BARS[self.case] else 'missed'} ({_BARS[self.case]})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="demo", help="a directory, a Hub id, or demo")
    add("--dtype", default="auto", help="as for `penstock serve`")
    add("--quantization", default="none", help="as for `penstock serve`")
    add("--rank", type=positive, default=16, help="of the adapters")
    add("--num-seqs", type=counts, default="1,8", help="numbers of streams, comma-separated")
    add("--prompt-tokens", type=positive, default=32, help="tokens of a prompt")
    add("--output-tokens", type=positive, default=64, help="tokens of an output")
    add("--repeats", type=positive, default=7, help="timed rounds")
    add("--num-threads", type=positive, default=None, help="compute threads; default: one per core")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure all cases; print and write the table."""
    most = max(parsed.num_seqs)
    model = ModelConfig(model=parsed.model, dtype=parsed.dtype, quantization=parsed.quantization)
    with tempfile.TemporaryDirectory() as folder:
        adapters = [
            _write(resolve_model(model, weights=True), Path(folder) / str(number), parsed.rank)
            for number in range(most)
        ]
        lora = LoraConfig(enable_lora=True, max_loras=most, max_lora_rank=parsed.rank)
        plain = _core(model, LoraConfig(), parsed.num_threads)
        with_room = _core(model, lora, parsed.num_threads)
        with closing(plain), closing(with_room):
            for adapter in adapters:
                with_room.adapters.load(adapter)
            found = [
                figures
                for num_seqs in parsed.num_seqs
                for figures in _measure(plain, with_room, adapters, num_seqs, parsed)
            ]
    report = table_of(
        found,
        {
            "case": lambda each: each.case,
            "streams": lambda each: str(each.num_seqs),
            "tok/s without": lambda each: f"{each.plain_tokens_per_s:.1f}",
            "tok/s": lambda each: f"{each.tokens_per_s:.1f}",
            "ratio": lambda each: f"{each.ratio:.3f}",
            "bar": lambda each: each.verdict,
        },
    )
    data = {"rank": parsed.rank, "model": parsed.model, "cases": [asdict(each) for each in found]}
    publish(parsed.out, "adapters", f"Adapters of rank {parsed.rank}", report, data)
    return 0


def _core(model: ModelConfig, lora: LoraConfig, num_threads: int | None) -> EngineCore:
    core, _ = build_core(
        EngineConfig(
            model=model,
            cache=CacheConfig(
                kv_cache_memory_bytes=_KV_BYTES, enable_prefix_caching=False, swap_space=0
            ),
            device=DeviceConfig(device="cpu", num_threads=num_threads),
            lora=lora,
        )
    )
    return core


def _write(model: Path, path: Path, rank: int) -> Adapter:
    """An adapter of random numbers for every projection of a model."""
    generator = torch.Generator().manual_seed(int(path.name))
    matrices = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no mapping)
                shape = tensors.get_slice(name).get_shape()
                if not name.endswith("_proj.weight") or len(shape) != 2:
                    continue
                prefix = f"base_model.model.{name.removesuffix('.weight')}"
                for letter, size in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
                    numbers = 0.01 * torch.randn(size, generator=generator)
                    matrices[f"{prefix}.lora_{letter}.weight"] = numbers.to(torch.bfloat16)
    path.mkdir()
    save_file(matrices, path / WEIGHTS_FILE)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (path / CONFIG_FILE).write_text(json.dumps(config))
    return find_adapter(path.name, str(path))


def _measure(
    plain: EngineCore,
    with_room: EngineCore,
    adapters: Sequence[Adapter],
    num_seqs: int,
    parsed: argparse.Namespace,
) -> list[Figures]:
    lengths = Lengths(prompt_tokens=parsed.prompt_tokens, output_tokens=parsed.output_tokens)
    cases: dict[str, Sequence[Adapter | None]] = {
        _NO_ADAPTER: [None] * num_seqs,
        _ONE: [adapters[0]] * num_seqs,
    }
    if num_seqs > 1:
        cases[_DIFFERENT] = adapters[:num_seqs]
    rng = random.Random(num_seqs)

    def rate(core: EngineCore, given: Sequence[Adapter | None]) -> float:
        requests = make_requests(num_seqs, lengths, vocab_size=1000, rng=rng)
        adapted = [
            msgspec.structs.replace(request, adapter=adapter)
            for request, adapter in zip(requests, given, strict=True)
        ]
        return run_requests(core, adapted, lengths).decode_tokens_per_s

    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    with frozen_garbage():
        for number in range(parsed.repeats + 1):
            for name, given in cases.items():
                pair = rate(plain, [None] * num_seqs), rate(with_room, given)
                if number:  # the first warms up
                    rates[name].append(pair)
    return [
        Figures(
            case=name,
            num_seqs=num_seqs,
            plain_tokens_per_s=statistics.median(old for old, _ in pairs),
            tokens_per_s=statistics.median(new for _, new in pairs),
            ratio=statistics.median(new / old for old, new in pairs),
            ratios=[new / old for old, new in pairs],
        )
        for name, pairs in rates.items()
    ]
