"""`penstock bench engine`: the engine alone, and one setting compared with another.

Requests go through engine cores in this process, configured as by `penstock serve`; there is no
gateway. `--compare` names settings, which take turns with the same requests: machines drift, so a
ratio is the median of those of neighbouring runs. `--limits` shows how near a CPU comes to the most
that its memory and instructions allow.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.engine.config import DEMO_MODEL, QUANTIZATIONS, EngineConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError
from penstock.engine.protocol.messages import EngineInfo
from penstock.engine.request import Request
from penstock.engine.startup import build_core
from penstock.engine.text import Tokenizer
from penstock.gateway.launch.cli import parse_engine_config
from penstock.kernels.cpu.library import load_library
from penstock.load.engine_runs import Run, make_request, run_requests
from penstock.load.limits import Ceilings, ReadWeights
from penstock.load.machine import commit, frozen_garbage
from penstock.load.report.options import add_out, counts, positive, settings_of
from penstock.load.report.tables import publish, table_of
from penstock.load.workloads.options import add_dataset_arguments, make_dialogues

_WARM_UP_TOKENS = 8
_WARM_UP_SEED = 1 << 40
_NOTES = """\
tok/s: output tokens of a whole run; prefill: prompt tokens while not every sequence had its first
token; decode: while all sequences decode. Medians of the repeats. times: to the first setting,
medians of the ratios of neighbouring runs; by CPU: the same of this thread's CPU time, and where
95% of medians would be. tokens a step: of each sequence while decoding; more
than one with drafts. Python, policy: median CPU time of a decode step beside the kernels in C, and
beside the device. same: outputs that are the first setting's."""
_LIMITS_NOTE = """\
At most: tokens a second by the time to read the matrices once, or to multiply, whichever is longer.
KV, attention, norms and the rounding of inputs are not in it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a model is run: what somebody wrote, and the options of `serve` that it stands for."""

    name: str
    words: Sequence[str]

    @classmethod
    def parse(cls, text: str) -> Setting:
        """A command line of `serve` (`--quantization int8 --kv-cache-dtype int8`), or in short its
        options without hyphens, comma-separated (`int8,kv-cache-dtype=int8`): the name of a
        quantization stands for it, `no-…` turns off, and `gguf=FILE` is another model or file."""
        if text.lstrip().startswith("-") or not text:
            return cls(text or "as it is", shlex.split(text))
        words: list[str] = []
        for part in text.split(","):
            name, equals, value = part.partition("=")
            if name in QUANTIZATIONS and not equals:
                words += ["--quantization", name]
            else:
                words.append(f"--model={value}" if name == "gguf" else f"--{part}")
        return cls(text, words)

    def config(self, model: str, *, num_threads: int = 0) -> EngineConfig:
        """The engine's settings; a mistake in them ends the command, as on any command line."""
        config = parse_engine_config(self.words, model=model)
        own = config.device
        return replace(config, device=replace(own, num_threads=num_threads or own.num_threads))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory, a GGUF file or a Hub id")
    add("--compare", nargs="+", default=[""], metavar="FLAGS",
        help="settings, each the options of a penstock serve as one text, or in short such as "
        "int8,kv-cache-dtype=int8")  # fmt: skip
    add("--num-seqs", type=counts, default="1,8,32",
        help="numbers of concurrent sequences, comma-separated")  # fmt: skip
    add("--repeats", type=positive, default=3, help="rounds of all settings in turn")
    add("--num-threads", type=int, default=0, help="CPU threads; 0: the engine's choice")
    add("--temperature", type=float, default=0.0, help="of all requests; with 0 texts soon repeat")
    add("--limits", action="store_true", help="also measure this CPU's limits")
    add_dataset_arguments(parser)
    add_out(parser)


@dataclass(slots=True, kw_only=True)
class Side:
    """A setting, and its runs by number of sequences."""

    name: str
    core: EngineCore
    info: EngineInfo
    in_bytes: bool  # quantized weights multiply rows that were rounded to bytes
    runs: dict[int, list[Run]] = field(default_factory=dict)
    ceilings: Ceilings = field(default_factory=Ceilings)


def run(parsed: argparse.Namespace) -> int:
    """Measure all settings; print and write the tables."""
    settings = [Setting.parse(text) for text in parsed.compare]
    with ExitStack() as stack:
        sides = []
        for setting in settings:
            config = setting.config(parsed.model, num_threads=parsed.num_threads)
            most = max(config.scheduler.max_num_seqs, *parsed.num_seqs)
            scheduler = replace(config.scheduler, max_num_seqs=most)
            core, info = build_core(replace(config, scheduler=scheduler))
            stack.enter_context(closing(core))
            in_bytes = config.model.quantize_activations
            sides.append(Side(name=setting.name, core=core, info=info, in_bytes=in_bytes))
        workload = Workload(parsed, [side.info for side in sides])
        stack.enter_context(frozen_garbage())
        measure(sides, workload, parsed.num_seqs, parsed)
    info = sides[0].info
    title = (
        f"{info.model}, {info.dtype} on {info.device}, {info.num_threads} threads, commit "
        f"{commit() or 'unknown'}: {parsed.dataset}, {parsed.input_len} tokens in, "
        f"{parsed.output_len} out"
    )
    rows = [row for count in parsed.num_seqs for row in speeds(sides, count)]
    limits = [limit for count in parsed.num_seqs for limit in limit_rows(sides, count)]
    texts = [title, _speed_table(rows)]
    texts += [_limit_table(sides, limits), _LIMITS_NOTE] if limits else []
    data = {
        "settings": settings_of(parsed),
        "model": info.model,
        "commit": commit(),
        "torch": torch.__version__,
        "speeds": rows,
        "limits": limits,
    }
    publish(parsed.out, "engine", "The engine alone", "\n\n".join([*texts, _NOTES]), data)
    return 0


class Workload:
    """Draws requests that all settings can take: the dataset's first turns, as token ids."""

    def __init__(self, parsed: argparse.Namespace, infos: Sequence[EngineInfo]) -> None:
        self._parsed = parsed
        self._infos = infos
        if parsed.vocab_size is None:
            parsed.vocab_size = min(info.vocab_size for info in infos)

    def draw(self, num_seqs: int, *, seed: int, max_tokens: int | None = None) -> list[Request]:
        """Raises ConfigError if they do not fit: preempted sequences would distort figures."""
        dialogues = make_dialogues(
            self._parsed, "completions", num_dialogues=num_seqs, seed=self._parsed.seed + seed
        )
        requests = []
        for index, dialogue in enumerate(dialogues):
            turn = dialogue.turns[0]
            text = turn.text
            prompt = self._tokenizer.encode(text) if isinstance(text, str) else text
            most = min(turn.max_tokens, max_tokens or turn.max_tokens)
            requests.append(make_request(index, prompt, most, self._parsed.temperature))
        self._check(requests)
        return requests

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_directory(Path(self._infos[0].model_path))

    def _check(self, requests: Sequence[Request]) -> None:
        lengths = [
            len(request.prompt_token_ids) + request.sampling_params.max_tokens
            for request in requests
        ]
        for info in self._infos:
            if max(lengths) > info.max_model_len:
                raise ConfigError(
                    f"{max(lengths)} tokens exceed the context of {info.max_model_len}"
                )
            num_blocks = sum(-(-length // info.block_size) + 1 for length in lengths)
            if num_blocks > info.num_blocks:
                raise ConfigError(
                    f"--num-seqs {len(requests)} needs {num_blocks} KV blocks, and there are "
                    f"{info.num_blocks}"
                )


def measure(
    sides: Sequence[Side], workload: Workload, num_seqs: Sequence[int], parsed: argparse.Namespace
) -> None:
    """Run every number of sequences with every setting, once before any runs again; which setting
    is first alternates."""
    for count in num_seqs:  # the first run of a shape in a process is slow
        for side in sides:
            seed = _WARM_UP_SEED + count
            run_requests(side.core, workload.draw(count, seed=seed, max_tokens=_WARM_UP_TOKENS))
    for repeat in range(parsed.repeats):
        order = list(sides)[:: -1 if repeat % 2 else 1]
        if parsed.limits:
            for side in sides:
                side.ceilings = _raised(side)
        for number, count in enumerate(num_seqs):
            seed = repeat * len(num_seqs) + number
            for side in order:
                requests = workload.draw(count, seed=seed)
                side.runs.setdefault(count, []).append(run_requests(side.core, requests))


def _raised(side: Side) -> Ceilings:
    """The best of the side's ceilings and those of now. Raises ConfigError where there are none."""
    info, best = side.info, side.ceilings
    library = load_library(getattr(torch, info.dtype)) if info.device == "cpu" else None
    if library is None or info.quantization not in ("none", "int8", "int4", "fp8"):
        raise ConfigError("--limits are of the C kernels, in none, int8, int4 and fp8")
    library.start_threads(info.num_threads)
    kind: Any = info.quantization
    now = Ceilings.of(library, ReadWeights.of(info).num_bytes, kind, in_bytes=side.in_bytes)
    return Ceilings(
        read_bytes_per_s=max(now.read_bytes_per_s, best.read_bytes_per_s),
        products_per_s=max(now.products_per_s, best.products_per_s),
    )


# -- figures --------------------------------------------------------------------------------------

Row = Mapping[str, Any]
_RATES = ("output_tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s")


def speeds(sides: Sequence[Side], count: int) -> Sequence[Row]:
    """A row for each setting with this number of sequences."""
    first = sides[0].runs[count]
    rows = []
    for side in sides:
        runs = side.runs[count]
        steps = [step for each in runs for step in each.phase("decode")]
        step_ms = [1e3 * step.step_s for step in steps] or [0.0]
        outputs = [
            list(tokens) == list(others)
            for each, other in zip(runs, first, strict=True)
            for tokens, others in zip(each.tokens, other.tokens, strict=True)
        ]
        rates = {name: [getattr(each, name) for each in runs] for name in _RATES}
        rows.append(
            {
                "setting": side.name,
                "num_seqs": count,
                "weight_bytes": side.info.weight_bytes,
                **{name: statistics.median(values) for name, values in rates.items()},
                "rates": rates["output_tokens_per_s"],
                "times": statistics.median(
                    each.output_tokens_per_s / other.output_tokens_per_s
                    for each, other in zip(runs, first, strict=True)
                ),
                "by_cpu": _with_interval(
                    [other.cpu_s / (each.cpu_s or 1.0)
                     for each, other in zip(runs, first, strict=True)]
                ),
                "tokens_per_step": sum(step.num_tokens for step in steps) / count
                / max(len(steps), 1),
                "step_ms": float(np.percentile(step_ms, 50)),
                "step_ms_p99": float(np.percentile(step_ms, 99)),
                "python_ms": 1e3 * statistics.median([each.python_s for each in steps] or [0.0]),
                "policy_ms": 1e3 * statistics.median([each.policy_s for each in steps] or [0.0]),
                "same": sum(outputs) / len(outputs),
            }
        )  # fmt: skip
    return rows


def _with_interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Their median, and the 95% interval of it that their order gives."""
    least = max(0, int(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))
    ordered = sorted(ratios)
    return statistics.median(ratios), ordered[least], ordered[-1 - least]


def limit_rows(sides: Sequence[Side], count: int) -> Sequence[Row]:
    """The speed that the ceilings allow of each phase, and the runs' median."""
    rows = []
    for side in sides if sides[0].ceilings.products_per_s else ():
        weights = ReadWeights.of(side.info)
        for phase in ("decode", "prefill"):
            # Of a decode step, or of all prompts, of which only the last tokens meet the head.
            num_prompt = statistics.fmean(each.num_prompt_tokens for each in side.runs[count])
            num_tokens = num_prompt if phase == "prefill" else count
            num_products = num_tokens * weights.num_in_layers + count * weights.num_in_head
            bound = num_tokens / side.ceilings.bound_s(weights.num_bytes, num_products)
            name = f"{phase}_tokens_per_s"
            reached = statistics.median(getattr(each, name) for each in side.runs[count])
            rows.append(
                {"setting": side.name, "num_seqs": count, "phase": phase, "tokens_per_s": reached,
                 "bound_tokens_per_s": bound, "share": reached / bound}
            )  # fmt: skip
    return rows


# -- what is said of it ---------------------------------------------------------------------------


def _speed_table(rows: Sequence[Row]) -> str:
    columns: dict[str, Callable[[Row], str]] = {
        "setting": lambda row: row["setting"],
        "MB": lambda row: f"{row['weight_bytes'] / 1e6:,.1f}",
        "sequences": lambda row: f"{row['num_seqs']:,}",
        "tok/s": lambda row: f"{row['output_tokens_per_s']:,.0f}",
        "min–max": lambda row: f"{min(row['rates']):,.0f}–{max(row['rates']):,.0f}",
        "times": lambda row: f"{row['times']:.2f}",
        "by CPU": lambda row: "{:.3f} ({:.3f}–{:.3f})".format(*row["by_cpu"]),
        "prefill tok/s": lambda row: f"{row['prefill_tokens_per_s']:,.0f}",
        "decode tok/s": lambda row: f"{row['decode_tokens_per_s']:,.0f}",
        "tokens a step": lambda row: f"{row['tokens_per_step']:.2f}",
        "step ms": lambda row: f"{row['step_ms']:.2f}",
        "p99": lambda row: f"{row['step_ms_p99']:.2f}",
        "Python": lambda row: f"{row['python_ms']:.3f}",
        "policy": lambda row: f"{row['policy_ms']:.3f}",
        "same": lambda row: f"{row['same']:.0%}",
    }
    return table_of(rows, columns)


def _limit_table(sides: Sequence[Side], rows: Sequence[Row]) -> str:
    read = max(side.ceilings.read_bytes_per_s for side in sides) / 1e9
    products = ", ".join(f"{side.name} {side.ceilings.products_per_s / 1e9:,.0f}" for side in sides)
    columns: dict[str, Callable[[Row], str]] = {
        "setting": lambda row: row["setting"],
        "phase": lambda row: row["phase"],
        "sequences": lambda row: f"{row['num_seqs']:,}",
        "tok/s": lambda row: f"{row['tokens_per_s']:,.0f}",
        "at most": lambda row: f"{row['bound_tokens_per_s']:,.0f}",
        "share": lambda row: f"{row['share']:.0%}",
    }
    ceilings = f"Memory is read at {read:.1f} GB/s. Products a nanosecond: {products}."
    return f"{ceilings}\n\n{table_of(rows, columns)}"
