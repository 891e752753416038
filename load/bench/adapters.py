"""`penstock bench adapters`: decoding with adapters beside decoding without, on the CPU.

Adapters of random numbers on all projections are written for the model. In turns, the same number
of streams runs in an engine without `--enable-lora`, and in one with it: without an adapter, with
one for all, and with a different one for each. A figure is the median of the ratios to the
neighbouring run without. Prefixes are not cached.

`--loads` measures what loading does to others instead: streams of the base model go on while that
many requests come one after the other, each with an adapter that is not in memory, so that one is
read and another one forgotten for each. The longest time between two tokens of a stream stands
beside that of the same requests for the base model, in turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
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
_ADDED_MS = 50  # to the longest time between two tokens, at most
_OTHER = "other"  # the id of the request beside the streams
_MAX_STREAM_TOKENS = 1500  # never reached: the other requests end first


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """The times between two tokens of streams, beside requests that load adapters and beside those
    that do not; `longest_ms` and what loading adds to it round by round."""

    num_seqs: int
    median_ms: float
    loading_median_ms: float
    longest_ms: Sequence[float]
    loading_longest_ms: Sequence[float]

    @property
    def added_ms(self) -> Sequence[float]:
        pairs = zip(self.longest_ms, self.loading_longest_ms, strict=True)
        return [new - old for old, new in pairs]

    @property
    def verdict(self) -> str:
        added_ms = statistics.median(self.added_ms)
        return f"{'held' if added_ms <= _ADDED_MS else 'missed'} ({_ADDED_MS})"


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
    add("--loads", type=positive, help="adapters to load beside streams; measures only that")
    add("--repeats", type=positive, default=7, help="timed rounds")
    add("--num-threads", type=positive, default=None, help="compute threads; default: one per core")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure all cases; print and write the table."""
    most = max(parsed.num_seqs)
    model = ModelConfig(model=parsed.model, dtype=parsed.dtype, quantization=parsed.quantization)
    if parsed.loads:
        return _run_loads(model, parsed)
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


def _run_loads(model: ModelConfig, parsed: argparse.Namespace) -> int:
    lora = LoraConfig(enable_lora=True, max_loras=1, max_lora_rank=parsed.rank)
    with tempfile.TemporaryDirectory() as folder:
        adapters = [
            _write(resolve_model(model, weights=True), Path(folder) / str(number), parsed.rank)
            for number in range(2)  # of which one is in memory
        ]
        with closing(_core(model, lora, parsed.num_threads)) as core, frozen_garbage():
            found = [
                _measure_gaps(core, adapters, num_seqs, parsed) for num_seqs in parsed.num_seqs
            ]
    median = statistics.median
    report = table_of(
        found,
        {
            "streams": lambda each: str(each.num_seqs),
            "median gap, ms": lambda each: f"{each.median_ms:.1f}",
            "while loading": lambda each: f"{each.loading_median_ms:.1f}",
            "longest of a round, ms": lambda each: f"{median(each.longest_ms):.1f}",
            "with loading": lambda each: f"{median(each.loading_longest_ms):.1f}",
            "added": lambda each: f"{median(each.added_ms):.1f}",
            "at most": lambda each: f"{max(each.added_ms):.1f}",
            "bar": lambda each: each.verdict,
        },
    )
    data = {
        "rank": parsed.rank,
        "model": Path(parsed.model).name,
        "loads": parsed.loads,
        "prompt_tokens": parsed.prompt_tokens,
        "cases": [asdict(each) for each in found],
    }
    title = f"Streams while adapters of rank {parsed.rank} are loaded"
    publish(parsed.out, "adapter-loads", title, report, data)
    return 0


def _measure_gaps(
    core: EngineCore, adapters: Sequence[Adapter], num_seqs: int, parsed: argparse.Namespace
) -> Gaps:
    none, by_turns = itertools.repeat(None), itertools.cycle(adapters)
    pairs = [
        (_gaps_s(core, num_seqs, none, parsed), _gaps_s(core, num_seqs, by_turns, parsed))
        for _ in range(parsed.repeats + 1)
    ][1:]  # the first warms up
    plain, loading = zip(*pairs, strict=True)
    return Gaps(
        num_seqs=num_seqs,
        median_ms=1e3 * statistics.median(itertools.chain(*plain)),
        loading_median_ms=1e3 * statistics.median(itertools.chain(*loading)),
        longest_ms=[1e3 * max(each) for each in plain],
        loading_longest_ms=[1e3 * max(each) for each in loading],
    )


def _gaps_s(
    core: EngineCore, num_seqs: int, given: Iterator[Adapter | None], parsed: argparse.Namespace
) -> list[float]:
    """The times between tokens of the base model's streams, while `--loads` requests of one token,
    with these adapters, come each after the end of the one before."""
    rng = random.Random(num_seqs)
    lengths = Lengths(prompt_tokens=parsed.prompt_tokens, output_tokens=_MAX_STREAM_TOKENS)
    streams = make_requests(num_seqs, lengths, vocab_size=1000, rng=rng)
    last_s: dict[str, float] = {}
    gaps_s: list[float] = []
    num_ended, is_one_running = 0, False
    for request in streams:
        core.add(request)
    while num_ended < parsed.loads:
        if len(last_s) == num_seqs and not is_one_running:
            [request] = make_requests(
                1, replace(lengths, output_tokens=1), vocab_size=1000, rng=rng
            )
            core.add(msgspec.structs.replace(request, request_id=_OTHER, adapter=next(given)))
            is_one_running = True
        outputs = core.step()
        now_s = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            if output.request_id == _OTHER:
                num_ended, is_one_running = num_ended + 1, False
            elif output.token_ids:
                if output.request_id in last_s:
                    gaps_s.append(now_s - last_s[output.request_id])
                last_s[output.request_id] = now_s
            if output.is_last and output.request_id != _OTHER:
                raise RuntimeError(f"a stream ended before {parsed.loads} adapters were loaded")
    for request in streams:
        core.abort(request.request_id)
    while core.has_work():
        core.step()
    return gaps_s


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
