"""`penstock bench quantization`: the same weights as they are and in int8, on the CPU.

First how far logits move, on text; then tokens per second of the engine alone, in turns: machines
drift, so a figure is the median of the ratios of neighbouring runs.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product

from penstock.engine.config import (
    DEMO_MODEL,
    DTYPES,
    QUANTIZATIONS,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    Quantization,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.messages import EngineInfo
from penstock.engine.model_files import resolve_model
from penstock.engine.startup import build_core
from penstock.load.arguments import add_out, counts
from penstock.load.engine.runs import Lengths, Run, make_requests, run_requests
from penstock.load.garbage import frozen_garbage
from penstock.load.quantization.errors import Errors, held_out_texts, measure_errors
from penstock.load.tables import table, write_report

_WARM_UP_TOKENS = 8
_NOTES = """\
Error: root mean square of the logits' change, by that of the logits. Same top: positions whose
likeliest token stayed. Perplexity: of answers in conversations not trained on; of random weights it
says nothing. tok/s: output tokens of a whole run, medians; times: medians of the ratios of runs in
turns, of the whole run, of its prompts and of the steps in which all sequences decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Neighbouring runs of as many sequences."""

    as_it_is: Run
    int8: Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of what is not int8")
    parser.add_argument(
        "--num-threads", type=int, default=0, help="CPU threads; 0: the engine's choice"
    )
    parser.add_argument("--num-texts", type=int, default=20, help="to compare logits on")
    parser.add_argument(
        "--num-seqs", type=counts, default="1,8,32", help="sequences at once, with commas"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of every request")
    parser.add_argument("--output-tokens", type=int, default=64, help="of every request")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each count, in turn")
    parser.add_argument("--seed", type=int, default=0, help="of texts and prompts")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure both; print and write the tables; 0."""
    path = resolve_model(ModelConfig(model=parsed.model), weights=True)
    cores = [_build(parsed, quantization) for quantization in QUANTIZATIONS]
    info = cores[0][1]
    lengths = Lengths(prompt_tokens=parsed.prompt_tokens, output_tokens=parsed.output_tokens)
    try:
        with frozen_garbage():
            pairs = _measure_speed(cores, lengths, parsed)
    finally:
        for core, _ in cores:
            core.close()
    errors = measure_errors(
        path,
        dtype=parsed.dtype,
        texts=held_out_texts(
            path, num_texts=parsed.num_texts, seed=parsed.seed, context_len=info.max_model_len
        ),
        num_threads=parsed.num_threads or None,
    )
    title = f"{info.model}, {info.dtype} and int8, CPU threads: {info.num_threads}"
    report = "\n\n".join([title, _error_table(errors), _speed_table(pairs), _NOTES])
    print(report)
    paths = write_report(
        parsed.out,
        "quantization",
        markdown=f"# int8\n\n{report}",
        data={"model": info.model, "errors": asdict(errors), "speed": _figures(pairs)},
    )
    print("\nwrote", ", ".join(map(str, paths)))
    return 0


def _build(parsed: argparse.Namespace, quantization: Quantization) -> tuple[EngineCore, EngineInfo]:
    return build_core(
        EngineConfig(
            model=ModelConfig(model=parsed.model, dtype=parsed.dtype, quantization=quantization),
            scheduler=SchedulerConfig(
                max_num_seqs=max(SchedulerConfig().max_num_seqs, *parsed.num_seqs)
            ),
            device=DeviceConfig(device="cpu", num_threads=parsed.num_threads or None),
        )
    )


def _measure_speed(
    cores: Sequence[tuple[EngineCore, EngineInfo]], lengths: Lengths, parsed: argparse.Namespace
) -> dict[int, list[Pair]]:
    """By count of sequences; all counts once before any comes again, and who is first changes."""
    rng = random.Random(parsed.seed)

    def run_once(which: int, count: int, lengths: Lengths) -> Run:
        core, info = cores[which]
        requests = make_requests(count, lengths, vocab_size=info.vocab_size, rng=rng)
        return run_requests(core, requests, lengths)

    warm_up = replace(lengths, output_tokens=min(_WARM_UP_TOKENS, lengths.output_tokens))
    for which, count in product((0, 1), parsed.num_seqs):  # the first run of a shape is slow
        run_once(which, count, warm_up)
    pairs: dict[int, list[Pair]] = {count: [] for count in parsed.num_seqs}
    for repeat, count in product(range(parsed.repeats), parsed.num_seqs):
        first = repeat % 2
        runs = {which: run_once(which, count, lengths) for which in (first, 1 - first)}
        pairs[count].append(Pair(as_it_is=runs[0], int8=runs[1]))
    return pairs


def _error_table(errors: Errors) -> str:
    header = ("texts", "tokens", "error", "same top", "in answers", "perplexity", "in int8")
    return table(
        header,
        [
            [
                f"{errors.num_texts:,}",
                f"{errors.num_tokens:,}",
                f"{errors.relative_error:.2%}",
                f"{errors.same_top_share:.2%}",
                f"{errors.answer_same_top_share:.2%}",
                f"{errors.perplexity:,.4f}",
                f"{errors.int8_perplexity:,.4f}",
            ]
        ],
    )


def _speed_table(pairs: Mapping[int, Sequence[Pair]]) -> str:
    header = ("sequences", "tok/s", "in int8", "times", "prefill times", "decode times")
    rows = [
        [
            f"{figures['num_seqs']:,}",
            *(f"{figures[name]:,.0f}" for name in ("tokens_per_s", "int8_tokens_per_s")),
            *(f"{figures[name]:.2f}" for name in ("ratio", "prefill_ratio", "decode_ratio")),
        ]
        for figures in _figures(pairs)
    ]
    return table(header, rows)


def _figures(pairs: Mapping[int, Sequence[Pair]]) -> list[dict[str, float]]:
    return [
        {
            "num_seqs": count,
            "tokens_per_s": statistics.median(
                each.as_it_is.output_tokens_per_s for each in several
            ),
            "int8_tokens_per_s": statistics.median(
                each.int8.output_tokens_per_s for each in several
            ),
            "ratio": _ratio(several, lambda run: run.output_tokens_per_s),
            "prefill_ratio": _ratio(several, lambda run: run.prefill_tokens_per_s),
            "decode_ratio": _ratio(several, lambda run: run.decode_tokens_per_s),
        }
        for count, several in pairs.items()
    ]


def _ratio(pairs: Sequence[Pair], rate: Callable[[Run], float]) -> float:
    return statistics.median(rate(pair.int8) / rate(pair.as_it_is) for pair in pairs)
