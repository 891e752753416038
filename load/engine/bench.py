"""`penstock bench engine`: tokens per second of the engine alone, and where a step's time goes.

No gateway, no other process: requests go through an engine core of this process, by the settings a
server would have. Every count of sequences runs twice in turn, as it is for the speed and with the
parts of its steps timed. On a CPU the rate that memory can be read at is measured beside each run.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from penstock.engine.config import (
    DEMO_MODEL,
    DTYPES,
    QUANTIZATIONS,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.messages import EngineInfo
from penstock.engine.startup import build_core
from penstock.engine.text import Tokenizer
from penstock.load.arguments import add_out, counts
from penstock.load.engine import report as pages
from penstock.load.engine.call_timer import CallTimer
from penstock.load.engine.memory_use import memory_use
from penstock.load.engine.report import Cell
from penstock.load.engine.runs import (
    Lengths,
    Run,
    detokenize_s_per_token,
    make_requests,
    run_requests,
)
from penstock.load.engine.step_split import step_timer
from penstock.load.garbage import frozen_garbage
from penstock.load.memory_rate import MemoryReader
from penstock.load.tables import write_report

_WARM_UP_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEMO_MODEL, help="a directory or a Hub id")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of the weights")
    parser.add_argument(
        "--quantization", default="none", choices=QUANTIZATIONS, help="of the layers' weights"
    )
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="for it")
    parser.add_argument(
        "--num-threads", type=int, default=0, help="CPU threads; 0: the engine's choice"
    )
    parser.add_argument(
        "--deterministic", action="store_true", help="refuse what the batch could change"
    )
    parser.add_argument(
        "--num-seqs", type=counts, default="1,8,32", help="sequences at once, with commas"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of every request")
    parser.add_argument("--output-tokens", type=int, default=128, help="of every request")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each count, in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--plot", action="store_true", help="also draw where a step's time goes")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Run every count of sequences; print and write the tables; 0."""
    if parsed.prompt_tokens < 1 or parsed.output_tokens < 2 or parsed.repeats < 1:
        raise ConfigError("--prompt-tokens and --repeats must be at least 1, --output-tokens 2")
    lengths = Lengths(prompt_tokens=parsed.prompt_tokens, output_tokens=parsed.output_tokens)
    core, info = _build(parsed)
    with ExitStack() as stack:
        stack.callback(core.close)
        _check_fits(parsed, info)
        reader = None
        if info.device == "cpu":
            reader = stack.enter_context(MemoryReader(info.num_threads))
        stack.enter_context(frozen_garbage())
        cells = measure(
            core,
            info,
            lengths,
            num_seqs=parsed.num_seqs,
            repeats=parsed.repeats,
            seed=parsed.seed,
            reader=reader,
        )
    title = (
        f"{info.model}, {_types(info)} on {info.device}: {lengths.prompt_tokens} tokens in, "
        f"{lengths.output_tokens} out"
    )
    report = pages.markdown(f"{title}; CPU threads: {info.num_threads}", cells)
    print(report)
    paths = write_report(
        parsed.out,
        "engine",
        markdown=f"# The engine alone\n\n{report}",
        data=pages.figures(info, lengths, cells),
    )
    if parsed.plot:
        paths += _draw(title, cells, parsed.out / "engine.png")
    print("\nwrote", ", ".join(map(str, paths)))
    return 0


def measure(
    core: EngineCore,
    info: EngineInfo,
    lengths: Lengths,
    *,
    num_seqs: Sequence[int],
    repeats: int,
    seed: int,
    reader: MemoryReader | None = None,
) -> list[Cell]:
    """Both kinds of runs for every count of sequences, all counts once before any comes again."""
    rng, timer = random.Random(seed), step_timer(info.device)

    def run_once(count: int, timer: CallTimer | None, lengths: Lengths = lengths) -> Run:
        requests = make_requests(count, lengths, vocab_size=info.vocab_size, rng=rng)
        return run_requests(core, requests, lengths, timer=timer)

    warm_up = replace(lengths, output_tokens=min(_WARM_UP_TOKENS, lengths.output_tokens))
    for count in num_seqs:  # the first run of a shape in a process is slow
        run_once(count, None, warm_up)
    plain: dict[int, list[Run]] = {count: [] for count in num_seqs}
    split: dict[int, list[Run]] = {count: [] for count in num_seqs}
    ceilings: dict[int, list[float]] = {count: [] for count in num_seqs}
    for _ in range(repeats):
        for count in num_seqs:
            if reader is not None:
                ceilings[count].append(reader.measure())
            plain[count].append(_require_decode(run_once(count, None)))
            with timer.attached():
                split[count].append(_require_decode(run_once(count, timer)))
    return [_cell(plain[count], split[count], ceilings[count], info) for count in num_seqs]


def _cell(
    runs: Sequence[Run], split_runs: Sequence[Run], ceilings: Sequence[float], info: EngineInfo
) -> Cell:
    tokens = runs[-1].tokens
    return Cell(
        num_seqs=len(tokens),
        runs=runs,
        split_runs=split_runs,
        detokenize_s_per_token=_detokenize_s(tokens, info),
        memory=memory_use(info, runs, ceilings) if ceilings else None,
    )


def _require_decode(run: Run) -> Run:
    """The run.

    Raises:
        ConfigError: the first output was complete before the last prompt was computed.
    """
    if not run.phase("decode"):
        raise ConfigError(
            f"--output-tokens {run.lengths.output_tokens} is too few: not once did all "
            f"{len(run.tokens)} sequences decode together"
        )
    return run


def _types(info: EngineInfo) -> str:
    return info.dtype if info.quantization == "none" else f"{info.dtype} and {info.quantization}"


def _build(parsed: argparse.Namespace) -> tuple[EngineCore, EngineInfo]:
    return build_core(
        EngineConfig(
            model=ModelConfig(
                model=parsed.model, dtype=parsed.dtype, quantization=parsed.quantization
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=max(SchedulerConfig().max_num_seqs, *parsed.num_seqs)
            ),
            device=DeviceConfig(
                device=parsed.device,
                num_threads=parsed.num_threads or None,
                deterministic=parsed.deterministic,
            ),
        )
    )


def _check_fits(parsed: argparse.Namespace, info: EngineInfo) -> None:
    """Refuse lengths that do not fit: a preempted sequence would be measured too.

    Raises:
        ConfigError: with the numbers.
    """
    num_tokens = parsed.prompt_tokens + parsed.output_tokens
    if num_tokens > info.max_model_len:
        raise ConfigError(f"{num_tokens} tokens exceed the context of {info.max_model_len}")
    num_blocks = (max(parsed.num_seqs) + 1) * -(-num_tokens // info.block_size)
    if num_blocks > info.num_blocks:
        raise ConfigError(
            f"--num-seqs {max(parsed.num_seqs)} needs {num_blocks} KV blocks, and there are "
            f"{info.num_blocks}"
        )


def _detokenize_s(tokens: Sequence[Sequence[int]], info: EngineInfo) -> float | None:
    try:
        tokenizer = Tokenizer.from_directory(Path(info.model_path))
    except ModelLoadError:  # weights alone are enough for the engine
        return None
    return detokenize_s_per_token(tokens, tokenizer)


def _draw(title: str, cells: list[Cell], path: Path) -> list[Path]:
    """The picture's path, or none where it cannot be drawn."""
    try:
        pages.draw(title, cells, path)
    except ConfigError as error:
        print(f"no picture: {error}", file=sys.stderr)
        return []
    return [path]
