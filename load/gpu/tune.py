"""Finds launch configurations on this GPU: `python3 -m penstock.load.gpu.tune`.

Every candidate runs the shapes of a class. The one with the least geometric mean of its times, each
by that of the launcher's own choice, is kept if it is faster by more than timing varies; one whose
result differs never is. The table is written after each class, so that a run that is cut short
keeps what it has found.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.gpu.tuning import TABLE, Config, Table, device_name
from penstock.load.gpu.bench import Bench
from penstock.load.gpu.candidates import seconds_of
from penstock.load.gpu.command import make_bench
from penstock.load.gpu.errors import bound_of, worst_row
from penstock.load.gpu.figures import Results
from penstock.load.gpu.interpreter import interpret_kernels
from penstock.load.gpu.tunables import Tunable, tunables

_MIN_GAIN = 0.02
_NUM_SMALL = 6  # classes, so that every form is there


def main(words: Sequence[str] | None = None) -> int:
    """Tune class after class until the time is up; 0, or 2 without a GPU."""
    parsed = _parser().parse_args(words)
    if parsed.small:
        interpret_kernels()
    elif not torch.cuda.is_available():
        print("penstock: error: torch finds no GPU here; --small runs without", file=sys.stderr)
        return 2
    bench = make_bench(Results(about={}), is_small=parsed.small)
    bench.deadline_s = time.perf_counter() + parsed.budget_s
    tune(bench, parsed.table, is_small=parsed.small)
    return 0


def tune(bench: Bench, path: Path, *, is_small: bool) -> None:
    """Write what is found on this device into the table at `path`, beside other devices'."""
    table: Table = json.loads(path.read_text("utf-8")) if path.exists() else {}
    classes = tunables(bench)
    for tunable in bench.in_time("tune", islice(classes, _NUM_SMALL) if is_small else classes):
        candidates = tunable.candidates[:1] if is_small else tunable.candidates
        config, ratio = best(bench, tunable, candidates)
        print(f"    {config} takes {ratio:.3f} of the launcher's choice", flush=True)
        if ratio < 1 - _MIN_GAIN:
            of_device = table.setdefault(device_name() or "interpreter", {})
            of_device.setdefault(tunable.operation, {})[tunable.key] = config
            _write(table, path)


def best(bench: Bench, tunable: Tunable, candidates: Sequence[Config]) -> tuple[Config, float]:
    """The fastest candidate, and its times by those of the launcher's choice."""
    ratios: list[list[float]] = [[] for _ in candidates]
    for run in tunable.runs():
        expected, own_s = run(), bench.timer.median_s(run)
        for config, found in zip(candidates, ratios, strict=True):
            candidate = partial(run, config=config)
            seconds = seconds_of(bench.timer, candidate)
            if seconds < own_s and not _is_same(candidate(), expected):
                print(f"    {config} is wrong", flush=True)
                seconds = math.inf
            found.append(seconds / own_s)
    means = [statistics.geometric_mean(found) for found in ratios]
    place = min(range(len(means)), key=means.__getitem__)
    return candidates[place], means[place]


def _is_same(result: Tensor, expected: Tensor) -> bool:
    """Integers exactly, other numbers but for rounding."""
    if not result.is_floating_point():
        return torch.equal(result, expected)
    return worst_row(result, expected.double()) <= bound_of(result.dtype)


def _write(table: Table, path: Path) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    part.replace(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m penstock.load.gpu.tune", description=__doc__)
    parser.add_argument("--budget-s", type=float, default=540.0, help="for all classes together")
    parser.add_argument("--table", type=Path, default=TABLE, help="read, and written")
    parser.add_argument("--small", action="store_true", help="no tuning: a CPU, tiny shapes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
